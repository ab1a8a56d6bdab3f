"""Head groups from a debtor's side, over holders that are embedded and over real attention pools: two of
them, each with one of two KV heads, are one creditor, and together what one holder of all heads is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from kvcommons.backend.memory import BlockMemory
from kvcommons.errors import (
    CapacityExhausted,
    InvalidInput,
    StaleEpoch,
    Unavailable,
    UnsupportedParameter,
)
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.copying import copy_blocks
from kvcommons.holder.head_group import HeadGroup
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.segments import SegmentRef
from kvcommons.rblock.heads import divided
from tests.contract.holder_cases import (
    BLOCK_TOKENS,
    BLOCKS,
    CLOSE,
    LAYOUT,
    PoolProcess,
    Served,
    Tokens,
    all_back,
    begin_attend,
    embedded,
    group_of,
    pools,
    soon,
)
from tests.machine import scaled
from tests.waiting import eventually

TOKENS = 30
IDS = [bytes([number]) * 32 for number in range(1, 6)]


@pytest.fixture(scope="module")
def two() -> Iterator[list[PoolProcess]]:
    with pools(*divided(2)) as made:
        yield made


@pytest.fixture(params=["embedded", "process"])
async def parts(request: pytest.FixtureRequest, socket_folder: Path) -> AsyncIterator[list[Served]]:
    """Two; ends with a check that every block came back to both."""
    if request.param == "process":
        served = [await pool.ready() for pool in request.getfixturevalue("two")]
        yield served
        await all_back(*served)
        return
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(embedded(socket_folder, part=part)) for part in divided(2)]
        yield served
        await all_back(*served)


async def written(group: HeadGroup, tokens: Tokens, blocks: int = 8) -> SegmentRef:
    """All tokens, in both layers."""
    ref = await group.reserve("sequence", blocks, first_position=0, timeout_s=scaled(5))
    for layer in range(LAYOUT.layers):
        group.write_blocks(ref, layer, 0, tokens.objects(0, TOKENS), soon())
    return ref


def asked(ref: SegmentRef, row: int, *, append: bool = False) -> PlanRow:
    return PlanRow.of(ref, position=row, length=row + 1, append=append)


async def lent(parts: Sequence[Served]) -> list[int]:
    """Blocks, by part."""
    counts = []
    for served in parts:
        async with served.debtor("who asks") as client:
            counts.append((await client.inspect(timeout_s=scaled(5))).lent_blocks)
    return counts


async def test_sequences_grow_token_by_token(parts: list[Served]) -> None:
    """Three in one request, worded once for both layers, as decode asks."""
    tokens = [Tokens(11, seed=seed) for seed in range(3)]
    took_us = 0  # one layer may be quicker than a microsecond
    async with group_of(parts) as group:
        refs = [await group.reserve("sequence", 1, first_position=0, timeout_s=scaled(5)) for _ in tokens]
        for row in range(11):
            if row % BLOCK_TOKENS == 0:
                for ref in refs:
                    await group.grow(ref, row // BLOCK_TOKENS + 1, timeout_s=scaled(5))
            rows = [asked(ref, row, append=True) for ref in refs]
            q = torch.stack([one.q[row] for one in tokens])
            new = torch.cat([one.appended(row, row + 1) for one in tokens])
            for layer in range(LAYOUT.layers):
                partial, reported = begin_attend(group, layer, rows, q, [new], soon()).finish()
                took_us += reported.computed_us
                for index, one in enumerate(tokens):
                    whole = one.whole([row])
                    torch.testing.assert_close(partial.out[index : index + 1], whole.out, **CLOSE)
                    torch.testing.assert_close(partial.lse[index : index + 1], whole.lse, **CLOSE)
        assert await lent(parts) == [9, 9]
    assert took_us


async def test_a_refusal_leaves_nothing_behind(parts: list[Served]) -> None:
    """The second part has less room than is asked for."""
    async with group_of(parts) as group, parts[1].debtor("another") as other:
        taken = await other.reserve("another's", BLOCKS - 3, first_position=0, timeout_s=scaled(5))
        with pytest.raises(CapacityExhausted):
            await group.reserve("sequence", 4, first_position=0, timeout_s=scaled(5))
        assert (await lent(parts), group.borrowed) == ([0, BLOCKS - 3], [])
        ref = await group.reserve("sequence", 3, first_position=0, timeout_s=scaled(5))
        with pytest.raises(CapacityExhausted):
            await group.grow(ref, 4, timeout_s=scaled(5))
        await other.release([taken], timeout_s=scaled(5))
        await group.grow(ref, 4, timeout_s=scaled(5))
        assert await lent(parts) == [4, 4]


async def test_a_reservation_that_nobody_waits_for_is_taken_back(parts: list[Served]) -> None:
    async with group_of(parts) as group:
        asking = asyncio.create_task(group.reserve("sequence", 4, first_position=0, timeout_s=scaled(5)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # under way
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

        async def returned() -> bool:
            return not group.borrowed and await lent(parts) == [0, 0]

        await eventually(returned, "the blocks come back")


async def test_who_takes_a_part_for_the_whole_is_refused(parts: list[Served]) -> None:
    for model in (parts[0].whole, parts[0].model):
        client = RemoteHolder(
            parts[1].control, parts[1].data, owner="debtor", model=model, lost=lambda refs: None
        )
        with pytest.raises(InvalidInput, match="this holder has KV of model"):
            await client.reserve("sequence", 1, first_position=0, timeout_s=scaled(5))
        await client.close()
    with pytest.raises(InvalidInput, match="2 KV heads cannot be divided into 3"):
        async with group_of([*parts, parts[0]]):
            pass


async def test_blocks_are_read_home_while_the_rest_is_attended_over(parts: list[Served]) -> None:
    tokens = Tokens(TOKENS, 2)
    home = BlockMemory(LAYOUT, 4)
    async with group_of(parts) as group:
        ref = await written(group, tokens)
        with pytest.raises(InvalidInput, match="frozen"):
            await group.freeze(ref, 9, timeout_s=scaled(5))
        await group.thaw(await group.freeze(ref, 5, timeout_s=scaled(5)), timeout_s=scaled(5))
        group.write_blocks(ref, 0, 0, tokens.objects(0, TOKENS), soon())
        frozen = await group.freeze(ref, 4, timeout_s=scaled(5))
        await asyncio.to_thread(copy_blocks, group.read_blocks, frozen, 0, home, [2, 0, 1, 3], soon())
        for layer in range(LAYOUT.layers):
            assert home.read_buffers(layer, [2, 0, 1, 3]) == tokens.objects(0, 16)
        assert await group.trim(frozen, timeout_s=scaled(5)) == 4
        assert await group.trim(frozen, timeout_s=scaled(5)) == 0
        assert await lent(parts) == [4, 4]
        rest = PlanRow.of(frozen, position=29, first_block=4, length=TOKENS - 16)
        partial = begin_attend(group, 1, [rest], tokens.q[29:], [], soon()).finish()[0]
        assert partial.lse.isfinite().all()
        with pytest.raises(StaleEpoch):
            begin_attend(group, 1, [asked(ref, 29)], tokens.q[29:], [], soon()).finish()
        with pytest.raises(UnsupportedParameter, match="bring them home"):
            await group.copy_in(
                ref, parts[0].data, frozen, first_block=0, source_block=4, blocks=1, timeout_s=5
            )


async def test_what_one_part_loses_is_lost_and_the_others_share_is_released(socket_folder: Path) -> None:
    lost: list[SegmentRef] = []
    async with AsyncExitStack() as stack:
        parts = [await stack.enter_async_context(embedded(socket_folder, part=part)) for part in divided(2)]
        group = await stack.enter_async_context(group_of(parts, lost=lost, lease_s=scaled(2.0)))
        kept, gone = [
            await group.reserve("sequence", 3, first_position=0, timeout_s=scaled(5)) for _ in range(2)
        ]
        holder = parts[1].holder
        holder.release([group.places(gone)[1][1]])
        await eventually(lambda: lost == [gone])
        assert group.borrowed == [kept]

        async def returned() -> bool:
            return await lent(parts) == [3, 3]

        await eventually(returned, "the other part has its blocks back")
        with pytest.raises(StaleEpoch, match="a part lost it"):
            group.read_blocks(gone, 0, 0, [bytearray(LAYOUT.object_bytes)], soon())


async def test_a_part_that_is_killed() -> None:
    """Attention fails as with a holder that is gone; what the living part has comes back."""
    tokens = Tokens(TOKENS, 3)
    with pools(*divided(2)) as made:
        parts = [await pool.ready() for pool in made]
        async with group_of(parts) as group:
            ref = await written(group, tokens)
            made[1].kill()
            with pytest.raises(Unavailable):
                begin_attend(group, 0, [asked(ref, 29)], tokens.q[29:], [], soon()).finish()[0]
            with pytest.raises(Unavailable):
                await group.reserve("another", 2, first_position=0, timeout_s=scaled(5))
            with pytest.raises(Unavailable):
                await group.release([ref], timeout_s=scaled(5))
            assert group.borrowed == []
            await all_back(parts[0])
