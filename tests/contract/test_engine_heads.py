"""Sequences whose KV lies on head groups: each pool has all of their tokens and a share of their heads. Ids
and logprobs are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvcommons.errors import CapacityExhausted, DataLoss, InvalidInput
from kvcommons.pb import common_pb2, holder_pb2, holder_pb2_grpc
from services.attention_pool.pool import head_part, open_pool
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack, no_iterations, ready, settings
from tests.contract.engine_turns import Turn, prompt, started_in_order, turn
from tests.contract.test_engine_reuse import stored
from tests.machine import scaled

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

LOGPROBS = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)


def parts(group: str, count: int) -> list[tuple[str, str]]:
    return [(group, f"{number}/{count}") for number in range(count)]


def pools(count: int) -> list[str]:
    return [f"pool-{number}" for number in range(count)]


def as_transformers_says(engines: Stack, one: Turn, tokens: Sequence[int], expected: Sequence[int]) -> None:
    assert one.tokens == expected
    reported = [token.logprob for token in one.sampled]
    assert reported == pytest.approx(engines.reference.logprobs(tokens, expected), abs=1e-4)


async def blocks_at(engines: Stack, count: int) -> list[list[int]]:
    """Of each segment, by pool."""
    seen = [await engines.inspect(name) for name in pools(count)]
    return [sorted(segment.blocks for segment in one.segments) for one in seen]


async def has_tokens(one: Turn, count: int = 3) -> None:
    if len(one.tokens) < count:
        raise CapacityExhausted("not yet")


@pytest.mark.parametrize(
    ("engines", "count"),
    [("llama", 2), ("qwen2-sliding", 2), ("qwen3", 2), ("llama-all-heads", 2), ("llama-all-heads", 4)],
    indirect=["engines"],
)
async def test_a_sequence_alone_and_several_at_once(engines: Stack, count: int) -> None:
    """They grow by two blocks at a time, and every pool has as many of each."""
    await engines.lenders(*[48] * count, heads=parts("g", count))
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", borrow_blocks=2)
    made = [engines.reference.prompt(length, 40, 100 * length) for length in (260, 30, 90)]
    turns = [turn(prefill, decode, engines.model, tokens, 40, sampling=LOGPROBS) for tokens, _ in made]
    await turns[0].run()
    as_transformers_says(engines, turns[0], *made[0])
    await engines.idle("decode", *pools(count))
    running = asyncio.gather(*(one.run() for one in turns[1:]))
    alike = False  # both sequences at all parts; looked at between two growths, for parts grow one by one
    while not running.done():
        first, *others = await blocks_at(engines, count)
        alike = alike or (len(first) == 2 and all(blocks == first for blocks in others))
        await asyncio.sleep(0.01)
    await running
    for one, (tokens, expected) in list(zip(turns, made, strict=True))[1:]:
        as_transformers_says(engines, one, tokens, expected)
    assert alike
    await engines.idle("decode", *pools(count))


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_a_second_turn_reuses_history(engines: Stack) -> None:
    """What the first one made goes to the store and comes from there by way of decode."""
    store = await engines.kvstore()
    await engines.lenders(24, 24, heads=parts("g", 2))
    tokens, expected = engines.reference.prompt(75, 64)
    prefill, decode = await engines.prefill("p1"), await engines.decode("d1", placement="offload")
    first = turn(prefill, decode, engines.model, tokens, 32, history=engines.history(0), sampling=LOGPROBS)
    await first.run()
    as_transformers_says(engines, first, tokens, expected[:32])
    assert first.finished is not None
    assert first.finished.saved_blocks == (75 + 31) // BLOCK - 75 // BLOCK
    full = (75 + 32 - 1) // BLOCK
    known = tokens + expected[:32]
    assert await stored(engines, store, known[: full * BLOCK]) == full

    prefill = await engines.prefill("p2", loads="always")
    decode = await engines.decode("d2", placement="offload")
    second = turn(prefill, decode, engines.model, known, 32, history=engines.history(full), sampling=LOGPROBS)
    await second.run()
    as_transformers_says(engines, second, known, expected[32:])
    assert second.reserved is not None
    assert second.first is not None
    assert (second.reserved.push_from_block, second.missing) == (full, [])
    assert second.first.cached_tokens == full * BLOCK
    await engines.idle("d1", "d2", *pools(2))


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_a_prompt_beyond_prefills_memory_is_attended_over_at_the_group(engines: Stack) -> None:
    """And again with what the first one left in the store, which is not computed."""
    store = await engines.kvstore()
    await engines.lenders(30, 30, heads=parts("g", 2))
    prefill = await engines.prefill(loads="always", engine={"capacity_tokens": 6 * BLOCK})
    decode = await engines.decode(placement="offload", borrow_blocks=1)
    tokens, expected = engines.reference.prompt(250, 30)
    one = turn(prefill, decode, engines.model, tokens, 30, history=engines.history(0), sampling=LOGPROBS)
    await one.run()
    as_transformers_says(engines, one, tokens, expected)
    assert await stored(engines, store, tokens[: 15 * BLOCK]) == 15
    again = turn(prefill, decode, engines.model, tokens, 30, history=engines.history(15), sampling=LOGPROBS)
    await again.run()
    as_transformers_says(engines, again, tokens, expected)
    assert again.first is not None
    assert again.first.cached_tokens == 15 * BLOCK
    await engines.idle("decode", *pools(2))


async def test_sequences_go_where_a_device_has_least_to_read(engines: Stack) -> None:
    """A group of two beside a single pool: its devices have half of a sequence's KV each."""
    await engines.lenders(60, 60, 60, heads=[*parts("g", 2), None])
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", borrow_blocks=1)
    made = [engines.reference.prompt(length, 60, 100 * length) for length in (150, 150, 150)]
    turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in made]
    with no_iterations():
        tasks = await started_in_order(turns)
        in_group, other, alone = await blocks_at(engines, 3)
    assert in_group == other
    assert (len(in_group), len(alone)) == (2, 1)
    await asyncio.gather(*tasks)
    assert [one.tokens for one in turns] == [expected for _, expected in made]
    await engines.idle("decode", *pools(3))


@pytest.mark.usefixtures("unhurried")
async def test_a_part_that_is_killed_costs_its_sequences_and_nobody_else(engines: Stack) -> None:
    """The router computes them again from their tokens, as those of any holder that is gone."""
    children = await engines.lenders(24, 24, process=True, heads=parts("g", 2))
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", lease_ms=2000)
    tokens, expected = engines.reference.prompt(60, 300)
    one = turn(prefill, decode, engines.model, tokens, 300)
    running = asyncio.create_task(one.run())
    await ready(lambda: has_tokens(one))
    children[1].kill()
    with pytest.raises(DataLoss, match="compute it again from its tokens"):
        await running
    assert one.tokens == expected[: len(one.tokens)]
    await engines.idle("decode", "pool-0")
    with pytest.raises(CapacityExhausted):
        await turn(prefill, decode, engines.model, tokens, 2).run()
    await engines.idle("decode", "pool-0")


async def test_a_group_that_refuses_keeps_nothing(engines: Stack) -> None:
    """The smallest part decides."""
    await engines.lenders(24, 6, heads=parts("g", 2))
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", borrow_blocks=1)
    with pytest.raises(CapacityExhausted, match="nobody lends"):
        await turn(prefill, decode, engines.model, prompt(110), 2).run()
    await engines.idle("decode", *pools(2))
    tokens, expected = engines.reference.prompt(60, 20)
    assert (await turn(prefill, decode, engines.model, tokens, 20).run()).tokens == expected
    await engines.stop("decode")  # which would lend, too
    decode = await engines.decode("d2", placement="offload", engine={"capacity_tokens": BLOCK})
    with pytest.raises(CapacityExhausted):  # it outgrows the smaller part
        await turn(prefill, decode, engines.model, tokens, 100).run()
    await engines.idle("d2", *pools(2))


@pytest.mark.usefixtures("none_comes_home_by_itself")
@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
async def test_kv_comes_home_from_a_group(engines: Stack, unhurried: SlowIterations) -> None:
    """Any part calls it back; what has no room here stays, for no holder copies from a group."""
    await engines.lenders(30, 30, 16, heads=[*parts("g", 2), None])
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", engine={"capacity_tokens": 10 * BLOCK})
    debtor = holder_pb2_grpc.DebtorStub(engines.channel("decode"))
    tokens, expected = engines.reference.prompt(300, 100)
    one = turn(prefill, decode, engines.model, tokens, 100, sampling=LOGPROBS)
    running = asyncio.create_task(one.run())
    # Its KV has grown for the last time: growing meets a call back where both are slow, and goes elsewhere.
    await ready(lambda: has_tokens(one, 8))
    reply = await debtor.CallBack(holder_pb2.CallBackRequest(creditor="pool-1", blocks=3), timeout=scaled(20))
    assert (reply.home_blocks, reply.moved_blocks) == (3, 0)
    first, second, alone = await blocks_at(engines, 3)
    assert (first, alone) == (second, [])
    reply = await debtor.CallBack(
        holder_pb2.CallBackRequest(creditor="pool-0", blocks=15), timeout=scaled(20)
    )
    assert (reply.home_blocks, reply.moved_blocks) == (7, 0)
    unhurried.over()
    await running
    as_transformers_says(engines, one, tokens, expected)
    await engines.idle("decode", *pools(3))


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        ([("g", "0/2")], "head group 'g' lacks 1/2: start a pool for each"),
        ([("g", "0/2"), ("g", "0/2")], "part 0/2 more than once"),
    ],
)
async def test_a_group_that_is_not_whole(engines: Stack, heads: list[tuple[str, str]], says: str) -> None:
    await engines.lenders(*[24] * len(heads), heads=heads, wait=False)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload")

    async def reported() -> None:
        try:
            await turn(prefill, decode, engines.model, prompt(60), 2).run()
        except CapacityExhausted as error:
            if says in error.message:
                return
            raise

    await ready(reported)
    await engines.idle("decode")


@pytest.mark.parametrize(
    ("heads", "group", "says"),
    [
        ("0/2", None, "needs head_group"),
        (None, "g", "needs heads"),
        ("2/2", "g", "the last one is 1/2"),
        ("half", "g", "is no part of a whole"),
        ("0/4", "g", "2 KV heads cannot be divided into 4 equal parts; this model's can into 2"),
    ],
)
async def test_a_pool_that_is_set_up_wrong_says_so(
    engines: Stack, heads: str | None, group: str | None, says: str
) -> None:
    def start() -> Any:
        return open_pool(settings(engines.folder), "pool", head_part(heads, group))

    with pytest.raises(InvalidInput, match=says):
        await asyncio.to_thread(start)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_batches_in_turn_and_in_mini_batches(engines: Stack, transport: str) -> None:
    """A group is asked for several things at the same time."""
    engines.transport = transport
    await engines.lenders(48, 48, heads=parts("g", 2))
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", pipelining="on", mini_batches=2, borrow_blocks=1)
    made = [engines.reference.prompt(20 + 10 * number, 30, 100 * number) for number in range(6)]
    turns = [turn(prefill, decode, engines.model, tokens, 30, sampling=LOGPROBS) for tokens, _ in made]
    await asyncio.gather(*(one.run() for one in turns))
    for one, (tokens, expected) in zip(turns, made, strict=True):
        as_transformers_says(engines, one, tokens, expected)
    await engines.idle("decode", *pools(2))
