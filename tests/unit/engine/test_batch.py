"""A sequence in runs, here and elsewhere, gives the attention that it gives in one piece."""

from __future__ import annotations

from typing import cast

import torch

from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Partial
from kvcommons.backend.memory import BlockMemory
from kvcommons.engine.batch import Batch, by_holder
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, RemoteRun, Run, Sequence
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import IdentityChain
from kvcommons.rblock.layout import Layout
from tests.backends import attend_batch

BLOCK = 4
HOLDER = cast(RemoteHolder, "never called here")
LAYOUT = Layout(layers=1, kv_heads=2, block_tokens=BLOCK, head_dim=8, kv_dtype="float32", query_heads=4)
CPU = choose()


def make(tokens: int, *runs: Run) -> Sequence:
    request = Request(
        request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(range(tokens - 1)),
        prompt_tokens=tokens - 1, max_position=100, sampling=SamplingParams(), stop_token_ids=frozenset(),
        store_control="", store_data="", matched_blocks=0, no_reuse=False,
    )  # fmt: skip
    sequence = Sequence(
        key=1, request=request, block_tokens=BLOCK, chain=IdentityChain(bytes(32), bytes(32), BLOCK)
    )
    for run in runs:
        sequence.append_run(run)
    sequence.start(tokens - 1)
    return sequence


def remote(first: int, count: int, handle: int = 1) -> RemoteRun:
    return RemoteRun(first_block=first, count=count, holder=HOLDER, ref=SegmentRef(handle=handle, epoch=1))


def filled(blocks: int) -> BlockMemory:
    memory = BlockMemory(LAYOUT, blocks)
    memory.tensor.copy_(torch.randn(memory.tensor.shape, generator=torch.Generator().manual_seed(3)))
    return memory


def local_part(batch: Batch, memory: BlockMemory, q: torch.Tensor) -> Partial:
    kv = memory.layer(0)
    plan = CPU.attention.plan_batch(
        kv, batch.tables, batch.lengths,
        first_key_positions=batch.first_keys, query_positions=batch.positions[batch.part_rows],
    )  # fmt: skip
    return plan.attend(q[batch.part_rows], kv, 0.3)


def test_rows_in_one_piece_are_their_own_parts() -> None:
    batch = Batch(
        [make(6, LocalRun(first_block=0, blocks=[5, 2])), make(3, LocalRun(first_block=0, blocks=[1]))],
        BLOCK,
        CPU,
    )
    assert batch.plain
    assert batch.positions.tolist() == [5, 2]
    assert batch.lengths.tolist() == [6, 3]
    assert batch.slots().tolist() == [2 * BLOCK + 1, 1 * BLOCK + 2]
    assert batch.tokens.tolist() == [5, 2]


def test_the_work_of_a_batch_is_what_it_reads_here_and_at_the_slowest_holder() -> None:
    here, other = LocalRun(first_block=0, blocks=[5, 2]), cast(RemoteHolder, "another one")
    alone = Batch([make(6, here), make(3, LocalRun(first_block=0, blocks=[1]))], BLOCK, CPU)
    assert alone.work(400) == IterationWork(rows=2, read_bytes=9 * 100)
    far = RemoteRun(first_block=2, count=1, holder=other, ref=SegmentRef(handle=2, epoch=1))
    spread = Batch([make(12, remote(0, 2), far), make(8, remote(0, 2))], BLOCK, CPU)
    assert spread.work(400) == IterationWork(rows=2, exchanges=1, away_bytes=4 * 400)
    spread.divide(2)
    assert spread.work(400).away_bytes == 4 * 400


def test_a_step_moves_every_row_on() -> None:
    sequences = [
        make(6, LocalRun(first_block=0, blocks=[5, 2])),
        make(3, LocalRun(first_block=0, blocks=[1])),
    ]
    batch = Batch(sequences, BLOCK, CPU)
    for sequence in sequences:
        sequence.append(77)
    batch.step()
    fresh = Batch(sequences, BLOCK, CPU)
    for name in ("tokens", "positions", "lengths"):
        assert torch.equal(getattr(batch, name), getattr(fresh, name))
    assert torch.equal(batch.slots(), fresh.slots())


def test_pieces_here_and_elsewhere_merge_to_the_whole() -> None:
    memory = filled(12)
    pieces = make(
        15,
        LocalRun(first_block=0, blocks=[3]),
        remote(1, 1),
        remote(2, 1, handle=2),
        LocalRun(first_block=3, blocks=[8]),
    )
    whole = make(9, LocalRun(first_block=0, blocks=[0, 1, 2]))
    away = make(8, remote(0, 2, handle=3))
    batch = Batch([pieces, whole, away], BLOCK, CPU)
    assert not batch.plain
    assert batch.append_rows.tolist() == [0, 1]
    (share,) = batch.shares
    assert share.rows.tolist() == [0, 0, 2]
    assert share.append_rows.tolist() == [2]

    q = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(4))
    kv = memory.layer(0)
    # The holder's blocks, in this test's memory: 5 and 6 for the first sequence, 10 and 11 for the third.
    elsewhere = attend_batch(
        q[share.rows], kv, torch.tensor([[5, 0], [6, 0], [10, 11]]), torch.tensor([4, 4, 8]), scale=0.3,
        first_key_positions=torch.tensor([4, 8, 0]), query_positions=batch.positions[share.rows],
    )  # fmt: skip
    merged = batch.gather([(batch.part_groups, local_part(batch, memory, q)), (share.groups, elsewhere)], q)
    expected = attend_batch(
        q, kv, torch.tensor([[3, 5, 6, 8], [0, 1, 2, 0], [10, 11, 0, 0]]), torch.tensor([15, 9, 8]),
        scale=0.3,
        first_key_positions=torch.zeros(3, dtype=torch.long), query_positions=batch.positions,
    )  # fmt: skip
    torch.testing.assert_close(merged.out, expected.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged.lse, expected.lse, rtol=1e-5, atol=1e-6)


def test_a_row_whose_holders_are_lost_harms_no_other() -> None:
    memory = filled(4)
    batch = Batch([make(8, remote(0, 2)), make(5, LocalRun(first_block=0, blocks=[0, 1]))], BLOCK, CPU)
    q = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5))
    merged = batch.gather([(batch.part_groups, local_part(batch, memory, q))], q)
    assert merged.out[0].abs().max() == 0
    assert torch.equal(merged.out[1], local_part(batch, memory, q).out[0])
    away = Batch([make(8, remote(0, 2))], BLOCK, CPU)
    assert away.slots().tolist() == []
    assert away.gather([], q[:1]).lse.isneginf().all()


def test_rows_ordered_by_holder_are_sent_and_gathered_in_one_piece() -> None:
    other = cast(RemoteHolder, "nor this one")
    apart = [
        remote(0, 2, 1),
        RemoteRun(first_block=0, count=2, holder=other, ref=SegmentRef(handle=2, epoch=1)),
    ]
    sequences = [make(6, apart[n % 2]) for n in range(5)]
    batch = Batch(by_holder(sequences), BLOCK, CPU)
    assert sorted(str(share.span) for share in batch.shares) in (
        ["slice(0, 2, None)", "slice(2, 5, None)"],
        ["slice(0, 3, None)", "slice(3, 5, None)"],
    )
    q = torch.randn(5, 4, 8)
    whole = Partial(out=torch.randn(5, 4, 8), lse=torch.randn(5, 4))
    reported = [
        (share.groups, Partial(out=whole.out[share.rows], lse=whole.lse[share.rows]))
        for share in batch.shares
    ]
    assert torch.equal(batch.gather(reported, q).out, whole.out)
    # One holder is lost: its rows are empty, the others are where they belong.
    left = batch.gather(reported[1:], q)
    rows = batch.shares[1].rows
    assert torch.equal(left.out[rows], whole.out[rows])
    assert bool(left.lse[batch.shares[0].rows].isneginf().all())
    # Unordered, and one that lies on both.
    mixed = Batch([*sequences, make(14, apart[0], remote(2, 2, 3))], BLOCK, CPU)
    assert all(share.span is None for share in mixed.shares)


def test_mini_batches_have_about_as_much_kv_each_and_give_the_same() -> None:
    """Two holders, one with a long sequence and three short ones; a row with two pieces on one holder."""
    other = cast(RemoteHolder, "nor this one")

    def on(holder: RemoteHolder, blocks: int, handle: int) -> RemoteRun:
        ref = SegmentRef(handle=handle, epoch=1)
        return RemoteRun(first_block=0, count=blocks, holder=holder, ref=ref)

    sizes = [(HOLDER, 6), (HOLDER, 2), (HOLDER, 2), (HOLDER, 2), (other, 1), (other, 3)]
    sequences = [make(4 * size - 1, on(holder, size, n)) for n, (holder, size) in enumerate(sizes)]
    batch = Batch(by_holder(sequences), BLOCK, CPU)
    q = torch.randn(6, 4, 8)
    whole = Partial(out=torch.randn(6, 4, 8), lse=torch.randn(6, 4))
    for pieces, most in ((2, {6, 1, 3}), (9, {6, 2, 1, 3}), (1, {12, 4})):
        batch.divide(pieces)
        kv = {sum(segment.run.count for segment in share.segments) for share in batch.shares}
        assert kv == most
        assert sorted(row for share in batch.shares for row in share.rows.tolist()) == list(range(6))
        # Each holder's first one comes before the second ones.
        assert len({id(share.holder) for share in batch.shares[:2]}) == 2
        reported = [
            (share.groups, Partial(out=whole.out[share.rows], lse=whole.lse[share.rows]))
            for share in batch.shares
        ]
        assert torch.equal(batch.gather(reported, q).out, whole.out)
        left = batch.gather(reported[1:], q)
        lost = batch.shares[0].rows
        assert bool(left.lse[lost].isneginf().all())
        assert int(left.lse.isneginf().all(1).sum()) == len(lost)
