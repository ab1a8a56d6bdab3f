"""Two batches that take turns at the model and at the pool give the tokens that one batch gives, whoever
joins, leaves, grows or is lost meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque

import pytest

from kvcommons.engine.engine import Engine
from kvcommons.engine.mailbox import Command, Mailbox
from kvcommons.errors import DataLoss, Internal, Unavailable
from services.decode.staggering.lanes import Pipelining
from tests.contract.engine_stack import SlowIterations, Stack, ready
from tests.contract.engine_turns import Turn, turn
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


def lanes() -> set[str]:
    """Threads that iterate."""
    return {one.name for one in threading.enumerate() if one.name.startswith("decode-lane-")}


async def begun(one: Turn, tokens: int = 1) -> None:
    async def has_tokens() -> None:
        if len(one.tokens) < tokens:
            raise DataLoss("not yet")

    await ready(has_tokens)


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
@pytest.mark.parametrize("threads", [1, 2])
async def test_tokens_are_the_reference_in_both_batches(engines: Stack, threads: int) -> None:
    """They join one after another, grow by a block each time, and end at different times: in turns at the
    model, or each with a thread of its own for it."""
    await engines.lenders(40, 40)
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="offload", pipelining="on", borrow_blocks=1, engine={"threads": threads}
    )
    made = [engines.reference.prompt(20 + 17 * n, 30 + 10 * n, 100 * n + 1) for n in range(6)]
    turns = [turn(prefill, decode, engines.model, tokens, 30 + 10 * n) for n, (tokens, _) in enumerate(made)]
    tasks = []
    for one in turns:
        tasks.append(asyncio.create_task(one.run()))
        await begun(one)
    await asyncio.gather(*tasks)
    assert [one.tokens for one in turns] == [expected for _, expected in made]
    assert lanes() == {"decode-lane-0", "decode-lane-1"}
    await engines.idle("decode", "pool-0", "pool-1")


@pytest.mark.usefixtures("unhurried")
async def test_blocks_here_and_elsewhere_and_one_sequence_that_leaves(engines: Stack) -> None:
    """`overflow`: decode's own blocks run out, and one that is cancelled gives its own back at once."""
    await engines.lenders(40)
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="overflow", pipelining="on", borrow_blocks=1, engine={"capacity_tokens": 12 * 16}
    )
    made = [engines.reference.prompt(30 + 13 * n, 60, 100 * n + 1) for n in range(4)]
    turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in made]
    tasks = [asyncio.create_task(one.run()) for one in turns]
    await begun(turns[1], 5)
    tasks[1].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[1], asyncio.CancelledError)
    for number in (0, 2, 3):
        assert turns[number].tokens == made[number][1]
    await engines.idle("decode", "pool-0")


async def test_a_holder_is_killed_and_the_others_go_on(engines: Stack, unhurried: SlowIterations) -> None:
    pools = await engines.lenders(40, 40, process=True)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", pipelining="on", attend_deadline_s=5.0)
    made = [engines.reference.prompt(40 + 3 * n, 120, 100 * n + 1) for n in range(4)]
    turns = [turn(prefill, decode, engines.model, tokens, 120) for tokens, _ in made]
    tasks = []
    for one in turns:
        tasks.append(asyncio.create_task(one.run()))
        await begun(one)
    pools[0].kill()
    unhurried.over()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    lost = [one for one in done if isinstance(one, DataLoss)]
    assert 0 < len(lost) < 4  # how many lay there follows from how long they were when the next one came
    for one, result, (_, expected) in zip(turns, done, made, strict=True):
        assert one.tokens == expected[: len(one.tokens)]
        assert isinstance(result, DataLoss) or one.tokens == expected
    await engines.idle("decode", "pool-1")


async def test_an_error_that_lasts_fails_sequences_and_takes_no_core(
    engines: Stack, unhurried: SlowIterations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while a sequence runs. The loop comes by with each command, not again and again, and serves
    once the error is gone."""
    failed, failing, waits_s = 0, None, list[float | None]()
    take = Mailbox.take

    def fail(pipelining: Pipelining, sequences: int, tokens: int) -> int:
        nonlocal failed, failing
        failed, failing = failed + 1, threading.current_thread()
        raise RuntimeError("on purpose")

    def noting(mailbox: Mailbox, wait_s: float | None) -> deque[Command] | None:
        if threading.current_thread() is failing:
            waits_s.append(wait_s)
        return take(mailbox, wait_s)

    await engines.lenders(10)
    prefill, decode = await engines.prefill(), await engines.decode()
    tokens, expected = engines.reference.prompt(20, 200)
    one, again = (turn(prefill, decode, engines.model, tokens, 200) for _ in range(2))
    running = asyncio.create_task(one.run())
    await begun(one, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Pipelining, "batches", fail)
        patch.setattr(Mailbox, "take", noting)
        with pytest.raises(Internal, match="unexpectedly"):
            await running
        await eventually(lambda: waits_s[-1:] == [None], "the loop waits until it is asked for something")
    assert 1 <= failed < 20
    unhurried.over()
    await again.run()
    assert again.tokens == expected
    await engines.idle("decode")


async def test_by_itself_it_begins_where_the_batch_is_large_enough_only(engines: Stack) -> None:
    """Three sequences are too few, whatever was measured."""
    await engines.lenders(40)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload")
    made = [engines.reference.prompt(20 + 3 * n, 30, 100 * n + 1) for n in range(3)]
    turns = [turn(prefill, decode, engines.model, tokens, 30) for tokens, _ in made]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in made]
    assert not lanes()
    await engines.idle("decode", "pool-0")


@pytest.mark.usefixtures("unhurried")
async def test_an_engine_that_stops_takes_what_both_batches_bring(
    engines: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await engines.lenders(40)
    prefill = await engines.prefill()
    started, start = list[Engine](), Engine.start
    monkeypatch.setattr(Engine, "start", lambda engine: (started.append(engine), start(engine)))
    decode = await engines.decode(placement="offload", pipelining="on")
    made = [engines.reference.prompt(20 + n, 200, 100 * n + 1) for n in range(4)]
    turns = [turn(prefill, decode, engines.model, tokens, 200) for tokens, _ in made]
    tasks = [asyncio.create_task(one.run()) for one in turns]
    for one in turns:
        await begun(one, 3)
    with caplog.at_level(logging.ERROR):
        started[-1].stop(scaled(10.0))
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in done), done
    for one, (_, expected) in zip(turns, made, strict=True):
        assert one.tokens == expected[: len(one.tokens)]
    assert "the engine's loop failed" not in caplog.text
