"""Handles, leases and pins: no block has two owners, none is lost, and what is gone stays gone."""

from __future__ import annotations

import random

import pytest

from kvcommons.errors import CapacityExhausted, InvalidInput, StaleEpoch
from kvcommons.holder.segments import Segment, SegmentRef, SegmentTable, new_epoch
from kvcommons.rblock.allocator import BlockAllocator

EPOCH = 77


def make(total: int = 10, lend: int = 10) -> tuple[SegmentTable, BlockAllocator]:
    allocator = BlockAllocator(total)
    return SegmentTable(allocator, epoch=EPOCH, lend_blocks_max=lend), allocator


def lend(table: SegmentTable, blocks: int, *, owner: str = "debtor", now_s: float = 0.0) -> SegmentRef:
    return table.lend(owner, "sequence", blocks, first_position=0, lease_s=10, now_s=now_s)


def test_a_reservation_takes_blocks_until_its_release() -> None:
    table, allocator = make()
    ref = lend(table, 4)
    assert ref.epoch == EPOCH
    assert len(set(table.find(ref).blocks)) == 4
    assert (allocator.in_use, table.lent_blocks, table.lendable_blocks) == (4, 4, 6)
    table.release([ref])
    table.release([ref])  # asking twice does no harm
    assert (allocator.in_use, table.lent_blocks, table.segments) == (0, 0, [])


def test_a_released_handle_and_another_epoch_are_stale() -> None:
    table, _ = make()
    gone, here = lend(table, 1), lend(table, 1)
    table.release([gone])
    for ref in (gone, SegmentRef(handle=here.handle, epoch=EPOCH - 1), SegmentRef(handle=99, epoch=EPOCH)):
        with pytest.raises(StaleEpoch, match="recompute"):
            table.pin(ref)
        with pytest.raises(StaleEpoch):
            table.grow(ref, 1, owner="debtor", lease_s=1, now_s=0)
    table.release([SegmentRef(handle=here.handle, epoch=EPOCH - 1)])
    assert table.find(here).handle == here.handle
    assert lend(table, 1).handle not in (gone.handle, here.handle)


def test_no_room_changes_nothing() -> None:
    table, allocator = make(total=10, lend=5)
    ref = lend(table, 4)
    with pytest.raises(CapacityExhausted, match="1 more may be lent"):
        lend(table, 2)
    with pytest.raises(CapacityExhausted):
        table.grow(ref, 2, owner="debtor", lease_s=10, now_s=0)
    assert (allocator.in_use, len(table.segments), len(table.find(ref).blocks)) == (4, 1, 4)
    full, small = make(total=3, lend=10)
    with pytest.raises(CapacityExhausted):
        lend(full, 4)
    assert (small.in_use, full.segments) == (0, [])


def test_growing_appends_and_renews_for_the_owner_only() -> None:
    table, allocator = make()
    ref = lend(table, 2)
    before = list(table.find(ref).blocks)
    table.grow(ref, 3, owner="debtor", lease_s=10, now_s=9)
    assert table.find(ref).blocks[:2] == before
    assert allocator.in_use == 5
    assert table.expire(18) == []
    with pytest.raises(InvalidInput, match="belongs to debtor"):
        table.grow(ref, 1, owner="thief", lease_s=10, now_s=9)


def test_what_nobody_renews_is_reclaimed() -> None:
    table, allocator = make()
    kept, lost = lend(table, 2), lend(table, 3)
    own_blocks = allocator.allocate(1)
    own = table.adopt("holder", "mine", own_blocks, first_position=0)
    assert table.renew("debtor", [kept], lease_s=10, now_s=9) == []
    assert table.expire(9.9) == []
    assert [segment.handle for segment in table.expire(10)] == [lost.handle]
    assert allocator.in_use == 3
    assert table.renew("debtor", [kept, lost, own], lease_s=10, now_s=10) == [lost.handle, own.handle]
    assert table.renew("thief", [kept], lease_s=10, now_s=10) == [kept.handle]
    assert [segment.handle for segment in table.expire(1e9)] == [kept.handle]
    table.release([own])
    assert allocator.in_use == 1, "the owner's own reference"
    allocator.release(own_blocks)


def test_a_pinned_segments_blocks_are_given_to_nobody() -> None:
    table, allocator = make(total=4, lend=4)
    ref = lend(table, 4)
    first, second = table.pin(ref), table.pin(ref)
    assert first is second
    table.release([ref])
    with pytest.raises(StaleEpoch):
        table.pin(ref)
    with pytest.raises(CapacityExhausted):
        lend(table, 1)
    table.unpin(first)
    assert allocator.in_use == 4
    table.unpin(first)
    assert allocator.in_use == 0


def test_own_segments_share_references_with_their_owner() -> None:
    table, allocator = make()
    blocks = allocator.allocate(3)
    ref = table.adopt("holder", "mine", blocks[:2], first_position=5)
    table.extend(ref, blocks[2:])
    allocator.release(blocks)
    assert (allocator.in_use, table.lent_blocks) == (3, 0)
    assert table.find(ref).blocks == blocks
    table.release([ref])
    assert allocator.in_use == 0


@pytest.mark.parametrize(
    ("owner", "blocks", "lease_s", "param"),
    [("", 1, 1, "owner"), ("a", 0, 1, "blocks"), ("a", 1, 0, "lease_ms")],
)
def test_a_senseless_reservation_is_refused(owner: str, blocks: int, lease_s: float, param: str) -> None:
    table, allocator = make()
    with pytest.raises(InvalidInput) as caught:
        table.lend(owner, "s", blocks, first_position=0, lease_s=lease_s, now_s=0)
    assert caught.value.param == param
    assert allocator.in_use == 0


def test_epochs_of_two_lives_differ() -> None:
    assert 0 < new_epoch() < new_epoch() < 2**64


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_keeps_blocks_and_owners_matched(seed: int) -> None:
    """No block with two owners, no owner without its blocks, all back at the end."""
    chance = random.Random(seed)
    table, allocator = make(total=12, lend=9)
    now_s, refs, pins = 0.0, list[SegmentRef](), list[Segment]()
    for _ in range(400):
        now_s += chance.random()
        event = chance.choice(("lend", "grow", "release", "renew", "expire", "pin", "unpin"))
        ref = chance.choice(refs) if refs else None
        try:
            if event == "lend":
                refs.append(lend(table, chance.randint(1, 4), now_s=now_s))
            elif event == "grow" and ref:
                table.grow(ref, chance.randint(1, 3), owner="debtor", lease_s=10, now_s=now_s)
            elif event == "release" and ref:
                table.release([ref])
            elif event == "renew" and ref:
                table.renew("debtor", [ref], lease_s=10, now_s=now_s)
            elif event == "expire":
                table.expire(now_s)
            elif event == "pin" and ref:
                pins.append(table.pin(ref))
            elif event == "unpin" and pins:
                table.unpin(pins.pop(chance.randrange(len(pins))))
        except (CapacityExhausted, StaleEpoch):
            pass
        holders = list(table.segments) + list({id(p): p for p in pins if p.released}.values())
        owned = [block for segment in holders for block in segment.blocks]
        assert len(owned) == len(set(owned)) == allocator.in_use, f"seed {seed}"
        assert table.lent_blocks <= 9
    for segment in pins:
        table.unpin(segment)
    table.expire(now_s + 100)
    assert allocator.in_use == 0
