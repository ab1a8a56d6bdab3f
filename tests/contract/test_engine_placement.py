"""Every placement policy gives the tokens of transformers, over one segment or sixteen, and so do prompts
larger than prefill's own memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcommons.errors import CapacityExhausted
from tests.contract.engine_stack import BLOCK, Stack, no_iterations
from tests.contract.engine_turns import Turn, started_in_order, turn

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

POOLS = ("pool-0", "pool-1", "pool-2")


async def segments(engines: Stack) -> list[int]:
    """Blocks of each segment on a pool."""
    seen = [await engines.inspect(name) for name in POOLS]
    return sorted(segment.blocks for reply in seen for segment in reply.segments)


async def most_segments(engines: Stack, running: asyncio.Task[Turn]) -> list[int]:
    """Until a turn has ended: the `segments` of a moment at which there were as many as ever."""
    most: list[int] = []
    while not running.done():
        most = max(most, await segments(engines), key=len)
        await asyncio.sleep(0.01)
    await running
    return most


@pytest.mark.parametrize("engines", ["llama", "qwen2-sliding"], indirect=True)
@pytest.mark.parametrize(("share", "least"), [(40, 0), (9, 1), (5, 3), (1, 16)])
async def test_a_sequence_over_one_to_seventeen_holders(engines: Stack, share: int, least: int) -> None:
    """`grow`: 17 blocks of prompt, `share` on each holder, and a new one as it decodes."""
    await engines.lenders(24, 24, 24)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="grow", holder_tokens=share * BLOCK, borrow_blocks=1)
    tokens, expected = engines.reference.prompt(260, 40)
    one = turn(prefill, decode, engines.model, tokens, 40)
    running = asyncio.create_task(one.run())
    most = await most_segments(engines, running)
    assert one.tokens == expected
    assert len(most) >= least
    assert max(most, default=0) <= share
    await engines.idle("decode", *POOLS)


async def test_offload_keeps_nothing_here_and_balances_by_length(engines: Stack) -> None:
    """One long and two short sequences: the short ones share the holder that the long one is not on."""
    await engines.lenders(40, 40)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload", borrow_blocks=2)
    made = [engines.reference.prompt(length, 60, 100 * length) for length in (300, 90, 100)]
    turns = [turn(prefill, decode, engines.model, tokens, 60) for tokens, _ in made]
    with no_iterations():
        tasks = await started_in_order(turns)
        held = {name: (await engines.inspect(name)).segments for name in POOLS[:2]}
        assert sorted(len(some) for some in held.values()) == [1, 2]
        assert (await engines.inspect("decode")).free_blocks == 64
    await asyncio.gather(*tasks)
    assert [one.tokens for one in turns] == [expected for _, expected in made]
    await engines.idle("decode", *POOLS[:2])


async def test_offload_without_a_pool_that_lends(engines: Stack) -> None:
    await engines.lenders(2)
    prefill = await engines.prefill()
    decode = await engines.decode(placement="offload")
    tokens, _ = engines.reference.prompt(60, 2)
    with pytest.raises(CapacityExhausted, match="nobody lends"):
        await turn(prefill, decode, engines.model, tokens, 2).run()
    await engines.idle("decode", "pool-0")


@pytest.mark.parametrize("capacity", [64, 8])
async def test_auto_places_what_fits_and_what_does_not(engines: Stack, capacity: int) -> None:
    await engines.lenders(24, 24)
    prefill = await engines.prefill()
    decode = await engines.decode(
        placement="auto", holder_tokens=6 * BLOCK, engine={"capacity_tokens": capacity * BLOCK}
    )
    tokens, expected = engines.reference.prompt(260, 40)
    assert (await turn(prefill, decode, engines.model, tokens, 40).run()).tokens == expected
    await engines.idle("decode", *POOLS[:2])


@pytest.mark.parametrize("engines", ["llama", "qwen3", "qwen2-sliding"], indirect=True)
@pytest.mark.parametrize(
    "kind", [{"placement": "overflow"}, {"placement": "grow", "holder_tokens": 5 * BLOCK}]
)
async def test_a_prompt_larger_than_prefills_memory(engines: Stack, kind: dict[str, Any]) -> None:
    """Prefill holds a chunk at a time; what came before is attended over at decode and at the pools."""
    await engines.lenders(10, 10)
    prefill = await engines.prefill(engine={"capacity_tokens": 6 * BLOCK})
    decode = await engines.decode(engine={"capacity_tokens": 6 * BLOCK}, borrow_blocks=1, **kind)
    tokens, expected = engines.reference.prompt(250, 30)
    for _ in range(2):  # again, with what the first one left behind
        assert (await turn(prefill, decode, engines.model, tokens, 30).run()).tokens == expected
    await engines.idle("decode", *POOLS[:2])


async def test_a_prompt_larger_than_all_memory_is_refused(engines: Stack) -> None:
    await engines.lenders(4)
    prefill = await engines.prefill(engine={"capacity_tokens": 6 * BLOCK})
    decode = await engines.decode(placement="overflow", engine={"capacity_tokens": 6 * BLOCK})
    tokens, _ = engines.reference.prompt(250, 1)
    with pytest.raises(CapacityExhausted, match="nobody lends"):
        await turn(prefill, decode, engines.model, tokens, 5).run()
    await engines.idle("decode", "pool-0")
