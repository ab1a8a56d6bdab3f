"""Whoever comes back to the same segments again and again: as good as pins, and in nobody's way between two
accesses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcommons.errors import CapacityExhausted, Conflict, InvalidInput, StaleEpoch
from kvcommons.holder.segment import Stay
from kvcommons.holder.segments import SegmentRef, SegmentTable
from kvcommons.rblock.allocator import BlockAllocator

CHANGES: dict[str, Callable[[SegmentTable, SegmentRef], object]] = {
    "release": lambda table, ref: table.release([ref]),
    "expire": lambda table, ref: table.expire(11),
    "freeze": lambda table, ref: table.freeze(ref, 2, 1, owner="debtor"),
    "thaw": lambda table, ref: table.thaw(ref, owner="debtor"),
    "trim": lambda table, ref: table.trim(ref, owner="debtor"),
    "share": lambda table, ref: adopt(table, ref, 2),
}
NO_CHANGES: dict[str, Callable[[SegmentTable, SegmentRef], object]] = {
    "grow": lambda table, ref: table.grow(ref, 5, owner="debtor", lease_s=10, now_s=0),
    "renew": lambda table, ref: table.renew("debtor", [ref], lease_s=10, now_s=5),
    "pin": lambda table, ref: table.unpin(table.pin(ref)),
    "others": lambda table, ref: table.release([lend(table, 1)]),
    "nothing to trim": lambda table, ref: table.trim(SegmentRef(handle=ref.handle, epoch=7), owner="debtor"),
}


class Visitor:
    def __init__(self) -> None:
        self.busy = False
        self.ended = False

    def end(self) -> bool:
        self.ended = True
        return not self.busy


def lend(table: SegmentTable, blocks: int) -> SegmentRef:
    return table.lend("debtor", "s", blocks, first_position=0, lease_s=10, now_s=0)


def adopt(table: SegmentTable, ref: SegmentRef, shared: int) -> SegmentRef:
    return table.adopt(
        ref, former_owner="debtor", owner="debtor", sequence="t", lease_s=10, now_s=0, shared_blocks=shared
    )


def begin() -> tuple[SegmentTable, BlockAllocator, SegmentRef]:
    """A segment of four blocks, two of them frozen in its generation 1, beside another one."""
    allocator = BlockAllocator(12)
    table = SegmentTable(allocator, epoch=7, lend_blocks_max=12)
    ref = lend(table, 4)
    table.freeze(ref, 1, 2, owner="debtor")
    return table, allocator, SegmentRef(handle=ref.handle, epoch=7, generation=1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_it_at_once_between_two_accesses(change: str) -> None:
    table, _, ref = begin()
    if change == "share":
        table.thaw(ref, owner="debtor")
    other, visitor = lend(table, 1), Visitor()
    stay = table.stay([ref, other, ref], visitor.end)
    segments = [pin.segment for pin in stay.pins]
    assert [len(segment.pins) for segment in segments] == [2, 1, 2]
    CHANGES[change](table, ref)
    assert visitor.ended
    assert not any(segment.pins or segment.stays or segment.parting for segment in segments)
    table.leave(stay)


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_changes_nothing_does_not_end_it(change: str) -> None:
    table, _, ref = begin()
    visitor = Visitor()
    stay = table.stay([ref], visitor.end)
    NO_CHANGES[change](table, ref)
    assert not visitor.ended
    table.leave(stay)
    assert not table.find(ref).pins
    assert not table.find(ref).stays


@pytest.mark.parametrize(("change", "back"), [("release", 4), ("trim", 2)])
def test_an_access_under_way_keeps_the_blocks(change: str, back: int) -> None:
    table, allocator, ref = begin()
    visitor = Visitor()
    stay = table.stay([ref], visitor.end)
    visitor.busy = True
    CHANGES[change](table, ref)
    assert (visitor.ended, allocator.in_use) == (True, 4)
    table.leave(stay)
    table.leave(stay)
    assert allocator.in_use == 4 - back


def test_all_segments_or_none() -> None:
    table, _, ref = begin()
    gone = lend(table, 1)
    table.release([gone])
    with pytest.raises(StaleEpoch):
        table.stay([ref, gone], Visitor().end)
    assert not table.find(ref).pins
    assert not table.find(ref).stays


@pytest.mark.parametrize("seed", range(10))
def test_while_it_lasts_blocks_are_where_they_were(seed: int) -> None:
    """In any order of events: nobody else gets them, and they take tokens from where they did."""
    chance = random.Random(seed)
    table, allocator, _ = begin()
    refs = [segment_ref(table, segment.handle) for segment in table.segments]
    stays: list[tuple[Stay, Visitor, list[tuple[list[int], int]]]] = []
    for _ in range(400):
        ref = chance.choice(refs) if refs else lend(table, 1)
        event = chance.choice(("lend", "stay", "stay", "leave", "busy", *CHANGES, "grow"))
        try:
            if event == "lend":
                refs.append(lend(table, chance.randint(1, 3)))
            elif event == "stay":
                visitor = Visitor()
                stay = table.stay(chance.sample(refs, min(2, len(refs))), visitor.end)
                seen = [(list(pin.segment.blocks), pin.segment.writable_from) for pin in stay.pins]
                stays.append((stay, visitor, seen))
            elif event == "leave" and stays:
                table.leave(stays.pop(chance.randrange(len(stays)))[0])
            elif event == "busy" and stays:
                visitor = chance.choice(stays)[1]
                visitor.busy |= not visitor.ended
            elif event == "freeze":
                generation = table.find(ref).generation + 1
                table.freeze(ref, generation, 1, owner="debtor")
                refs[refs.index(ref)] = segment_ref(table, ref.handle, generation)
            elif event == "share":
                refs.append(adopt(table, ref, 1))
            elif event != "expire" and event in CHANGES:
                CHANGES[event](table, ref)
        except (CapacityExhausted, Conflict, InvalidInput, StaleEpoch):
            pass
        for stay, visitor, seen in stays:
            assert bool(stay.pins) == (visitor.busy or not visitor.ended)
            for pin, (blocks, writable_from) in zip(stay.pins, seen, strict=False):
                held = pin.segment.held_blocks
                assert set(blocks) <= set(held)
                assert visitor.ended or (held[: len(blocks)], pin.segment.writable_from) == (
                    blocks, writable_from,
                )  # fmt: skip
    for stay, _, _ in stays:
        table.leave(stay)
    table.release([SegmentRef(handle=segment.handle, epoch=7) for segment in table.segments])
    assert allocator.in_use == 0


def segment_ref(table: SegmentTable, handle: int, generation: int = 1) -> SegmentRef:
    return SegmentRef(handle=handle, epoch=table.epoch, generation=generation)
