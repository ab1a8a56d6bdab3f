"""The holder contract, on a holder embedded as in decode and on a real attention pool process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcommons.errors import CapacityExhausted, InvalidInput, StaleEpoch, UnsupportedParameter
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.pb.common_pb2 import Heads, SampledToken
from kvcommons.rblock.heads import divided
from kvcommons.rpc.dialer import Dialer
from kvcommons.transport.base import Observation
from kvcommons.transport.client import DataClient
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
    group_of,
    local_partial,
    pools,
    soon,
)
from tests.machine import scaled


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolProcess]:
    with pools(None) as (pool,):
        yield pool


@pytest.fixture(scope="module")
def group() -> Iterator[list[PoolProcess]]:
    with pools(*divided(2)) as parts:
        yield parts


@pytest.fixture(params=["embedded", "process", "embedded group", "process group"])
async def creditor(request: pytest.FixtureRequest, socket_folder: Path) -> AsyncIterator[Creditor]:
    """A holder, or two that divide the heads; ends with a check that every block came back."""
    where, _, group = request.param.partition(" ")
    async with AsyncExitStack() as stack:
        if where == "process":
            made = request.getfixturevalue("group") if group else [request.getfixturevalue("pool")]
            parts = [await pool.ready() for pool in made]
        else:
            holders = [embedded(socket_folder, part=part) for part in (divided(2) if group else [None])]
            parts = [await stack.enter_async_context(holder) for holder in holders]
        async with group_of(parts) if group else parts[0].debtor() as client:
            yield client
        await all_back(*parts)


@pytest.fixture(params=["embedded", "process"])
async def served(request: pytest.FixtureRequest, socket_folder: Path) -> AsyncIterator[Served]:
    """Ends with a check that every block came back."""
    if request.param == "embedded":
        async with embedded(socket_folder) as served:
            yield served
            await all_back(served)
    else:
        served = await request.getfixturevalue("pool").ready()
        yield served
        await all_back(served)


async def borrow(client: Creditor, tokens: int, *, first_position: int = 0) -> SegmentRef:
    blocks = -(-tokens // BLOCK_TOKENS)
    return await client.reserve("sequence", blocks, first_position=first_position, timeout_s=scaled(5))


async def test_blocks_come_back_as_they_were_written(creditor: Creditor) -> None:
    ref = await borrow(creditor, 5 * BLOCK_TOKENS)
    layers = [Tokens(20, seed).objects(0, 20) for seed in range(2)]
    for layer, objects in enumerate(layers):
        creditor.write_blocks(ref, layer, 0, objects[:2], soon())
        creditor.write_blocks(ref, layer, 2, objects[2:], soon())
    for layer, objects in enumerate(layers):
        into = [bytearray(LAYOUT.object_bytes) for _ in range(3)]
        creditor.read_blocks(ref, layer, 1, into, soon())
        assert into == objects[1:4]


async def test_what_is_sent_for_a_token_does_not_grow_with_the_context(socket_folder: Path) -> None:
    """Step messages carry changes only: block tables are the holder's."""
    seen: list[Observation] = []
    tokens = Tokens(81, 1)
    async with embedded(socket_folder) as served:
        client = RemoteHolder(
            served.control, served.data, owner="d", model=served.model, lost=lambda refs: None,
            dialer=Dialer(observer=seen.append),
        )  # fmt: skip
        ref = await borrow(client, 81)
        client.write_blocks(ref, 0, 0, tokens.objects(0, 81), soon())
        for row in (1, 80):
            part = PlanRow.of(ref, position=row, length=row + 1, append=True)
            appended = [tokens.appended(row, row + 1)]
            begin_attend(client, 0, [part], tokens.q[row : row + 1], appended, soon()).finish()[0]
        await client.release([ref], timeout_s=scaled(5))
        await client.close()
    small, large = (one.sent_bytes for one in seen if one.op == "attend_layer")
    assert small == large < 4096


@pytest.mark.parametrize("split", [1, 8, 13, 29])
async def test_a_sequence_over_two_holders_is_exact(creditor: Creditor, split: int) -> None:
    """Decode's row and a prefill chunk, older tokens at the holder: the merge is one holder's result."""
    tokens = Tokens(30, seed=split)
    ref = await borrow(creditor, split)
    creditor.write_blocks(ref, 0, 0, tokens.objects(0, split), soon())
    for rows in ([29], list(range(split, 30))):
        part = PlanRow.of(ref, queries=len(rows), position=rows[0], length=split)
        pending = begin_attend(creditor, 0, [part], tokens.q[rows], [], soon())
        local = local_partial(tokens, rows, split, 30)
        merged = merge([pending.finish()[0], local])
        whole = tokens.whole(rows)
        torch.testing.assert_close(merged.out, whole.out, **CLOSE)
        torch.testing.assert_close(merged.lse, whole.lse, **CLOSE)


async def test_a_batch_that_appends_and_one_that_does_not(creditor: Creditor) -> None:
    """Three sequences in one request, token by token: newest tokens here, there, and nothing there at all."""
    tokens = [Tokens(11, seed=seed) for seed in range(3)]
    head = await borrow(creditor, 6)  # of the first: tokens 0..6
    tail = await borrow(creditor, 8, first_position=3)  # of the second: tokens 3.. are appended
    empty = await borrow(creditor, 1)
    creditor.write_blocks(head, 0, 0, tokens[0].objects(0, 6), soon())
    for row in range(6, 11):
        parts = [
            PlanRow.of(head, position=row, length=6),
            PlanRow.of(tail, position=row - 3, length=row - 5, append=True),
            PlanRow.of(empty, position=row, length=0),
        ]
        q = torch.stack((tokens[0].q[row], tokens[1].q[row - 3], tokens[2].q[row]))
        new = tokens[1].appended(row - 3, row - 2)
        partial = begin_attend(creditor, 0, parts, q, [new], soon()).finish()[0]
        others = [
            local_partial(tokens[0], [row], 6, row + 1),
            local_partial(tokens[1], [row - 3], 0, 3),
            local_partial(tokens[2], [row], 0, row + 1),
        ]
        for index, (position, other) in enumerate(zip((row, row - 3, row), others, strict=True)):
            one = type(partial)(out=partial.out[index : index + 1], lse=partial.lse[index : index + 1])
            whole = tokens[index].whole([position])
            torch.testing.assert_close(merge([one, other]).out, whole.out, **CLOSE)
        assert torch.isneginf(partial.lse[2]).all()


async def test_a_chunk_is_appended_and_masked(creditor: Creditor) -> None:
    """Prefill's rows at the holder: each row sees those before it, not those after; asking twice is the
    same."""
    tokens = Tokens(14, seed=9)
    ref = await borrow(creditor, 14)
    creditor.write_blocks(ref, 0, 0, tokens.objects(0, 4), soon())
    part = PlanRow.of(ref, queries=10, position=4, length=14, append=True)
    for _ in range(2):
        pending = begin_attend(creditor, 0, [part], tokens.q[4:], [tokens.appended(4, 14)], soon())
        torch.testing.assert_close(pending.finish()[0].out, tokens.whole(range(4, 14)).out, **CLOSE)


async def test_what_is_released_or_of_another_life_is_stale(creditor: Creditor) -> None:
    ref = await borrow(creditor, 4)
    other_life = SegmentRef(handle=ref.handle, epoch=ref.epoch - 1)
    gone = await borrow(creditor, 4)
    await creditor.release([gone], timeout_s=scaled(5))
    await creditor.release([gone, other_life], timeout_s=scaled(5))
    objects = Tokens(4, 0).objects(0, 4)
    for bad in (gone, other_life):
        with pytest.raises(StaleEpoch):
            creditor.write_blocks(bad, 0, 0, objects, soon())
        with pytest.raises(StaleEpoch):
            creditor.read_blocks(bad, 0, 0, [bytearray(LAYOUT.object_bytes)], soon())
        with pytest.raises(StaleEpoch):
            await creditor.grow(bad, 1, timeout_s=scaled(5))
        good = PlanRow.of(ref, position=5, length=0)
        part = PlanRow.of(bad, position=5, length=4)
        with pytest.raises(StaleEpoch):
            begin_attend(creditor, 0, [good, part], torch.zeros(2, 4, 16), [], soon()).finish()[0]
    creditor.write_blocks(ref, 0, 0, objects, soon())


async def test_heads_come_by_parts(served: Served) -> None:
    """From the ranks of a prefill: together they are the objects; what cannot be a part is refused."""
    objects = Tokens(4 * BLOCK_TOKENS, 0).objects(0, 4 * BLOCK_TOKENS)
    async with served.debtor() as client:
        ref = await borrow(client, 4 * BLOCK_TOKENS)
        sender = DataClient(served.data)

        def write(heads: Heads, payload: list[memoryview]) -> None:
            request = pb.DataRequest(
                deadline_ms=5000,
                write_blocks=pb.WriteBlocks(
                    handle=ref.handle, epoch=ref.epoch, layer=1, first_block=0, blocks=4, heads=heads
                ),
            )
            sender.call(request, payload, deadline=soon())

        for part in divided(2):
            write(part.message(), part.pieces(objects))
        into = [bytearray(LAYOUT.object_bytes) for _ in range(4)]
        client.read_blocks(ref, 1, 0, into, soon())
        assert [bytes(one) for one in into] == [bytes(one) for one in objects]
        first = divided(2)[0]
        for heads in (Heads(number=2, parts=2), Heads(number=0, parts=1), Heads(number=0, parts=3)):
            with pytest.raises(InvalidInput):
                write(heads, first.pieces(objects))
        with pytest.raises(InvalidInput, match="came with"):
            write(first.message(), first.pieces(objects)[:-1])
        client.read_blocks(ref, 1, 0, into, soon())
        assert [bytes(one) for one in into] == [bytes(one) for one in objects]
        sender.close()


async def test_segments_grow_and_no_room_is_said(served: Served) -> None:
    async with served.debtor() as client, served.debtor("debtor-2") as other:
        ref = await borrow(client, 4)
        for _ in range(2):  # asking again is harmless
            await client.grow(ref, 4, timeout_s=scaled(5))
        client.write_blocks(ref, 1, 3, Tokens(4, 0).objects(0, 4), soon())
        with pytest.raises(InvalidInput, match="reserve more"):
            client.write_blocks(ref, 1, 4, Tokens(4, 0).objects(0, 4), soon())
        with pytest.raises(CapacityExhausted):
            await other.reserve("big", BLOCKS - 3, first_position=0, timeout_s=scaled(5))
        with pytest.raises(CapacityExhausted):
            await client.grow(ref, BLOCKS + 1, timeout_s=scaled(5))
        reply = await client.inspect(timeout_s=scaled(5))
        held = reply.segments[0]
        assert (reply.total_blocks, reply.free_blocks, len(reply.segments)) == (BLOCKS, BLOCKS - 4, 1)
        assert (held.owner, held.sequence, held.blocks) == ("debtor-1", "sequence", 4)
        assert 5000 < held.lease_left_ms <= 10000


async def test_another_model_and_senseless_requests_are_refused(served: Served) -> None:
    stranger = replace(served, model=b"x" * 32)
    async with stranger.debtor() as client:
        with pytest.raises(InvalidInput, match="one model"):
            await borrow(client, 1)
    async with served.debtor() as client:
        ref = await borrow(client, 4)
        with pytest.raises(InvalidInput, match="layer 2"):
            client.write_blocks(ref, 2, 0, Tokens(4, 0).objects(0, 4), soon())
        with pytest.raises(InvalidInput, match="1 blocks came with 5 bytes"):
            client.write_blocks(ref, 0, 0, [b"12345"], soon())
        for part in (
            PlanRow.of(ref, position=0, length=5),
            PlanRow.of(ref, queries=2, position=0, length=1, append=True),
        ):
            with pytest.raises(InvalidInput):
                begin_attend(client, 0, [part], torch.zeros(1, 4, 16), [], soon()).finish()[0]
        part = PlanRow.of(ref, position=0, length=4)
        with pytest.raises(InvalidInput, match="bytes where"):
            begin_attend(client, 0, [part], torch.zeros(2, 4, 16), [], soon()).finish()[0]


async def test_calls_for_several_holders_overlap_and_many_threads_agree(creditor: Creditor) -> None:
    tokens = Tokens(20, seed=3)
    ref = await borrow(creditor, 20)
    creditor.write_blocks(ref, 0, 0, tokens.objects(0, 20), soon())
    part = PlanRow.of(ref, position=19, length=20)

    def ask() -> torch.Tensor:
        pending = [begin_attend(creditor, 0, [part], tokens.q[19:], [], soon()) for _ in range(4)]
        return torch.cat([one.finish()[0].out for one in pending])

    answers = await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(4)))
    for answer in answers:
        torch.testing.assert_close(answer, tokens.whole([19]).out.expand(4, -1, -1), **CLOSE)


async def test_a_sliding_window_is_masked_at_the_holder(socket_folder: Path) -> None:
    tokens = Tokens(20, seed=4)
    async with embedded(socket_folder, windows=(6, None)) as served, served.debtor() as client:
        ref = await borrow(client, 12, first_position=0)
        client.write_blocks(ref, 0, 0, tokens.objects(0, 12), soon())
        for rows in ([14], list(range(12, 20))):
            part = PlanRow.of(ref, queries=len(rows), position=rows[0], length=12)
            remote = begin_attend(client, 0, [part], tokens.q[rows], [], soon()).finish()[0]
            merged = merge([remote, local_partial(tokens, rows, 12, 20, window=6)])
            torch.testing.assert_close(merged.out, tokens.whole(rows, window=6).out, **CLOSE)


async def test_the_owners_own_segments_take_writes_and_a_start(socket_folder: Path) -> None:
    started: list[pb.StartSequence] = []
    async with embedded(socket_folder, on_start=started.append, lend_blocks_max=3) as served:
        holder = served.holder
        blocks = holder.allocator.allocate(2)
        ref = holder.own("mine", blocks[:1])
        holder.extend(ref, blocks[1:])
        async with served.debtor("prefill-1") as client:
            objects = Tokens(8, 0).objects(0, 8)
            client.write_blocks(ref, 1, 0, objects, soon())
            assert holder.memory.read_buffers(1, blocks) == objects
            data = DataClient(served.data)
            start = pb.StartSequence(handle=ref.handle, epoch=ref.epoch, first=SampledToken(token=42))
            data.call(pb.DataRequest(start_sequence=start), deadline=soon())
            assert [one.first.token for one in started] == [42]
            with pytest.raises(CapacityExhausted, match="3 more may be lent"):
                await client.reserve("s", 4, first_position=0, timeout_s=scaled(5))
            holder.release([ref])
            with pytest.raises(StaleEpoch):
                data.call(pb.DataRequest(start_sequence=start), deadline=soon())
            data.close()
        assert len(started) == 1
        assert holder.allocator.in_use == 2, "the owner's own references"


async def test_a_pool_starts_no_sequence(served: Served) -> None:
    async with served.debtor() as client:
        ref = await borrow(client, 1)
        data = DataClient(served.data)
        start = pb.StartSequence(handle=ref.handle, epoch=ref.epoch)
        with pytest.raises(UnsupportedParameter, match="start_sequence"):
            data.call(pb.DataRequest(start_sequence=start), deadline=soon())
        data.close()
