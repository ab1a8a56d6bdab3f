"""Decode instances that compute slices of each other's batches make the tokens and logprobs that each would
make alone, whoever joins, leaves, dies or is paused meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from kvcommons.errors import DataLoss, InvalidInput, Unavailable
from kvcommons.pb import common_pb2, decode_pb2_grpc
from services.decode.config import DecodeConfig
from services.router.sessions.truncation import Context
from tests.contract.engine_stack import BLOCK, Stack, ready
from tests.contract.engine_turns import Turn, turn
from tests.contract.test_engine_pipelining import begun
from tests.contract.test_engine_truncation import Session, overflow_twice
from tests.contract.truncation_reference import Answer, TruncatedReference
from tests.machine import scaled_table

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

GREEDY = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)


def group(engines: Stack, count: int) -> dict[str, Any]:
    """Settings of a group's instances, which are called decode-0, decode-1, …"""
    return {
        "placement": "offload",
        "pipelining": "on",
        "borrow_blocks": 1,
        "slice_deadline_s": 2.0,
        "lend_share": 0.0,  # KV on an instance that dies is lost, as anywhere
        "replicas": tuple(engines.data(f"decode-{number}") for number in range(count)),
    }


def metric(engines: Stack, name: str, metric: str, **labels: str) -> float:
    return engines.processes[name].telemetry.registry.get_sample_value(metric, labels) or 0.0


def slices(engines: Stack, name: str, whose: str) -> int:
    return int(metric(engines, name, "kvcommons_slices_total", whose=whose))


async def met(engines: Stack, name: str, peers: int) -> None:
    async def has_peers() -> None:
        if metric(engines, name, "kvcommons_replica_peers") != peers:
            raise Unavailable("not yet")

    await ready(has_peers)


def prompts(engines: Stack, count: int, new: int, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    return [engines.reference.prompt(20 + 11 * n, new + 7 * n, seed + 100 * n) for n in range(count)]


def ask(engines: Stack, prefill: Any, decode: Any, tokens: list[int], new: int) -> Turn:
    return turn(prefill, decode, engines.model, tokens, new, sampling=GREEDY)


def check(engines: Stack, one: Turn, tokens: list[int], expected: list[int]) -> None:
    assert one.tokens == expected
    logprobs = engines.reference.logprobs(tokens, expected)
    assert [sampled.logprob for sampled in one.sampled] == pytest.approx(logprobs, abs=1e-4)


def decode_process(engines: Stack, name: str, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """An instance in a process of its own."""
    values = {
        "listen": engines.address(name), "data_listen": engines.data(name), "instance_id": name,
        "host": "here", "ledger": engines.ledger[0], "model": str(engines.folder), "dtype": "float32",
        "block_tokens": BLOCK, "capacity_tokens": 64 * BLOCK,
        **scaled_table(DecodeConfig, settings), "replicas": ",".join(settings["replicas"]),
    }  # fmt: skip
    flags = [f"--set={key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "services.decode", f"--parent-pid={os.getpid()}", *flags]
    with (engines.runtime / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
    engines.children.append(child)
    return child


@pytest.mark.parametrize(
    ("engines", "count"), [("llama", 2), ("llama", 3), ("qwen2-sliding", 2)], indirect=["engines"]
)
async def test_tokens_and_logprobs_are_the_reference_at_each_instance(engines: Stack, count: int) -> None:
    """They join one after another, grow by a block at a time, end at different times; one is cancelled."""
    await engines.lenders(60, 60)
    prefill = await engines.prefill()
    names = [f"decode-{number}" for number in range(count)]
    modes = ["on", *["auto"] * (count - 1)]  # the others hear from the first
    decodes = [
        await engines.decode(name, **group(engines, count) | {"pipelining": mode})
        for name, mode in zip(names, modes, strict=True)
    ]
    for name in names:
        await met(engines, name, count - 1)
    made = prompts(engines, 2 * count + 1, 25)
    turns = [
        ask(engines, prefill, decodes[number % count], tokens, len(expected))
        for number, (tokens, expected) in enumerate(made)
    ]
    tasks = []
    for one in turns:
        tasks.append(asyncio.create_task(one.run()))
        await begun(one)
    tasks[-1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for one, (tokens, expected) in list(zip(turns, made, strict=True))[:-1]:
        check(engines, one, tokens, expected)
    for name in names:
        assert slices(engines, name, "by_peers")
        assert slices(engines, name, "for_peers")
        assert not slices(engines, name, "instead_of_peers")
    by, of = ([slices(engines, name, whose) for name in names] for whose in ("by_peers", "for_peers"))
    assert sum(by) <= sum(of)  # a batch that fails after its slice was computed is counted there only
    await engines.idle(*names, "pool-0", "pool-1")
    for name in names:
        await engines.stop(name)
    assert not [one.name for one in threading.enumerate() if one.name.startswith("decode-")]


async def test_a_group_becomes_idle_and_serves_again(engines: Stack) -> None:
    """The first one decides by what plain iterations took, also when nothing runs any more. KV is here and
    sequences run one by one: all of an iteration's time seems to depend on how many they are."""
    await engines.lenders(10)
    prefill = await engines.prefill()
    settings = group(engines, 2) | {"placement": "local", "pipelining": "auto"}
    decodes = [await engines.decode(f"decode-{number}", **settings) for number in range(2)]
    for number in range(2):
        await met(engines, f"decode-{number}", 1)
    for decode in (decodes[0], decodes[0], decodes[1], decodes[0]):
        tokens, expected = engines.reference.prompt(20, 10)
        one = await ask(engines, prefill, decode, tokens, len(expected)).run()
        check(engines, one, tokens, expected)
        await engines.idle("decode-0", "decode-1")


@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
async def test_a_peer_dies_or_is_paused_in_the_middle(engines: Stack, how: signal.Signals) -> None:
    """Its slices are computed by their owner; one that comes back is given slices again."""
    await engines.lenders(60)
    prefill = await engines.prefill()
    settings = group(engines, 2) | {"slice_deadline_s": 1.5}
    peer = decode_process(engines, "decode-1", settings)
    decode = await engines.decode("decode-0", **settings)
    await met(engines, "decode-0", 1)
    made = prompts(engines, 4, 70)
    turns = [ask(engines, prefill, decode, tokens, len(expected)) for tokens, expected in made]
    tasks = []
    for one in turns:
        tasks.append(asyncio.create_task(one.run()))
        await begun(one, 5)
    before = slices(engines, "decode-0", "by_peers")
    assert before
    peer.send_signal(how)
    await asyncio.gather(*tasks)
    for one, (tokens, expected) in zip(turns, made, strict=True):
        check(engines, one, tokens, expected)
    assert slices(engines, "decode-0", "instead_of_peers")
    if how is signal.SIGSTOP:
        await met(engines, "decode-0", 0)
        peer.send_signal(signal.SIGCONT)
        await met(engines, "decode-0", 1)
        before = slices(engines, "decode-0", "by_peers")
        tokens, expected = made[0]
        again = await ask(engines, prefill, decode, tokens, len(expected)).run()
        check(engines, again, tokens, expected)
        assert slices(engines, "decode-0", "by_peers") > before
    await engines.idle("decode-0", "pool-0")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_peers_are_paused_and_killed_at_random_moments(engines: Stack, seed: int) -> None:
    await engines.lenders(60)
    prefill = await engines.prefill()
    settings = group(engines, 3) | {"slice_deadline_s": 0.1}
    peers = [decode_process(engines, f"decode-{number}", settings) for number in (1, 2)]
    decode = await engines.decode("decode-0", **settings)
    await met(engines, "decode-0", 2)
    made = prompts(engines, 6, 150, 1000 * seed)
    turns = [ask(engines, prefill, decode, tokens, len(expected)) for tokens, expected in made]
    tasks = [asyncio.create_task(one.run()) for one in turns]
    dice, pauses = random.Random(seed), 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(dice.uniform(0.05, 0.5))
        peer = dice.choice(peers)
        peer.send_signal(signal.SIGSTOP)
        await asyncio.sleep(dice.uniform(0.05, 0.5))
        peer.send_signal(signal.SIGCONT)
        pauses += 1
        if pauses == 8:
            peers.pop(dice.randrange(2)).kill()
    for one, (tokens, expected), task in zip(turns, made, tasks, strict=True):
        await task
        check(engines, one, tokens, expected)
    assert slices(engines, "decode-0", "by_peers")
    await engines.idle("decode-0", "pool-0")


async def test_an_owner_dies_and_the_others_go_on(engines: Stack) -> None:
    """What it had asked for is computed for nobody; its sequences' blocks come back with their leases."""
    await engines.lenders(60)
    prefill = await engines.prefill()
    settings = group(engines, 2)
    owner = decode_process(engines, "decode-1", settings | {"lease_ms": 3000})
    decode = await engines.decode("decode-0", **settings)
    await met(engines, "decode-0", 1)
    stub = decode_pb2_grpc.DecodeStub(engines.channel("decode-1"))
    (lost_tokens, lost_expected), *made = prompts(engines, 4, 100)
    lost = ask(engines, prefill, stub, lost_tokens, len(lost_expected))
    turns = [ask(engines, prefill, decode, tokens, len(expected)) for tokens, expected in made]
    dying = asyncio.create_task(lost.run())
    tasks = [asyncio.create_task(one.run()) for one in turns]
    await begun(lost, 3)
    owner.kill()
    await asyncio.gather(*tasks)
    with pytest.raises((Unavailable, DataLoss)):
        await dying
    for one, (tokens, expected) in zip(turns, made, strict=True):
        check(engines, one, tokens, expected)
    assert lost.tokens == lost_expected[: len(lost.tokens)]
    await engines.idle("decode-0", "pool-0")


@pytest.mark.parametrize("engines", ["qwen3"], indirect=True)
async def test_queries_behind_truncations_are_shifted_at_home(engines: Stack) -> None:
    """For keys of a kept head a query is rotated once more, from what the other replica had before."""
    session = Session(engines, TruncatedReference(engines.folder))
    store, prefill = await engines.kvstore(), await engines.prefill()
    settings = group(engines, 2) | {"placement": "local"}
    decode, _ = [await engines.decode(f"decode-{number}", **settings) for number in range(2)]
    await met(engines, "decode-0", 1)
    found = 0

    async def run(number: int, context: Context, expected: Answer) -> None:
        nonlocal found
        if number in (1, 3):
            found = context.now.since_block
        await session.answer(prefill, decode, context, expected, history=engines.history(found))
        found = await session.kept(store, context)

    await overflow_twice(session, 2, run)
    assert slices(engines, "decode-1", "for_peers")
    assert not slices(engines, "decode-0", "instead_of_peers")
    await engines.idle("decode-0", "decode-1")


async def test_a_peer_with_another_model_is_refused(engines: Stack, caplog: pytest.LogCaptureFixture) -> None:
    await engines.lenders(60)
    prefill = await engines.prefill()
    settings = group(engines, 2)
    with caplog.at_level(logging.ERROR, logger="services.decode.staggering.peers"):
        await engines.decode("decode-1", **settings, engine={"block_tokens": 2 * BLOCK})
        decode = await engines.decode("decode-0", **settings)
        tokens, expected = engines.reference.prompt(40, 30)
        one = await ask(engines, prefill, decode, tokens, 30).run()

        async def said() -> None:
            if not any("of one model" in str(getattr(one, "reason", "")) for one in caplog.records):
                raise Unavailable("not yet")

        await ready(said)
    check(engines, one, tokens, expected)
    assert slices(engines, "decode-0", "instead_of_peers")
    assert not slices(engines, "decode-1", "for_peers")
    assert not metric(engines, "decode-0", "kvcommons_replica_peers")


async def test_an_instance_has_to_be_of_its_group(engines: Stack) -> None:
    await engines.lenders(10)
    starting = asyncio.create_task(engines.decode("decode-9", **group(engines, 2)))
    while "decode-9" not in engines.tasks:
        await asyncio.sleep(0.01)
    with pytest.raises(InvalidInput, match="replicas"):
        await asyncio.wait_for(engines.tasks.pop("decode-9"), 15)
    starting.cancel()
