"""Holders that join a sequence while its prompt is computed (placement `grow`): the tokens are those of
transformers, and nobody keeps a block, whatever happens in the middle."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvcommons.errors import CapacityExhausted, KVCommonsError, Overloaded
from kvcommons.pb.common_pb2 import SegmentPlace
from services.decode.arrival.growth import Growth
from tests.contract.engine_stack import BLOCK, CHUNK, SlowIterations, Stack, prefill_idle
from tests.contract.engine_turns import Turn, turn
from tests.contract.test_engine_reuse import stored
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

PROMPT, ANSWER = 250, 20
BLOCKS = -(-(PROMPT + 1) // BLOCK)
SHARE = 4  # blocks on each holder
SMALL = {"capacity_tokens": 6 * BLOCK}
GROW: dict[str, Any] = {"placement": "grow", "holder_tokens": SHARE * BLOCK, "borrow_blocks": 1}
WAIT_S = scaled(20.0)


async def lent(engines: Stack, *names: str) -> int:
    return sum([len((await engines.inspect(name)).segments) for name in names])


async def until_lent(engines: Stack, segments: int, *names: str) -> None:
    async def joined() -> bool:
        return await lent(engines, *names) >= segments

    await eventually(joined, "a further holder joins")


def reserved_blocks(one: Turn) -> int:
    assert one.reserved is not None
    return sum(placed.blocks for placed in one.reserved.placements)


@pytest.mark.parametrize("memory", [SMALL, {}], ids=["spread", "whole"])
@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_holders_join_while_the_prompt_is_computed(
    engines: Stack, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beyond prefill's memory attend over the holders so far, others are pushed to them. A quarter of
    the prompt is reserved at first; each time that more is asked for, one holder joins."""
    pools = ("pool-0", "pool-1", "pool-2")
    places, joined = Growth.places, []

    async def recorded(growth: Growth, key: int, **asked: int) -> list[SegmentPlace]:
        found = await places(growth, key, **asked)
        joined.append((one.first is None, await lent(engines, *pools), len(found)))
        return found

    monkeypatch.setattr(Growth, "places", recorded)
    await engines.lenders(24, 24, 24)
    prefill, decode = await engines.prefill(engine=memory), await engines.decode(**GROW)
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    one = turn(prefill, decode, engines.model, tokens, ANSWER)
    assert (await one.run()).tokens == expected
    assert reserved_blocks(one) == SHARE
    assert joined == [(True, 1, 1), (True, 2, 1), (True, 3, 1)]
    await engines.idle("decode", *pools)
    await prefill_idle(prefill)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("memory", [SMALL, {}], ids=["spread", "whole"])
async def test_holders_with_weights_generate_meanwhile(engines: Stack, memory: dict[str, Any]) -> None:
    """Two decode instances, each of which holds a part of what the other one answers: the second one goes on
    with an answer of its own while the prompt of the first is computed over what it holds, and answered."""
    await engines.lenders()
    prefill = await engines.prefill(engine=memory)
    decodes = [await engines.decode(name, **GROW) for name in ("d1", "d2")]
    await engines.lending("d1", "d2")
    tokens, expected = engines.reference.prompt(PROMPT, 10)
    others, following = engines.reference.prompt(100, 60)
    one = turn(prefill, decodes[0], engines.model, tokens, 10)
    other = turn(prefill, decodes[1], engines.model, others, 60)
    running = asyncio.create_task(other.run())
    await eventually(lambda: len(other.tokens) > 1, "it generates")
    assert await lent_blocks(engines, "d1") >= 7 - SHARE, "what of it lies beyond its share"
    assert not await lent_blocks(engines, "d2")
    asked = asyncio.create_task(one.run())
    await until_lent(engines, 1, "d2")
    before = len(other.tokens)
    await eventually(lambda: len(one.tokens) > 1, "the first one is answered")
    assert await lent_blocks(engines, "d2") >= BLOCKS - SHARE
    assert (await asked).tokens == expected
    assert before < len(other.tokens) < 60, "it generated all the while"
    assert (await running).tokens == following
    await engines.idle("d1", "d2")
    await prefill_idle(prefill)


async def lent_blocks(engines: Stack, name: str) -> int:
    return (await engines.inspect(name)).lent_blocks


async def test_history_is_fetched_to_the_first_holders_and_others_join(engines: Stack) -> None:
    await engines.lenders(10, 10, 10)
    store, prefill = await engines.kvstore(), await engines.prefill(engine=SMALL)
    decode = await engines.decode(**GROW)
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    known = 6 * BLOCK
    first = turn(prefill, decode, engines.model, tokens[:known], 1, history=engines.history(0))
    await first.run()
    assert await stored(engines, store, tokens[:known]) == 6
    await engines.idle("decode", "pool-0", "pool-1", "pool-2")
    fresh = await engines.decode("d2", **GROW)
    one = turn(prefill, fresh, engines.model, tokens, ANSWER, history=engines.history(6))
    assert (await one.run()).tokens == expected
    assert reserved_blocks(one) == 2 * SHARE, "as far as its history reaches"
    assert one.first is not None
    assert one.first.cached_tokens == 6 * BLOCK
    assert await stored(engines, store, tokens[: PROMPT // BLOCK * BLOCK]) == PROMPT // BLOCK
    await engines.idle("d2", "pool-0", "pool-1", "pool-2")


async def test_a_prompt_that_memory_runs_out_for_says_how_much_is_missing(engines: Stack) -> None:
    await engines.lenders(5)
    prefill = await engines.prefill(engine=SMALL)
    decode = await engines.decode(**GROW, grow_wait_s=0.3, engine={"capacity_tokens": 6 * BLOCK})
    tokens, _ = engines.reference.prompt(PROMPT, ANSWER)
    missing = rf"of its {BLOCKS} blocks of KV.*: \d are missing, which is \d\d+ tokens"
    with pytest.raises(CapacityExhausted, match=missing):
        await turn(prefill, decode, engines.model, tokens, ANSWER).run()
    await engines.idle("decode", "pool-0")
    await prefill_idle(prefill)


async def test_what_others_do_not_lend_is_taken_here(engines: Stack) -> None:
    """A share is of memory that others lend; beyond that this instance's own is better than none."""
    await engines.lenders(SHARE)
    prefill, decode = await engines.prefill(engine=SMALL), await engines.decode(**GROW)
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    one = turn(prefill, decode, engines.model, tokens, ANSWER)
    assert (await one.run()).tokens == expected
    await engines.idle("decode", "pool-0")


async def test_a_cancelled_prompt_gives_back_what_has_joined(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = ("pool-0", "pool-1")
    await engines.lenders(24, 24)
    prefill, decode = await engines.prefill(engine=SMALL), await engines.decode(**GROW)
    tokens, _ = engines.reference.prompt(PROMPT, ANSWER)
    SlowIterations(monkeypatch, 0.1)
    running = asyncio.create_task(turn(prefill, decode, engines.model, tokens, ANSWER).run())
    await until_lent(engines, 2, *pools)
    running.cancel()
    await asyncio.wait((running,))
    await engines.idle("decode", *pools)
    await prefill_idle(prefill)


async def test_a_holder_that_is_killed_in_the_middle(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt ends with an error that is worth another attempt, which finds room elsewhere."""
    (killed,) = await engines.lenders(24, process=True)
    prefill, decode = await engines.prefill(engine=SMALL), await engines.decode(**GROW, lease_ms=1000)
    tokens, expected = engines.reference.prompt(PROMPT, ANSWER)
    slow = SlowIterations(monkeypatch, 0.1)
    running = asyncio.create_task(turn(prefill, decode, engines.model, tokens, ANSWER).run())
    await until_lent(engines, 1, "pool-0")
    killed.kill()
    with pytest.raises(KVCommonsError):
        await running
    slow.over()
    await engines.idle("decode")
    await prefill_idle(prefill)
    again = turn(prefill, decode, engines.model, tokens, ANSWER)
    assert (await again.run()).tokens == expected
    await engines.idle("decode")


async def test_two_prompts_that_compete_for_the_last_memory_both_come_to_their_end(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds about half of what there is and wants more: the younger one gives up, and begins again when
    there is room, as a router has it."""
    await engines.lenders(SHARE * 3)
    prefill = await engines.prefill(chunk_tokens=CHUNK)
    room = {"capacity_tokens": (2 * SHARE + 2) * BLOCK}
    decode = await engines.decode(**GROW, grow_wait_s=scaled(2.0), engine=room)
    made = [engines.reference.prompt(PROMPT, ANSWER, seed) for seed in (1, 100)]
    slow = SlowIterations(monkeypatch, 0.05)
    given_up: list[int] = []

    async def persistently(number: int, tokens: list[int]) -> list[int]:
        until = time.monotonic() + 2 * WAIT_S
        while True:
            one = turn(prefill, decode, engines.model, tokens, ANSWER, request_id=f"r{number}")
            try:
                return (await one.run()).tokens
            except Overloaded:
                given_up.append(number)
                assert time.monotonic() < until, "it never gets its memory"
                await asyncio.sleep(0.1)

    tasks = []
    for number, (tokens, _) in enumerate(made):
        tasks.append(asyncio.create_task(persistently(number, tokens)))
        await asyncio.sleep(0.05)
    answers = await asyncio.gather(*tasks)
    slow.over()
    assert answers == [expected for _, expected in made]
    assert set(given_up) == {1}, "the older one goes on, the younger one gives up"
    await engines.idle("decode", "pool-0")
    await prefill_idle(prefill)
