"""What to settle next. No I/O.

Circles of debts first (DGFM: Infinite-LLM, section 4.5). Beyond the paper: blocks come home where there is
room, without any circle, and a creditor whose own sequences wait for memory calls back what it has lent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from services.ledger.debt_graph import Debts, find_circle

# Of a debtor's memory: this much stays free for its own sequences when blocks come home.
HEADROOM = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What an instance says of its memory."""

    total_blocks: int
    free_blocks: int
    waiting: int  # sequences that have no room


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """`legs`: (debtor, creditor, blocks). One leg: its blocks come home because there is room."""

    legs: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """A creditor in need asks a debtor for blocks."""

    creditor: str
    debtor: str
    blocks: int


Plan = Transfer | Recall


def plan(
    debts: Debts, rooms: Mapping[str, Room], *, threshold: int, busy: Collection[str] = ()
) -> list[Plan]:
    """Plans that share no instance. `threshold`: the least blocks that are worth a settlement (the paper's
    empirical one). `busy` instances are left out: a settlement is under way there, or has just ended and
    heartbeats have not told of it yet."""
    taken = set(busy)
    plans: list[Plan] = []
    while (circle := find_circle(_without(debts, taken), threshold)) is not None:
        names = circle.instances
        plans.append(
            Transfer(
                legs=tuple(
                    (debtor, names[(at + 1) % len(names)], circle.blocks) for at, debtor in enumerate(names)
                )
            )
        )
        taken.update(names)
    for debtor, owed in sorted(_without(debts, taken).items()):
        room = rooms.get(debtor)
        spare = 0 if room is None or room.waiting else room.free_blocks - int(room.total_blocks * HEADROOM)
        creditor = max(
            (name for name in owed if name not in taken),
            key=lambda name: (_needs(rooms.get(name)), owed[name], name),
            default=None,
        )
        if creditor is None or debtor in taken:
            continue
        blocks = min(owed[creditor], spare)
        if blocks >= min(threshold, owed[creditor]) and blocks > 0:
            plans.append(Transfer(legs=((debtor, creditor, blocks),)))
            taken.update((debtor, creditor))
    for debtor, owed in sorted(_without(debts, taken).items()):
        for creditor, blocks in sorted(owed.items(), key=lambda one: (-one[1], one[0])):
            if _needs(rooms.get(creditor)) and not {debtor, creditor} & taken:
                plans.append(Recall(creditor=creditor, debtor=debtor, blocks=blocks))
                taken.update((debtor, creditor))
    return plans


def _needs(room: Room | None) -> bool:
    return room is not None and room.waiting > 0


def _without(debts: Debts, taken: Collection[str]) -> dict[str, dict[str, int]]:
    return {
        debtor: left
        for debtor, owed in debts.items()
        if debtor not in taken
        and (left := {name: blocks for name, blocks in owed.items() if name not in taken})
    }
