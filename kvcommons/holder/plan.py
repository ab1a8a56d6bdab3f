"""Plans: what the layers of an iteration attend over at one creditor, and how one plan differs from the next.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvcommons.errors import InvalidInput
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb

# Sums of positions and steps stay far from 64 bits.
_POSITION_MAX = 1 << 61


class PlanRow(NamedTuple):
    """One segment, and the queries that attend over it. With each step a row is a token on: `position`, and
    where tokens are appended `length` too."""

    handle: int
    epoch: int
    generation: int
    first_block: int  # within the segment: blocks before it have moved
    queries: int  # at consecutive positions
    position: int  # of the first query
    length: int  # tokens of the segment that count, from first_block on, appended ones included
    append: bool  # the queries' K and V go to the segment before it is read

    @classmethod
    def of(
        cls,
        ref: SegmentRef,
        *,
        position: int,
        length: int,
        queries: int = 1,
        append: bool = False,
        first_block: int = 0,
    ) -> PlanRow:
        return cls(ref.handle, ref.epoch, ref.generation, first_block, queries, position, length, append)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Where its keys lie, however many of them count: handle, epoch, generation and first block."""
        return self[:4]

    @property
    def ref(self) -> SegmentRef:
        return SegmentRef(handle=self.handle, epoch=self.epoch, generation=self.generation)

    def at(self, ref: SegmentRef) -> PlanRow:
        """The same of another segment."""
        return self._replace(handle=ref.handle, epoch=ref.epoch, generation=ref.generation)

    def moved(self, steps: int) -> PlanRow:
        """So many steps on."""
        if not steps:
            return self
        return self._replace(position=self.position + steps, length=self.length + steps * self.append)

    def message(self) -> pb.PlanRow:
        return pb.PlanRow(**self._asdict())

    @classmethod
    def read(cls, message: pb.PlanRow) -> PlanRow:
        """Raises InvalidInput for what no plan can have."""
        row = cls(
            message.handle, message.epoch, message.generation, message.first_block, message.queries,
            message.position, message.length, message.append,
        )  # fmt: skip
        if not row.queries or (row.append and row.queries > row.length) or row.position > _POSITION_MAX:
            raise InvalidInput(
                f"segment {row.handle}: {row.queries} queries from position {row.position} on, at a length "
                f"of {row.length} tokens"
            )
        return row


class PlanChange(NamedTuple):
    """`removed`: indices among the rows before, `placed`: index and row among those after; both ascending."""

    removed: list[int]
    placed: list[tuple[int, PlanRow]]


def difference(before: Sequence[PlanRow], after: Sequence[PlanRow]) -> PlanChange:
    """What makes `after` of `before`; rows as of one step. What stays keeps its order."""
    known = {row: index for index, row in enumerate(before)}
    last, kept, placed = -1, set[int](), list[tuple[int, PlanRow]]()
    for index, row in enumerate(after):
        former = known.get(row, -1)
        if former > last:
            last = former
            kept.add(former)
        else:
            placed.append((index, row))
    return PlanChange([index for index in range(len(before)) if index not in kept], placed)


def arrangement(count: int, removed: Iterable[int], placed: Sequence[int]) -> list[int | None]:
    """Of each row after a change of `count` rows, its index before; None for one that is placed. Raises
    InvalidInput for a change that cannot be."""
    gone = list(removed)
    for indices, end in ((gone, count), (placed, count - len(gone) + len(placed))):
        if any(one >= other for one, other in pairwise(indices)) or (indices and indices[-1] >= end):
            raise InvalidInput(f"a change names rows out of order, or beyond the plan's {end}")
    left, new = set(gone), set(placed)
    kept = iter([index for index in range(count) if index not in left])
    return [None if index in new else next(kept) for index in range(count - len(gone) + len(placed))]
