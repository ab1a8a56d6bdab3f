"""Sequences whose KV moves while they decode: home, to another holder, in a swap of debts. Their tokens are
those of transformers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kvcommons.errors import CapacityExhausted, Conflict, KVCommonsError, NotFound
from kvcommons.pb import holder_pb2, holder_pb2_grpc
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack, ready
from tests.contract.engine_turns import Turn, prompt, turn
from tests.machine import scaled

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("none_comes_home_by_itself")]
pytest_plugins = ("tests.contract.engine_fixtures",)

LEASE_MS = scaled(20_000)
PAIR = ("a", "b")


def debtor(engines: Stack, name: str = "decode") -> Any:
    return holder_pb2_grpc.DebtorStub(engines.channel(name))


async def ballast(engines: Stack, decode: Any, tokens: int) -> Any:
    """Holds blocks for so many tokens until it is cancelled."""
    call = decode.Generate(turn(None, decode, engines.model, prompt(tokens), 5).request, timeout=scaled(60))
    await anext(aiter(call))
    return call


async def running(one: Turn) -> asyncio.Task[Any]:
    task = asyncio.create_task(one.run())

    async def has_tokens() -> None:
        if len(one.tokens) < 2:
            raise CapacityExhausted("not yet")

    await ready(has_tokens)
    return task


async def lent(engines: Stack, name: str) -> int:
    return (await engines.inspect(name)).lent_blocks


async def room(engines: Stack, name: str, blocks: int) -> None:
    if (await engines.inspect(name)).free_blocks < blocks:
        raise CapacityExhausted("not yet")


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_kv_comes_home_when_its_creditor_calls_it_back(
    engines: Stack, unhurried: SlowIterations
) -> None:
    await engines.lenders(24)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 40 * BLOCK})
    holding = await ballast(engines, decode, 30 * BLOCK - 8)
    tokens, expected = engines.reference.prompt(260, 140)
    one = turn(prefill, decode, engines.model, tokens, 140)
    task = await running(one)
    before = await lent(engines, "pool-0")
    assert before >= 8
    call = holder_pb2.CallBackRequest(creditor="pool-0", blocks=3)
    holding.cancel()
    await ready(lambda: room(engines, "decode", 14))
    reply = await debtor(engines).CallBack(call, timeout=scaled(20))
    assert (reply.home_blocks, reply.moved_blocks) == (3, 0)
    assert await lent(engines, "pool-0") == before - 3
    call.blocks = 100
    assert (await debtor(engines).CallBack(call, timeout=scaled(20))).home_blocks >= before - 4
    unhurried.over()
    made = await task
    assert made.tokens == expected
    await engines.idle("decode", "pool-0")


async def test_kv_comes_home_when_there_is_room(
    engines: Stack, monkeypatch: pytest.MonkeyPatch, unhurried: SlowIterations
) -> None:
    monkeypatch.setattr("services.decode.moving.mover.HOMECOMING_S", 0.05)
    await engines.lenders(24)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 40 * BLOCK})
    holding = await ballast(engines, decode, 30 * BLOCK - 8)
    tokens, expected = engines.reference.prompt(260, 200)
    one = turn(prefill, decode, engines.model, tokens, 200)
    task = await running(one)
    assert await lent(engines, "pool-0") >= 8
    holding.cancel()

    async def home() -> None:
        if await lent(engines, "pool-0") > 1:
            raise CapacityExhausted("not yet")

    # What comes home comes in its own time; the sequence has to be there until then.
    unhurried.take(scaled(0.06))
    await ready(home)
    assert not task.done()
    unhurried.over()
    assert (await task).tokens == expected
    await engines.idle("decode", "pool-0")


async def test_whoever_asked_goes_away_and_nothing_is_left_in_the_middle(engines: Stack) -> None:
    """A call back that is given up at any of its steps: what it began is finished or undone."""
    await engines.lenders(24)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 40 * BLOCK})
    holding = await ballast(engines, decode, 30 * BLOCK - 8)
    tokens, expected = engines.reference.prompt(260, 140)
    one = turn(prefill, decode, engines.model, tokens, 140)
    task = await running(one)
    holding.cancel()
    await ready(lambda: room(engines, "decode", 14))
    for timeout_s in (0.001, 0.002, 0.004, 0.008, 0.016):
        with contextlib.suppress(KVCommonsError):
            call = holder_pb2.CallBackRequest(creditor="pool-0", blocks=1)
            await debtor(engines).CallBack(call, timeout=timeout_s)
    assert (await task).tokens == expected
    await engines.idle("decode", "pool-0")


async def test_kv_moves_from_one_holder_to_another(engines: Stack, unhurried: SlowIterations) -> None:
    await engines.lenders(20, 20)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 6 * BLOCK})
    tokens, expected = engines.reference.prompt(260, 120)
    one = turn(prefill, decode, engines.model, tokens, 120)
    task = await running(one)
    names = ("pool-0", "pool-1")
    before = {name: await lent(engines, name) for name in names}
    source = max(names, key=lambda name: before[name])
    call = holder_pb2.CallBackRequest(creditor=source, blocks=7)
    reply = await debtor(engines).CallBack(call, timeout=scaled(20))
    assert (reply.home_blocks + reply.moved_blocks, reply.moved_blocks > 0) == (7, True)
    assert await lent(engines, source) <= before[source] - 7 + 3  # it may have grown there meanwhile
    unhurried.over()
    made = await task
    assert made.tokens == expected
    await engines.idle("decode", *names)


async def two_that_owe_each_other(
    engines: Stack, make: Callable[[int, Any, Any], Turn]
) -> list[asyncio.Task[Any]]:
    """Instances "a" and "b", each with a sequence that lies at the other one too: `make` says of what number,
    prefill and decode."""
    await engines.lenders()
    prefill = await engines.prefill()
    memory = {"capacity_tokens": 28 * BLOCK}  # 25 for each sequence at its end, and what is pledged
    kinds = {"placement": "overflow", "engine": memory, "lend_share": 0.5, "borrow_blocks": 1}
    decodes = [await engines.decode(name, **kinds) for name in PAIR]
    await engines.lending(*PAIR)
    tasks = []
    for number, decode in enumerate(decodes):
        free = (await engines.inspect(PAIR[number])).free_blocks
        holding = await ballast(engines, decode, (free - 3) * BLOCK - 8)
        tasks.append(await running(make(number, prefill, decode)))
        holding.cancel()
        await ready(lambda name=PAIR[number]: room(engines, name, 10))
    return tasks


async def pair_of_known_answers(engines: Stack) -> tuple[list[asyncio.Task[Any]], list[list[int]]]:
    """Two that owe each other, and what transformers answers."""
    known = [engines.reference.prompt(150, 250, 1 + 100 * number) for number in range(2)]

    def make(number: int, prefill: Any, decode: Any) -> Turn:
        return turn(prefill, decode, engines.model, known[number][0], 250)

    return await two_that_owe_each_other(engines, make), [following for _, following in known]


async def swap_in_rounds(engines: Stack) -> None:
    """Two rounds of two blocks between those that owe each other, each step asked for twice."""
    stubs = {name: debtor(engines, name) for name in PAIR}
    owed = {name: await lent(engines, name) for name in stubs}
    assert min(owed.values()) >= 4
    common: dict[str, Any] = {"settlement": "s1", "term": 3, "lease_ms": LEASE_MS}
    for stub in stubs.values():
        prepare = holder_pb2.PrepareRequest(blocks=2, **common)
        assert [(await stub.Prepare(prepare, timeout=scaled(5))).blocks for _ in range(2)] == [2, 2]
    for number in (1, 2):
        for name, stub in stubs.items():
            freeze = holder_pb2.FreezeDebtRequest(
                round=number, creditor="b" if name == "a" else "a", blocks=9, **common
            )
            assert [(await stub.FreezeDebt(freeze, timeout=scaled(5))).blocks for _ in range(2)] == [2, 2]
        request = holder_pb2.RoundRequest(round=number, **common)
        for step in ("CopyHome", "SwitchHome", "ReleaseDebt"):
            for stub in stubs.values():
                replies = [await getattr(stub, step)(request, timeout=scaled(20)) for _ in range(2)]
                assert [(reply.blocks, reply.ended_blocks) for reply in replies] == [(2, 0), (2, 0)]
        # What the other one gave back here is set aside for the next round.
        assert {(await engines.inspect(name)).pledged_blocks for name in stubs} == {2}
    with pytest.raises(Conflict, match="leader of term 3"):
        await stubs["a"].End(holder_pb2.EndRequest(settlement="s1", term=2), timeout=scaled(5))
    for stub in stubs.values():
        await stub.End(holder_pb2.EndRequest(settlement="s1", term=3), timeout=scaled(5))
        with pytest.raises(NotFound):
            await stub.CopyHome(request, timeout=scaled(5))
    for name in stubs:
        seen = await engines.inspect(name)
        assert (seen.pledged_blocks, seen.lent_blocks) == (0, owed[name] - 4)


async def test_debts_are_swapped_in_rounds_while_both_decode(
    engines: Stack, unhurried: SlowIterations
) -> None:
    tasks, expected = await pair_of_known_answers(engines)
    await swap_in_rounds(engines)
    unhurried.over()
    assert [(await task).tokens for task in tasks] == expected
    await engines.idle(*PAIR)


async def test_a_leader_that_vanishes_leaves_nothing_half_done(
    engines: Stack, unhurried: SlowIterations
) -> None:
    """At a: copied, not switched, so it is undone; at b: switched, so it is finished."""
    tasks, expected = await pair_of_known_answers(engines)
    stubs = {name: debtor(engines, name) for name in PAIR}
    owed = {name: await lent(engines, name) for name in stubs}
    common: dict[str, Any] = {"settlement": "s2", "term": 1, "lease_ms": LEASE_MS}
    for name, stub in stubs.items():
        await stub.Prepare(holder_pb2.PrepareRequest(blocks=2, **common), timeout=scaled(5))
        freeze = holder_pb2.FreezeDebtRequest(
            round=1, creditor="b" if name == "a" else "a", blocks=2, **common
        )
        await stub.FreezeDebt(freeze, timeout=scaled(5))
        last = common | {"lease_ms": 300}  # soon over: the sequences must not end before
        if name == "a":
            await stub.CopyHome(holder_pb2.RoundRequest(round=1, **last), timeout=scaled(20))
        else:
            await stub.CopyHome(holder_pb2.RoundRequest(round=1, **common), timeout=scaled(20))
            await stub.SwitchHome(holder_pb2.RoundRequest(round=1, **last), timeout=scaled(20))

    async def ended() -> None:
        now = {name: await lent(engines, name) for name in stubs}
        if now != {"a": owed["a"] - 2, "b": owed["b"]}:
            raise CapacityExhausted("not yet")

    await ready(ended)
    assert [(await engines.inspect(name)).pledged_blocks for name in stubs] == [0, 0]
    unhurried.over()
    assert [(await task).tokens for task in tasks] == expected
    await engines.idle(*PAIR)
