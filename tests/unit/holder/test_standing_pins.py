"""Pins of whoever comes back to the same segments again and again: as good as others, and in nobody's way
between two accesses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvcommons.errors import CapacityExhausted, Conflict, InvalidInput, StaleEpoch
from kvcommons.holder.segment import Pin
from kvcommons.holder.segments import SegmentRef, SegmentTable
from kvcommons.rblock.allocator import BlockAllocator
from tests.clock import Clock

CHANGES: dict[str, Callable[[SegmentTable, SegmentRef], object]] = {
    "release": lambda table, ref: table.release([ref]),
    "expire": lambda table, ref: expire(table),
    "freeze": lambda table, ref: table.freeze(ref, 2, 1, owner="debtor"),
    "thaw": lambda table, ref: table.thaw(ref, owner="debtor"),
    "trim": lambda table, ref: table.trim(ref, owner="debtor"),
    "share": lambda table, ref: adopt(table, ref, 2),
}
NO_CHANGES: dict[str, Callable[[SegmentTable, SegmentRef], object]] = {
    "grow": lambda table, ref: table.grow(ref, 5, owner="debtor", lease_s=10),
    "renew": lambda table, ref: table.renew("debtor", [ref], lease_s=10),
    "pin": lambda table, ref: table.unpin(table.pin(ref)),
    "others": lambda table, ref: table.release([lend(table, 1)]),
    "nothing to trim": lambda table, ref: table.trim(SegmentRef(handle=ref.handle, epoch=7), owner="debtor"),
}


def expire(table: SegmentTable) -> None:
    clock = table._clock
    assert isinstance(clock, Clock)
    clock.now_s += 11
    table.expire()


class Visitor:
    def __init__(self) -> None:
        self.busy = False
        self.ended = False

    def end(self) -> bool:
        self.ended = True
        return not self.busy


def lend(table: SegmentTable, blocks: int) -> SegmentRef:
    return table.lend("debtor", "s", blocks, first_position=0, lease_s=10)


def adopt(table: SegmentTable, ref: SegmentRef, shared: int) -> SegmentRef:
    return table.adopt(
        ref, former_owner="debtor", owner="debtor", sequence="t", lease_s=10, shared_blocks=shared
    )


def begin() -> tuple[SegmentTable, BlockAllocator, SegmentRef]:
    """A segment of four blocks, two of them frozen in its generation 1, beside another one."""
    allocator = BlockAllocator(12)
    table = SegmentTable(allocator, instance_id="holder", epoch=7, clock=Clock())
    ref = lend(table, 4)
    table.freeze(ref, 1, 2, owner="debtor")
    return table, allocator, SegmentRef(handle=ref.handle, epoch=7, generation=1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_it_at_once_between_two_accesses(change: str) -> None:
    """Of this segment, and of no other."""
    table, _, ref = begin()
    if change == "share":
        table.thaw(ref, owner="debtor")
    visitor, bystander = Visitor(), Visitor()
    pins = [
        table.pin(ref, visitor.end),
        table.pin(lend(table, 1), bystander.end),
        table.pin(ref, visitor.end),
    ]
    segments = [pin.segment for pin in pins]
    assert [len(segment.pins) for segment in segments] == [2, 1, 2]
    CHANGES[change](table, ref)
    assert (visitor.ended, bystander.ended) == (True, change == "expire")
    assert not segments[0].pins
    assert not segments[0].standing
    assert not segments[0].parting
    for pin in pins:
        table.unpin(pin)
    assert not segments[1].pins


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_changes_nothing_does_not_end_it(change: str) -> None:
    table, _, ref = begin()
    visitor = Visitor()
    pin = table.pin(ref, visitor.end)
    NO_CHANGES[change](table, ref)
    assert not visitor.ended
    table.unpin(pin)
    assert not table.find(ref).pins
    assert not table.find(ref).standing


@pytest.mark.parametrize(("change", "back"), [("release", 4), ("trim", 2)])
def test_an_access_under_way_keeps_the_blocks(change: str, back: int) -> None:
    table, allocator, ref = begin()
    visitor = Visitor()
    pin = table.pin(ref, visitor.end)
    visitor.busy = True
    CHANGES[change](table, ref)
    assert (visitor.ended, allocator.in_use) == (True, 4)
    table.unpin(pin)
    table.unpin(pin)
    assert allocator.in_use == 4 - back


@pytest.mark.parametrize("seed", range(10))
def test_while_it_lasts_blocks_are_where_they_were(seed: int) -> None:
    """In any order of events: nobody else gets them, and they take tokens from where they did."""
    chance = random.Random(seed)
    table, allocator, _ = begin()
    refs = [segment_ref(table, segment.handle) for segment in table.segments]
    standing: list[tuple[Pin, Visitor, list[int], int]] = []
    for _ in range(400):
        ref = chance.choice(refs) if refs else lend(table, 1)
        event = chance.choice(("lend", "pin", "pin", "unpin", "busy", *CHANGES, "grow"))
        try:
            if event == "lend":
                refs.append(lend(table, chance.randint(1, 3)))
            elif event == "pin":
                visitor = Visitor()
                pin = table.pin(ref, visitor.end)
                standing.append((pin, visitor, list(pin.segment.blocks), pin.segment.writable_from))
            elif event == "unpin" and standing:
                table.unpin(standing.pop(chance.randrange(len(standing)))[0])
            elif event == "busy" and standing:
                visitor = chance.choice(standing)[1]
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
        for pin, visitor, blocks, writable_from in standing:
            held = pin.number in pin.segment.pins
            assert held == (visitor.busy or not visitor.ended)
            if held:
                now = pin.segment.held_blocks
                assert set(blocks) <= set(now)
                assert visitor.ended or (now[: len(blocks)], pin.segment.writable_from) == (
                    blocks,
                    writable_from,
                )
    for pin, *_ in standing:
        table.unpin(pin)
    table.release([SegmentRef(handle=segment.handle, epoch=7) for segment in table.segments])
    assert allocator.in_use == 0


def segment_ref(table: SegmentTable, handle: int, generation: int = 1) -> SegmentRef:
    return SegmentRef(handle=handle, epoch=table.epoch, generation=generation)
