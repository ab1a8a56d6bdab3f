"""Which sequences run in the next iteration, and who gives way when memory is short: a pure class.

Sequences are known by number, smaller ones being older. They are reserved (blocks held, prompt not complete),
then started, then run until they end; the oldest started ones run, at most `max_batch` at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvcommons.engine.sequence import Sequence
from kvcommons.placement.base import Next


class _State(Enum):
    RESERVED = "reserved"
    STARTED = "started"
    BORROWING = "borrowing"  # asks other holders for room; sits out iterations meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an iteration does: preempt first, then grow, then run the batch. Borrowers are asked for apart."""

    batch: list[int] = field(default_factory=list)
    grow: list[int] = field(default_factory=list)  # of the batch: one more local block each
    borrow: list[int] = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)


class BatchScheduler:
    """Continuous batching, first come first served, at most `max_batch` sequences an iteration."""

    def __init__(self, *, max_batch: int) -> None:
        self._max_batch = max_batch
        self._states: dict[int, _State] = {}

    @property
    def running(self) -> int:
        """Started sequences, as many as fit the batch."""
        return min(self._started(), self._max_batch)

    @property
    def queued(self) -> int:
        """Started sequences beyond the batch."""
        return max(0, self._started() - self._max_batch)

    @property
    def able(self) -> bool:
        """Whether any sequence would run, had it room."""
        return any(state is _State.STARTED for state in self._states.values())

    def reserve(self, sequence: int) -> None:
        self._states[sequence] = _State.RESERVED

    def start(self, sequence: int) -> None:
        self._states[sequence] = _State.STARTED

    def borrowed(self, sequence: int) -> None:
        """A borrower got its room: it runs again. Unknown ones ended meanwhile."""
        if sequence in self._states:
            self._states[sequence] = _State.STARTED

    def remove(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def plan(
        self,
        *,
        needy: frozenset[int],
        free_blocks: int,
        freed_by: Mapping[int, int],
        may_borrow: bool,
        away: frozenset[int] = frozenset(),
        may_preempt: bool = True,
    ) -> Plan:
        """The next iteration.

        `needy` are the sequences whose blocks are all full, those `away` of them get their next one
        elsewhere whatever is free here; `free_blocks` is what can be allocated here, `freed_by` how many
        blocks would come free if a sequence ended. Oldest first: each needy one takes a free block; when none
        is left it borrows, if the policy allows (`may_borrow`); else the youngest sequence that holds blocks
        gives way, which may be the needy one itself. Not `may_preempt`: blocks of the last one that gave way
        are still coming free, and the needy sit out meanwhile.
        """
        started = sorted(key for key, state in self._states.items() if state is _State.STARTED)
        batch, grow, borrow = [], [], []
        preempt: set[int] = set()
        for key in started[: self._max_batch]:
            if key in preempt:
                continue
            if key in needy:
                while may_preempt and free_blocks < 1 and not may_borrow and key not in preempt:
                    victim = self._youngest(freed_by, preempt, at_least=key)
                    preempt.add(victim)
                    free_blocks += freed_by.get(victim, 0)
                if key in preempt or (free_blocks < 1 and not may_borrow):
                    continue
                if free_blocks < 1 or key in away:
                    borrow.append(key)
                    self._states[key] = _State.BORROWING
                    continue
                free_blocks -= 1
                grow.append(key)
            batch.append(key)
        return Plan(
            batch=[key for key in batch if key not in preempt],
            grow=[key for key in grow if key not in preempt],
            borrow=borrow,
            preempt=sorted(preempt, reverse=True),
        )

    def victim_for(self, sequence: int, freed_by: Mapping[int, int]) -> int:
        """Who gives way to a borrower that nobody lends to: the youngest with blocks, maybe itself."""
        return self._youngest(freed_by, set(), at_least=sequence)

    def _youngest(self, freed_by: Mapping[int, int], gone: set[int], *, at_least: int) -> int:
        """The youngest sequence, not older than `at_least`, whose end frees blocks; `at_least` where there is
        none."""
        able = [
            key for key in self._states if key > at_least and key not in gone and freed_by.get(key, 0) > 0
        ]
        return max(able, default=at_least)

    def _started(self) -> int:
        return sum(state is not _State.RESERVED for state in self._states.values())


def freed_by(sequences: Mapping[int, Sequence]) -> dict[int, int]:
    """Blocks here that would come free if a sequence ended: those that it alone holds. None of a sequence
    that waits for its prompt: prefill may be writing to them."""
    holders = Counter(block for sequence in sequences.values() for block in sequence.local_blocks())
    return {
        key: sum(holders[block] == 1 for block in sequence.local_blocks()) if sequence.prompt_computed else 0
        for key, sequence in sequences.items()
    }


def plan_for(
    scheduler: BatchScheduler,
    sequences: Mapping[int, Sequence],
    *,
    free_blocks: int,
    may_borrow: bool,
    may_preempt: bool,
) -> Plan:
    """The next iteration of these sequences, by the room that each of them has."""
    needy = frozenset(
        key for key, sequence in sequences.items() if sequence.prompt_computed and sequence.full
    )
    short = len(needy) > free_blocks and not may_borrow
    return scheduler.plan(
        needy=needy,
        free_blocks=free_blocks,
        freed_by=freed_by(sequences) if short else {},
        may_borrow=may_borrow,
        away=frozenset(key for key in needy if sequences[key].next_block() in (Next.AWAY, Next.NEW_HOLDER)),
        may_preempt=may_preempt,
    )
