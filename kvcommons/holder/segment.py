"""One segment, and what is under way on it. Changed by its table (segments.py) only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Trimmed blocks that accesses with a number before `before` may still reach."""

    blocks: list[int]
    before: int
    settlement: str


@dataclass(slots=True, kw_only=True, eq=False)
class Segment:
    """A run of a sequence's tokens, in whole blocks. Changed by its table only."""

    handle: int
    owner: str  # instance id of the debtor; the holder's own for its own sequences
    sequence: str
    first_position: int  # logical, shift included: of the first token of block 0, trimmed or not
    blocks: list[int]  # physical, in order, from block `trimmed` on
    expires_s: float | None  # on the table's clock; None: no lease (the holder's own)
    trimmed: int = 0  # leading blocks that were given back
    frozen: int = 0  # leading ones of `blocks` that are being moved
    shared: int = 0  # blocks before this index belong to another segment too
    generation: int = 0
    oldest: int = 0  # generation whose accesses are still good
    released: bool = False
    pins: set[int] = field(default_factory=set)  # numbers of the accesses under way
    standing: list[Pin] = field(default_factory=list)  # those of plans, among these
    parting: list[Parting] = field(default_factory=list)

    @property
    def writable_from(self) -> int:
        """Index of the first block that may be written."""
        return max(self.trimmed + self.frozen, self.shared)

    @property
    def held_blocks(self) -> list[int]:
        """Physical ones, those included that wait for accesses under way."""
        return self.blocks + [block for parting in self.parting for block in parting.blocks]


@dataclass(slots=True, eq=False)  # not frozen, which makes them slowly: there is one for each row of a plan
class Pin:
    """An access under way; or one that stands, of whoever comes back to the segment again and again."""

    segment: Segment
    number: int  # later ones have larger ones
    # Of a standing one. The table calls it before the segment changes in another way than by growing: no
    # access begins any more. Whether none is under way; else whoever has the pin unpins it after that.
    end: Callable[[], bool] | None = None
