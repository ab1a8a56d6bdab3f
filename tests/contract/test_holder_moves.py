"""Blocks that move from one holder to another while they are attended over: freeze, copy, trim, adopt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from kvcommons.backend.interface import Partial
from kvcommons.backend.memory import BlockMemory
from kvcommons.errors import InvalidInput, StaleEpoch
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.copying import copy_blocks
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.segments import SegmentRef
from kvcommons.transport.deadline import Deadline
from tests.backends import merge
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
    pools,
    soon,
)
from tests.machine import scaled
from tests.waiting import eventually

TOKENS = 30


@pytest.fixture(scope="module")
def two() -> Iterator[list[PoolProcess]]:
    with pools(None, None) as made:
        yield made


@pytest.fixture(params=["embedded", "process"])
async def pair(request: pytest.FixtureRequest, socket_folder: Path) -> AsyncIterator[list[Served]]:
    """Two holders of one model; ends with a check that all blocks came back."""
    if request.param == "embedded":
        folders = [socket_folder / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        async with embedded(folders[0]) as one, embedded(folders[1]) as two:
            yield [one, two]
            await all_back(one, two)
    else:
        served = [await pool.ready() for pool in request.getfixturevalue("two")]
        yield served
        await all_back(*served)


async def written(client: RemoteHolder, tokens: Tokens, blocks: int = 8) -> SegmentRef:
    """All tokens, in both layers."""
    ref = await client.reserve("sequence", blocks, first_position=0, timeout_s=scaled(5))
    for layer in range(LAYOUT.layers):
        client.write_blocks(ref, layer, 0, tokens.objects(0, TOKENS), soon())
    return ref


def ask(
    client: RemoteHolder,
    tokens: Tokens,
    ref: SegmentRef,
    first_block: int = 0,
    length: int | None = None,
    layer: int = 1,
) -> Partial:
    """The last token's partial over what lies from a block on."""
    part = PlanRow.of(
        ref=ref,
        queries=1,
        position=TOKENS - 1,
        first_block=first_block,
        length=TOKENS - first_block * BLOCK_TOKENS if length is None else length,
    )
    return begin_attend(client, layer, [part], tokens.q[TOKENS - 1 :], [], soon()).finish()[0]


async def test_a_run_moves_to_another_holder_while_it_is_attended_over(pair: list[Served]) -> None:
    """Five of eight blocks go; before, between and after, the partials merge to the same."""
    tokens = Tokens(TOKENS, 1)
    whole = tokens.whole([TOKENS - 1])
    async with pair[0].debtor() as here, pair[1].debtor() as there:
        source = await written(here, tokens)
        frozen = await here.freeze(source, 5, timeout_s=scaled(5))
        target = await there.reserve("sequence", 5, first_position=0, timeout_s=scaled(5))
        torch.testing.assert_close(ask(here, tokens, source).out, whole.out, **CLOSE)
        await there.copy_in(
            target, pair[0].data, frozen, first_block=0, source_block=0, blocks=5, timeout_s=20
        )
        # The switch: from here on the new generation, and what has moved is read there.
        for trimmed in (0, 5):
            parts = [ask(here, tokens, frozen, 5), ask(there, tokens, target, 0, 5 * BLOCK_TOKENS)]
            merged = merge(parts)
            torch.testing.assert_close(merged.out, whole.out, **CLOSE)
            torch.testing.assert_close(merged.lse, whole.lse, **CLOSE)
            assert await here.trim(frozen, timeout_s=scaled(5)) == 5 - trimmed
        with pytest.raises(StaleEpoch, match="have moved"):
            ask(here, tokens, source)
        with pytest.raises(InvalidInput, match="not within segment"):
            ask(here, tokens, frozen, 4)
        assert (await here.inspect(timeout_s=scaled(5))).lent_blocks == 3


async def test_a_run_is_read_home(pair: list[Served]) -> None:
    tokens = Tokens(TOKENS, 2)
    home = BlockMemory(LAYOUT, 3)
    async with pair[0].debtor() as client:
        ref = await written(client, tokens)
        frozen = await client.freeze(ref, 4, timeout_s=scaled(5))
        await asyncio.to_thread(copy_blocks, client.read_blocks, frozen, 1, home, [2, 0, 1], soon())
        for layer in range(LAYOUT.layers):
            assert home.read_buffers(layer, [2, 0, 1]) == tokens.objects(4, 16)


async def test_frozen_blocks_are_not_written(pair: list[Served]) -> None:
    """Tokens are still appended behind them; after a thaw all may be written."""
    tokens = Tokens(TOKENS, 3)
    async with pair[0].debtor() as client:
        ref = await written(client, tokens)
        frozen = await client.freeze(ref, 7, timeout_s=scaled(5))
        with pytest.raises(InvalidInput, match="frozen or shared"):
            client.write_blocks(ref, 0, 6, tokens.objects(0, 4), soon())
        appended = [tokens.appended(27, 28)]
        part = PlanRow.of(ref, position=27, length=28, append=True)
        with pytest.raises(InvalidInput, match="takes no tokens"):
            begin_attend(client, 0, [part], tokens.q[27:28], appended, soon()).finish()[0]
        for row in (28, 29):
            part = PlanRow.of(ref, position=row, length=row + 1, append=True)
            got = begin_attend(client, 0, [part], tokens.q[row : row + 1],
                                      [tokens.appended(row, row + 1)], soon()).finish()[0]  # fmt: skip
            torch.testing.assert_close(got.out, tokens.whole([row]).out, **CLOSE)
        await client.thaw(frozen, timeout_s=scaled(5))
        client.write_blocks(ref, 0, 6, tokens.objects(24, 28), soon())


async def test_a_segment_is_adopted_and_its_former_owner_is_refused(pair: list[Served]) -> None:
    """A context migrates between two instances without a byte moving."""
    tokens = Tokens(TOKENS, 4)
    whole = tokens.whole([TOKENS - 1])
    lost: list[SegmentRef] = []
    async with pair[0].debtor("one", lease_s=scaled(2.0), lost=lost) as one, pair[0].debtor("two") as two:
        ref = await written(one, tokens)
        with pytest.raises(InvalidInput, match="belongs to one"):
            await two.adopt(ref, "three", "sequence", timeout_s=scaled(5))
        taken, blocks = await two.adopt(ref, "one", "sequence", timeout_s=scaled(5))
        assert blocks == 8
        torch.testing.assert_close(ask(two, tokens, taken).out, whole.out, **CLOSE)
        with pytest.raises(StaleEpoch):
            ask(one, tokens, ref)
        await eventually(lambda: lost == [ref])


async def test_a_fork_shares_what_is_full_and_goes_on_by_itself(pair: list[Served]) -> None:
    """Both read the shared blocks, each appends to its own; the first one's end takes nothing away."""
    tokens, other = Tokens(TOKENS, 5), Tokens(TOKENS, 6)
    async with pair[0].debtor() as client:
        ref = await written(client, tokens)
        fork, blocks = await client.adopt(ref, "debtor-1", "fork", shared_blocks=5, timeout_s=scaled(5))
        assert (blocks, (await client.inspect(timeout_s=scaled(5))).lent_blocks) == (5, 8)
        await client.grow(fork, 6, timeout_s=scaled(5))
        other.k[:20], other.v[:20] = tokens.k[:20], tokens.v[:20]
        await client.release([ref], timeout_s=scaled(5))
        for row in range(20, 24):
            part = PlanRow.of(fork, position=row, length=row + 1, append=True)
            appended = [other.appended(row, row + 1)]
            got = begin_attend(client, 0, [part], other.q[row : row + 1], appended, soon()).finish()[0]
            torch.testing.assert_close(got.out, other.whole([row]).out, **CLOSE)
        assert (await client.inspect(timeout_s=scaled(5))).lent_blocks == 6


async def test_an_owner_that_comes_back_after_its_lease_is_refused(socket_folder: Path) -> None:
    """Its freeze ended with its lease; the blocks are another's by now, and nothing of it reaches them."""
    tokens = Tokens(TOKENS, 7)
    async with embedded(socket_folder) as served, served.debtor("late", lease_s=60) as late:
        holder = served.holder
        ref = await written(late, tokens, BLOCKS)
        frozen = await late.freeze(ref, 7, timeout_s=scaled(5))
        holder.renew("late", [ref], lease_s=0.05)
        await eventually(lambda: holder.allocator.in_use == 0)
        async with served.debtor("next") as following:
            taken = await written(following, tokens, BLOCKS)
            assert await late.trim(frozen, timeout_s=scaled(5)) == 0
            await late.thaw(frozen, timeout_s=scaled(5))
            with pytest.raises(StaleEpoch):
                late.write_blocks(ref, 0, 0, Tokens(4, 9).objects(0, 4), soon())
            with pytest.raises(StaleEpoch):
                await late.freeze(ref, 1, timeout_s=scaled(5))
            with pytest.raises(StaleEpoch):
                await asyncio.to_thread(
                    copy_blocks, late.read_blocks, frozen, 0, BlockMemory(LAYOUT, 1), [0], Deadline.after(5)
                )
            whole = tokens.whole([TOKENS - 1])
            torch.testing.assert_close(ask(following, tokens, taken).out, whole.out, **CLOSE)


async def test_a_trim_waits_for_what_reads_the_blocks(socket_folder: Path) -> None:
    """And they are set aside for their settlement then, not free for just anybody."""
    tokens = Tokens(TOKENS, 8)
    async with embedded(socket_folder) as served, served.debtor() as client:
        holder = served.holder
        ref = await written(client, tokens)
        holder.pledges.pledge("swap", 0, lease_s=60)
        frozen = await client.freeze(ref, 6, timeout_s=scaled(5))
        reading = holder.pin(ref)
        trim = asyncio.create_task(client.trim(frozen, settlement="swap", timeout_s=scaled(10)))
        await eventually(lambda: holder.parting(ref))
        assert (trim.done(), holder.lent_blocks, holder.pledges.pledged("swap")) == (False, 8, 0)
        holder.unpin(reading)
        assert await trim == 6
        assert (holder.lent_blocks, holder.pledges.pledged("swap"), holder.allocator.in_use) == (2, 6, 8)
        holder.pledges.redeem("swap")
