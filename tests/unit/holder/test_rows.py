"""A plan that is used for layer after layer gives what a new one gives, for as long as its segments stay."""

from __future__ import annotations

import torch

from kvcommons.attention.memory import BlockMemory, byte_view
from kvcommons.attention.partial import attend_batch
from kvcommons.holder.rows import Part, RowPlan, RowPlans
from kvcommons.holder.segment import Segment
from kvcommons.holder.segments import SegmentRef
from kvcommons.rblock.layout import Layout

BLOCK = 4
LAYOUT = Layout(layers=2, kv_heads=2, block_tokens=BLOCK, head_dim=8, kv_dtype="float32", query_heads=4)
SCALE = 0.3


def segment(handle: int, blocks: list[int]) -> Segment:
    return Segment(handle=handle, owner="d", sequence="s", first_position=0, blocks=blocks, expires_s=None)


def part(blocks: list[int], length: int, row: int, *, append: bool) -> Part:
    return Part(
        blocks=blocks, first_block=0, first_row=row, rows=1, query_position=length - 1, key_position=0,
        append=append, length=length,
    )  # fmt: skip


def plan_of(memory: BlockMemory, segments: list[Segment], lengths: list[int]) -> RowPlan:
    refs = [SegmentRef(handle=one.handle, epoch=1) for one in segments]
    parts = [
        part(one.blocks, length, row, append=row != 1)
        for row, (one, length) in enumerate(zip(segments, lengths, strict=True))
    ]
    return RowPlan(memory, [None, 3], SCALE, refs, segments, parts)


def test_appends_and_attends_layer_by_layer() -> None:
    source = torch.Generator().manual_seed(5)
    memory = BlockMemory(LAYOUT, 8)
    memory.tensor.copy_(torch.randn(memory.tensor.shape, generator=source))
    segments = [segment(1, [5, 2]), segment(2, [7]), segment(3, [0, 1, 4])]
    lengths = [6, 4, 9]
    plan = plan_of(memory, segments, lengths)
    assert plan.appended == 2
    for layer, window in ((0, None), (1, 3)):
        new = torch.randn(2, 2, 2, 1, 8, generator=source)
        q = torch.randn(3, 4, 8, generator=source)
        with plan.buffers() as buffers:
            for view, sent in zip(buffers.request, (q, new), strict=True):
                view[:] = byte_view(sent)
            plan.attend(layer, buffers)
            answer = torch.frombuffer(bytearray(b"".join(buffers.answer)), dtype=torch.float32)
        kv = memory.layer(layer)
        assert torch.equal(kv[2, :, :, 1], new[0, :, :, 0])
        assert torch.equal(kv[4, :, :, 0], new[1, :, :, 0])
        positions = torch.tensor(lengths) - 1
        expected = attend_batch(
            q, kv, torch.tensor([[5, 2, 0], [7, 0, 0], [0, 1, 4]]), torch.tensor(lengths), scale=SCALE,
            first_key_positions=torch.zeros(3, dtype=torch.long), query_positions=positions, window=window,
        )  # fmt: skip
        torch.testing.assert_close(answer[: 3 * 4 * 8].view(3, 4, 8), expected.out)
        torch.testing.assert_close(answer[3 * 4 * 8 :].view(3, 4), expected.lse)


def test_each_request_under_way_has_memory_of_its_own() -> None:
    plan = plan_of(BlockMemory(LAYOUT, 8), [segment(1, [5, 2])], [6])
    with plan.buffers() as one, plan.buffers() as other:
        assert one.q.data_ptr() != other.q.data_ptr()
        assert one.request_bytes == 4 * 4 * 8 + 4 * 2 * 2 * 8
    with plan.buffers() as again:
        assert again in (one, other)


def test_holds_while_blocks_are_where_they_were() -> None:
    memory = BlockMemory(LAYOUT, 8)
    segments = [segment(1, [5, 2]), segment(2, [7])]
    plan = plan_of(memory, segments, [6, 4])
    assert plan.holds_for(segments)
    assert not plan.holds_for([segments[0], segment(2, [7])])  # another life of that handle
    segments[1].blocks.append(3)  # grown: another plan, although this one would do
    assert not plan.holds_for(segments)
    plan = plan_of(memory, segments, [6, 4])
    segments[0].frozen = 1  # no more tokens are appended there, maybe
    assert not plan.holds_for(segments)


def test_plans_in_use_are_kept_however_many_take_turns() -> None:
    """Two debtors with two batches in eight mini-batches each, beside what went before."""
    memory, plans = BlockMemory(LAYOUT, 8), RowPlans()
    plan = plan_of(memory, [segment(1, [1])], [2])
    for iteration in range(20):
        live = [b"%d of %d" % (n, iteration) for n in range(32)]
        for wording in live:
            plans.keep(wording, plan)
        for _ in range(3):
            assert all(plans.find(wording) is plan for wording in live)
    assert plans.find(b"0 of 0") is None


def test_what_was_asked_for_again_outlives_what_was_not() -> None:
    memory, plans = BlockMemory(LAYOUT, 8), RowPlans()
    plan = plan_of(memory, [segment(1, [1])], [2])
    plans.keep(b"asked for", plan)
    for n in range(300):
        plans.keep(b"once %d" % n, plan)
        assert plans.find(b"asked for") is plan
    assert plans.find(b"once 0") is None
    assert plans.find(b"once 299") is plan


def test_the_memory_of_all_plans_is_bounded() -> None:
    memory = BlockMemory(LAYOUT, 8)
    plan = plan_of(memory, [segment(1, [5, 2]), segment(2, [7])], [6, 4])
    with plan.buffers() as buffers:
        held = buffers.request_bytes + sum(memoryview(view).nbytes for view in buffers.answer)
    assert held < plan.kept_bytes < held + 100
    plans = RowPlans(3 * plan.kept_bytes)
    for wording in (b"1", b"2", b"3", b"3", b"4"):
        plans.keep(wording, plan)
    assert [plans.find(wording) is plan for wording in (b"1", b"2", b"3", b"4")] == [False, True, True, True]
    one = RowPlans(1)
    one.keep(b"large", plan)
    assert one.find(b"large") is plan


def test_a_plan_keeps_the_memory_of_one_request() -> None:
    plan = plan_of(BlockMemory(LAYOUT, 8), [segment(1, [5, 2])], [6])
    with plan.buffers() as one, plan.buffers() as other:
        pass
    with plan.buffers() as again, plan.buffers() as new:
        assert again in (one, other)
        assert new not in (one, other)
