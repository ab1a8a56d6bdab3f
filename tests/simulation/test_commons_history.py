"""The checker of histories: what is right passes, and each thing that must never happen is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.holder.segments import SegmentTable
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.telemetry.events import EventFile
from tests.simulation.commons_history import History, replayed
from tests.simulation.machine import Violation

Event = tuple[str, str, dict[str, Any]]
REF = {"handle": 1, "epoch": 7}


def at(instance: str, event: str, **facts: Any) -> Event:
    return instance, event, facts


def lent(*blocks: int, handle: int = 1, owner: str = "d") -> Event:
    return at("c", "reserve", handle=handle, epoch=7, owner=owner, blocks=list(blocks), former=0)


TAKEN = at("c", "taken", blocks=[4, 5])
BORROWED = [TAKEN, lent(4, 5), at("d", "borrow", **REF, count=2)]
HOME = at("d", "taken", blocks=[9])
FROZEN = [*BORROWED, at("c", "freeze", **REF, generation=3, count=1)]
COPIED = [*FROZEN, HOME, at("d", "copy", **REF, generation=3, home=[9])]
SWITCHED = [*COPIED, at("d", "switch", **REF, generation=3, count=1)]
TRIM = at("c", "trim", **REF, generation=3, count=1)
GIVEN_BACK = at("d", "give_back", **REF)
RELEASE = at("c", "release", **REF)
PIN = at("c", "pin", **REF, generation=0, pin=1)


def reported(events: list[Event]) -> History:
    history = History()
    for instance, event, facts in events:
        history.take(instance, event, **facts)
    return history


def test_a_loan_that_moves_home_and_ends() -> None:
    history = reported([*SWITCHED, TRIM, at("c", "freed", blocks=[4])])
    history.rest(["c", "d"])
    for instance, event, facts in (GIVEN_BACK, RELEASE, at("c", "freed", blocks=[5])):
        history.take(instance, event, **facts)
    with pytest.raises(Violation, match="never came back"):
        history.rest(["c", "d"], idle=True)
    history.take("d", "freed", blocks=[9])
    history.rest(["c", "d"], idle=True)


@pytest.mark.parametrize(
    ("events", "noticed"),
    [
        ([TAKEN, TAKEN], "taken twice"),
        ([TAKEN, at("c", "freed", blocks=[4]), at("c", "freed", blocks=[4])], "freed twice"),
        ([lent(4)], "which is free"),
        ([*BORROWED, lent(5, handle=2, owner="e")], "somebody else's"),
        (
            [*BORROWED, at("c", "own", handle=2, epoch=7, owner="c", blocks=[5], former=0)],
            "its own, and lent",
        ),
        ([*BORROWED, at("c", "freed", blocks=[4])], "freed under a segment"),
        (
            [*BORROWED, PIN, GIVEN_BACK, RELEASE, at("c", "freed", blocks=[4])],
            "while it is accessed",
        ),
        ([*BORROWED, GIVEN_BACK, RELEASE, PIN], "is over"),
        ([*SWITCHED, TRIM, PIN], "after a trim"),
        ([*BORROWED, RELEASE], "has not given back"),
        ([*COPIED, TRIM], "has not switched from"),
        ([*FROZEN, at("d", "switch", **REF, generation=3, count=1)], "has not copied"),
        ([*BORROWED, HOME, at("d", "copy", **REF, generation=3, home=[9])], "may still be written to"),
        ([*FROZEN, at("d", "copy", **REF, generation=3, home=[9])], "which is free"),
        ([*SWITCHED, at("c", "thaw", **REF, generation=3)], "is thawed"),
        ([at("d", "borrow", **REF, count=2)], "nobody lent it"),
    ],
)
def test_what_must_never_happen_is_noticed(events: list[Event], noticed: str) -> None:
    with pytest.raises(Violation, match=noticed):
        reported(events)


@pytest.mark.parametrize(
    "events",
    [
        BORROWED[:2],
        [*BORROWED, at("d", "borrow_more", **REF, count=1)],
        [*BORROWED, at("c", "expire", **REF)],
    ],
)
def test_debts_that_are_no_loans_are_noticed_at_rest(events: list[Event]) -> None:
    with pytest.raises(Violation, match=r"owes"):
        reported(events).rest(["c", "d"])


def test_who_is_dead_owes_nothing() -> None:
    reported([*BORROWED, at("c", "expire", **REF)]).rest(["c"])
    reported(BORROWED).rest([])


def test_block_tables_write_a_history_that_can_be_replayed(tmp_path: Path) -> None:
    allocator = BlockAllocator(6)
    allocator.observe = EventFile(str(tmp_path), "c")
    table = SegmentTable(allocator, instance_id="c", epoch=7)
    debtor = EventFile(str(tmp_path), "d")
    ref = table.lend("d", "sequence", 2, first_position=0, lease_s=5)
    debtor("borrow", handle=ref.handle, epoch=7, count=2)
    table.grow(ref, 3, owner="d", lease_s=5)
    debtor("borrow_more", handle=ref.handle, epoch=7, count=1)
    pin = table.pin(ref)
    history = replayed(tmp_path)
    with pytest.raises(Violation, match="never ends"):
        history.rest(["c", "d"], idle=True)
    debtor("give_back", handle=ref.handle, epoch=7)
    table.release([ref])
    table.unpin(pin)
    replayed(tmp_path).rest(["c", "d"], idle=True)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="event_log"):
        EventFile(str(tmp_path / "file"), "c")
