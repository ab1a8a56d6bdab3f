"""Handles, leases and pins: no block has two owners, none is lost, and what is gone stays gone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvcommons.errors import CapacityExhausted, Conflict, InvalidInput, StaleEpoch
from kvcommons.holder.segment import Pin, Segment
from kvcommons.holder.segments import SegmentRef, SegmentTable, new_epoch
from kvcommons.rblock.allocator import BlockAllocator
from tests.clock import Clock

EPOCH = 77


CLOCK = Clock()


@pytest.fixture(autouse=True)
def anew() -> None:
    CLOCK.now_s = 0.0


def make(total: int = 10, lend: int = 10) -> tuple[SegmentTable, BlockAllocator]:
    allocator = BlockAllocator(total)
    table = SegmentTable(allocator, instance_id="holder", epoch=EPOCH, lend_blocks_max=lend, clock=CLOCK)
    return table, allocator


def at(now_s: float, table: SegmentTable) -> SegmentTable:
    CLOCK.now_s = now_s
    return table


def lend(table: SegmentTable, blocks: int, *, owner: str = "debtor") -> SegmentRef:
    return table.lend(owner, "sequence", blocks, first_position=0, lease_s=10)


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
            table.grow(ref, 1, owner="debtor", lease_s=1)
    table.release([SegmentRef(handle=here.handle, epoch=EPOCH - 1)])
    assert table.find(here).handle == here.handle
    assert lend(table, 1).handle not in (gone.handle, here.handle)


def test_no_room_changes_nothing() -> None:
    table, allocator = make(total=10, lend=5)
    ref = lend(table, 4)
    with pytest.raises(CapacityExhausted, match="1 more may be lent"):
        lend(table, 2)
    with pytest.raises(CapacityExhausted):
        table.grow(ref, 6, owner="debtor", lease_s=10)
    assert (allocator.in_use, len(table.segments), len(table.find(ref).blocks)) == (4, 1, 4)
    full, small = make(total=3, lend=10)
    with pytest.raises(CapacityExhausted):
        lend(full, 4)
    assert (small.in_use, full.segments) == (0, [])


def test_growing_appends_and_renews_for_the_owner_only() -> None:
    table, allocator = make()
    ref = lend(table, 2)
    before = list(table.find(ref).blocks)
    at(3, table).grow(ref, 5, owner="debtor", lease_s=10)
    at(9, table).grow(ref, 5, owner="debtor", lease_s=10)  # its answer was lost: no more than that
    at(9, table).grow(ref, 4, owner="debtor", lease_s=10)  # and one from before it, late
    assert table.find(ref).blocks[:2] == before
    assert allocator.in_use == 5
    assert at(18, table).expire() == []
    with pytest.raises(InvalidInput, match="belongs to debtor"):
        at(9, table).grow(ref, 6, owner="thief", lease_s=10)
    with pytest.raises(InvalidInput, match="at least one block"):
        at(9, table).grow(ref, 0, owner="debtor", lease_s=10)


def test_a_segment_grows_to_a_size_that_counts_what_was_trimmed() -> None:
    table, allocator = make()
    ref = lend(table, 4)
    table.trim(frozen(table, ref, 3, generation=1), owner="debtor")
    table.grow(replace(ref, generation=1), 6, owner="debtor", lease_s=10)
    assert (len(table.find(replace(ref, generation=1)).blocks), allocator.in_use) == (3, 3)


def test_what_nobody_renews_is_reclaimed() -> None:
    table, allocator = make()
    kept, lost = lend(table, 2), lend(table, 3)
    own_blocks = allocator.allocate(1)
    own = table.own("mine", own_blocks)
    assert at(9, table).renew("debtor", [kept], lease_s=10) == []
    assert at(9.9, table).expire() == []
    assert at(14, table).expire(grace_s=4.1) == []
    assert [segment.handle for segment in at(10, table).expire()] == [lost.handle]
    assert allocator.in_use == 3
    assert at(10, table).renew("debtor", [kept, lost, own], lease_s=10) == [lost.handle, own.handle]
    assert at(10, table).renew("thief", [kept], lease_s=10) == [kept.handle]
    assert [segment.handle for segment in at(1e9, table).expire()] == [kept.handle]
    table.release([own])
    assert allocator.in_use == 1, "the owner's own reference"
    allocator.release(own_blocks)


def test_a_pinned_segments_blocks_are_given_to_nobody() -> None:
    table, allocator = make(total=4, lend=4)
    ref = lend(table, 4)
    first, second = table.pin(ref), table.pin(ref)
    assert first.segment is second.segment
    table.release([ref])
    with pytest.raises(StaleEpoch):
        table.pin(ref)
    with pytest.raises(CapacityExhausted):
        lend(table, 1)
    table.unpin(first)
    assert allocator.in_use == 4
    table.unpin(second)
    assert allocator.in_use == 0


def test_own_segments_share_references_with_their_owner() -> None:
    table, allocator = make()
    blocks = allocator.allocate(3)
    ref = table.own("mine", blocks[:2], first_position=5)
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
        table.lend(owner, "s", blocks, first_position=0, lease_s=lease_s)
    assert caught.value.param == param
    assert allocator.in_use == 0


def test_epochs_of_two_lives_differ() -> None:
    assert 0 < new_epoch() < new_epoch() < 2**64


def frozen(table: SegmentTable, ref: SegmentRef, until_block: int, *, generation: int) -> SegmentRef:
    table.freeze(ref, generation, until_block, owner="debtor")
    return replace(ref, generation=generation)


def test_frozen_blocks_move_while_older_accesses_go_on() -> None:
    table, allocator = make()
    ref = lend(table, 5)
    segment = table.find(ref)
    new = frozen(table, ref, 3, generation=1)
    table.freeze(ref, 1, 3, owner="debtor")  # asked again
    assert (segment.generation, segment.frozen, segment.writable_from) == (1, 3, 3)
    with pytest.raises(Conflict, match="begins a later one"):
        table.freeze(ref, 1, 2, owner="debtor")
    reading = table.pin(ref)
    assert table.trim(new, owner="debtor") == 3
    assert table.trim(new, owner="debtor") == 0
    # What reads them keeps them; nobody else with the old generation gets in.
    assert (allocator.in_use, table.lent_blocks, len(segment.blocks), segment.trimmed) == (5, 5, 2, 3)
    assert table.parting(ref)
    with pytest.raises(StaleEpoch, match="have moved"):
        table.pin(ref)
    later = table.pin(new)
    table.unpin(reading)
    assert not table.parting(ref)
    assert (allocator.in_use, table.lent_blocks) == (2, 2)
    table.unpin(later)
    table.grow(new, 6, owner="debtor", lease_s=10)
    assert allocator.in_use == 3
    table.release([ref])
    assert (allocator.in_use, table.lent_blocks) == (0, 0)


def test_a_freeze_is_taken_back_or_outlived() -> None:
    table, allocator = make()
    ref = lend(table, 4)
    first = frozen(table, ref, 2, generation=1)
    table.thaw(first, owner="thief")
    assert table.find(ref).frozen == 2
    table.thaw(first, owner="debtor")
    second = frozen(table, first, 4, generation=2)
    # What belongs to the first freeze does nothing to the second.
    table.thaw(first, owner="debtor")
    assert table.trim(first, owner="debtor") == 0
    assert table.find(ref).frozen == 4
    with pytest.raises(Conflict, match="being moved"):
        table.adopt(second, former_owner="debtor", owner="b", sequence="s", lease_s=1)
    with pytest.raises(InvalidInput, match="belongs to debtor"):
        table.freeze(second, 3, 1, owner="thief")
    # The owner is not heard of any more: its lease ends all of it.
    at(99, table).expire()
    assert table.trim(second, owner="debtor") == 0
    assert allocator.in_use == 0


def test_a_freeze_that_comes_late_changes_nothing() -> None:
    """Its owner heard nothing of it, and has gone on meanwhile."""
    table, allocator = make()
    ref = lend(table, 6)
    segment = table.find(ref)
    given_up, moving = replace(ref, generation=4), frozen(table, ref, 3, generation=7)
    with pytest.raises(Conflict, match="begins a later one"):
        table.freeze(ref, given_up.generation, 5, owner="debtor")
    assert table.trim(moving, owner="debtor") == 3
    with pytest.raises(StaleEpoch):  # it comes with the generation of its time
        table.freeze(ref, given_up.generation, 5, owner="debtor")
    with pytest.raises(Conflict, match="begins a later one"):
        table.freeze(moving, 7, 3, owner="debtor")
    # A freeze that nobody heard of is in nobody's way, and is nobody's any more.
    unheard = frozen(table, moving, 5, generation=8)
    table.thaw(frozen(table, moving, 4, generation=9), owner="debtor")
    assert table.trim(unheard, owner="debtor") == 0
    with pytest.raises(Conflict, match="begins a later one"):  # thawed for good
        table.freeze(moving, 9, 4, owner="debtor")
    assert (segment.writable_from, segment.trimmed, allocator.in_use) == (3, 3, 3)


def test_a_trim_that_was_not_heard_is_made_up_for_by_the_next() -> None:
    table, allocator = make()
    ref = lend(table, 6)
    frozen(table, ref, 2, generation=1)  # copied and switched; its trim is lost
    assert table.trim(frozen(table, replace(ref, generation=1), 5, generation=2), owner="debtor") == 5
    assert allocator.in_use == 1


@pytest.mark.parametrize("until_block", [0, 2, 7])
def test_no_more_can_be_frozen_than_there_is(until_block: int) -> None:
    table, _ = make()
    ref = lend(table, 6)
    table.trim(frozen(table, ref, 2, generation=1), owner="debtor")
    with pytest.raises(InvalidInput, match="cannot be frozen"):
        table.freeze(replace(ref, generation=1), 2, until_block, owner="debtor")


def test_trimmed_blocks_are_set_aside_for_their_settlement() -> None:
    table, allocator = make(total=6, lend=6)
    ref = lend(table, 4)
    assert table.pledges.pledge("swap", 5, lease_s=10) == 2
    assert at(5, table).pledges.pledge("swap", 5, lease_s=10) == 2
    mine = table.pledges.draw("swap", 2)
    with pytest.raises(CapacityExhausted, match="set aside"):
        table.pledges.draw("swap", 1)
    assert table.trim(frozen(table, ref, 3, generation=1), owner="debtor", settlement="swap") == 3
    assert (table.pledges.pledged("swap"), table.pledges.blocks, table.lent_blocks) == (3, 3, 1)
    assert allocator.free == 0
    allocator.release(mine)
    at(9, table).expire()
    assert table.pledges.pledged("swap") == 3
    table.pledges.redeem("swap")
    assert (table.pledges.pledged("swap"), allocator.free) == (0, 5)
    at(5, table).pledges.pledge("forgotten", 5, lease_s=10)
    at(19, table).expire(grace_s=4.1)
    assert table.pledges.pledged("forgotten") == 5
    at(15, table).expire()
    assert allocator.free == 6


def test_a_segment_changes_hands_and_its_former_owner_is_refused() -> None:
    table, allocator = make(total=4, lend=4)
    ref = lend(table, 4)
    blocks = list(table.find(ref).blocks)
    reading = table.pin(ref)
    new = table.adopt(ref, former_owner="debtor", owner="heir", sequence="s", lease_s=10)
    with pytest.raises(StaleEpoch):
        table.pin(ref)
    assert table.renew("debtor", [ref], lease_s=10) == [ref.handle]
    table.unpin(reading)
    assert table.find(new).blocks == blocks
    assert (allocator.in_use, table.lent_blocks) == (4, 4)
    table.release([new])
    assert (allocator.in_use, table.lent_blocks) == (0, 0)


def test_shared_blocks_count_once_are_written_by_nobody_and_last_as_long_as_the_last_owner() -> None:
    table, allocator = make(total=5, lend=5)
    ref = lend(table, 3)
    fork = table.adopt(ref, former_owner="debtor", owner="debtor", sequence="f", lease_s=10, shared_blocks=2)
    table.grow(fork, 4, owner="debtor", lease_s=10)
    assert (table.find(ref).writable_from, table.find(fork).writable_from) == (2, 2)
    assert (allocator.in_use, table.lent_blocks, len(table.find(fork).blocks)) == (5, 5, 4)
    table.pledges.pledge("swap", 5, lease_s=10)
    # A shared block that one of the two gives back is nobody's to set aside.
    table.trim(frozen(table, ref, 3, generation=1), owner="debtor", settlement="swap")
    assert (table.pledges.pledged("swap"), table.lent_blocks) == (1, 4)
    table.release([fork])
    assert allocator.in_use == 1
    with pytest.raises(InvalidInput, match="cannot be shared"):
        table.adopt(ref_of := lend(table, 1), former_owner="debtor", owner="d", sequence="s", lease_s=1,
                    shared_blocks=2)  # fmt: skip
    table.release([ref_of])


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events_keeps_blocks_and_owners_matched(seed: int) -> None:
    """No block with two owners unless it is shared, none without one, what is read is given to nobody, all
    back at the end."""
    chance = random.Random(seed)
    table, allocator = make(total=12, lend=9)
    refs, pins = list[SegmentRef](), list[tuple[Pin, list[int]]]()
    drawn: list[int] = []
    known: dict[int, Segment] = {}
    for _ in range(600):
        CLOCK.now_s += chance.random()
        event = chance.choice(
            ("lend", "lend", "grow", "release", "renew", "expire", "pin", "unpin", "freeze", "thaw", "trim",
             "adopt", "share", "pledge", "draw", "redeem")
        )  # fmt: skip
        place = chance.randrange(len(refs)) if refs else None
        ref = None if place is None else refs[place]
        try:
            if event == "lend":
                refs.append(lend(table, chance.randint(1, 4)))
            elif event == "unpin" and pins:
                table.unpin(pins.pop(chance.randrange(len(pins)))[0])
            elif event == "expire":
                table.expire()
            elif event == "pledge":
                table.pledges.pledge("swap", chance.randint(1, 3), lease_s=5)
            elif event == "draw" and table.pledges.pledged("swap"):
                drawn += table.pledges.draw("swap", 1)
            elif event == "redeem":
                table.pledges.redeem("swap")
                allocator.release(drawn)
                drawn = []
            elif ref is None or place is None:
                continue
            elif event == "grow":
                table.grow(ref, chance.randint(1, 9), owner="debtor", lease_s=10)
            elif event == "release":
                table.release([ref])
            elif event == "renew":
                table.renew("debtor", [ref], lease_s=10)
            elif event == "pin":
                pins.append((pin := table.pin(ref), list(pin.segment.blocks)))
            elif event == "freeze":
                generation = ref.generation + chance.randint(0, 2)
                refs[place] = frozen(table, ref, chance.randint(1, 6), generation=generation)
            elif event == "thaw":
                table.thaw(ref, owner="debtor")
            elif event == "trim":
                table.trim(ref, owner="debtor", settlement=chance.choice(("", "swap")))
            else:
                shared = chance.randint(1, 2) if event == "share" else 0
                refs.append(
                    table.adopt(ref, former_owner="debtor", owner="debtor", sequence="s", lease_s=10,
                                shared_blocks=shared)
                )  # fmt: skip
        except (CapacityExhausted, StaleEpoch, Conflict, InvalidInput):
            pass
        known.update({segment.handle: segment for segment in table.segments})
        alive = [s for s in known.values() if not s.released or s.pins]
        owned = {block for segment in alive for block in segment.held_blocks}
        assert len(owned) + table.pledges.blocks + len(drawn) == allocator.in_use, f"seed {seed}"
        assert table.lent_blocks == len(owned) <= 9
        assert all(owned.issuperset(blocks) for _, blocks in pins), f"seed {seed}: a block is read by nobody"
    for pin, _ in pins:
        table.unpin(pin)
    at(CLOCK.now_s + 100, table).expire()
    allocator.release(drawn)
    assert (allocator.in_use, table.lent_blocks) == (0, 0)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 600.001, 4_294_967.295, float("nan"), float("inf")])
def test_a_lease_is_bounded_however_it_is_asked_for(lease_s: float) -> None:
    """Or whoever asks once has the memory for good: 2**32 ms are seven weeks."""
    table, allocator = make()
    held = table.lend("debtor", "sequence", 2, first_position=0, lease_s=600)
    for ask in (
        lambda: table.lend("debtor", "sequence", 1, first_position=0, lease_s=lease_s),
        lambda: table.grow(held, 3, owner="debtor", lease_s=lease_s),
        lambda: table.renew("debtor", [held], lease_s=lease_s),
        lambda: table.adopt(held, former_owner="debtor", owner="b", sequence="s", lease_s=lease_s),
        lambda: table.pledges.pledge("settlement", 1, lease_s=lease_s),
    ):
        with pytest.raises(InvalidInput, match="lease"):
            ask()
    assert allocator.in_use == 2
