"""What to settle next. No I/O.

Circles of debts first (DGFM: Infinite-LLM, section 4.5). Beyond the paper: a creditor whose own sequences
wait for memory calls back what it has lent. Where a debtor has room, its blocks come home without the ledger:
it alone knows whether its placement policy wants them there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.debt_graph import Debts, find_circle
from services.ledger.saga import Leg, Settlement

SCARCE = 1 / 8  # of its memory: with less free, sequences that wait are taken to wait for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """An instance's memory, by its last heartbeat."""

    total_blocks: int
    free_blocks: int
    waiting: int  # sequences that have no room

    @classmethod
    def of(cls, load: pb.Load) -> MemoryState:
        """What a heartbeat says."""
        return cls(total_blocks=load.total_blocks, free_blocks=load.free_blocks, waiting=load.queued)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Around a circle; `legs`: (debtor, creditor, blocks)."""

    legs: tuple[tuple[str, str, int], ...]

    def settlement(self, settlement_id: str, term: int, round_blocks: int) -> Settlement:
        """As the leader of `term` begins it."""
        return Settlement(
            id=settlement_id,
            term=term,
            legs=tuple(
                Leg(debtor=debtor, creditor=creditor, left_blocks=blocks)
                for debtor, creditor, blocks in self.legs
            ),
            round_blocks=round_blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """A creditor in need asks a debtor for blocks."""

    creditor: str
    debtor: str
    blocks: int


Plan = Swap | Recall


def plan(
    debts: Debts, memory: Mapping[str, MemoryState], *, threshold: int, busy: Collection[str] = ()
) -> list[Plan]:
    """Plans that share no instance. `threshold`: the least blocks that are worth a settlement (the paper's
    empirical one). `busy` instances are left out: a settlement is under way there, or has just ended and
    no heartbeat counts it yet."""
    involved = set(busy)
    plans: list[Plan] = []
    while (circle := find_circle(_without(debts, involved), threshold)) is not None:
        names = circle.instances
        plans.append(
            Swap(
                legs=tuple(
                    (debtor, names[(at + 1) % len(names)], circle.blocks) for at, debtor in enumerate(names)
                )
            )
        )
        involved.update(names)
    for debtor, owed in sorted(_without(debts, involved).items()):
        for creditor, blocks in sorted(owed.items(), key=lambda one: (-one[1], one[0])):
            if _needs(memory.get(creditor)) and not {debtor, creditor} & involved:
                plans.append(Recall(creditor=creditor, debtor=debtor, blocks=blocks))
                involved.update((debtor, creditor))
    return plans


def _needs(memory: MemoryState | None) -> bool:
    """Sequences wait, and it is for memory."""
    return memory is not None and memory.waiting > 0 and memory.free_blocks < memory.total_blocks * SCARCE


def _without(debts: Debts, involved: Collection[str]) -> dict[str, dict[str, int]]:
    return {
        debtor: left
        for debtor, owed in debts.items()
        if debtor not in involved
        and (left := {name: blocks for name, blocks in owed.items() if name not in involved})
    }
