"""What every placement policy decides, and from what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvcommons.errors import CapacityExhausted


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeBlocks:
    """Here, when a sequence arrives: `free_blocks` can be allocated, `sequences` are held already."""

    free_blocks: int
    sequences: int

    def beside_others(self) -> int:
        """Blocks that a sequence may take and leave the others, and itself, one each to grow."""
        return max(self.free_blocks - self.sequences - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPiece:
    """Consecutive blocks, here or `away`."""

    blocks: int
    away: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Pieces in the sequence's order, after the blocks that are here already; at most one of them is here."""

    pieces: tuple[PlacedPiece, ...]
    spread: bool = False  # each piece that is away goes to a holder of its own, where there are enough
    balance: bool = False  # a piece goes whole to the holder where this instance has least KV
    grows: bool = False  # pieces behind the first may be reserved in turn, as the prompt is computed

    @property
    def local_blocks(self) -> int:
        return sum(piece.blocks for piece in self.pieces if not piece.away)


class Next(Enum):
    """Where a running sequence's next block goes."""

    HERE = "here"  # or another sequence gives way
    HERE_FIRST = "here first"  # else away
    AWAY = "away"  # where its last block is, if there is room
    NEW_HOLDER = "new holder"


class Placement(Protocol):
    """One policy. Sequences keep the policy that placed them."""

    @property
    def name(self) -> str: ...

    @property
    def borrows(self) -> bool:
        """Whether other holders may have blocks of its sequences."""

    @property
    def offloads(self) -> bool:
        """Whether other holders have all of them: without a lender nothing is answered."""

    def of(self, *, blocks: int, found: int, free: FreeBlocks) -> Placement:
        """The policy for this sequence, where it is not the same for all."""

    def otherwise(self) -> Placement | None:
        """The policy to try where nobody lends what this one asks for."""

    def arrive(self, *, blocks: int, found: int, free: FreeBlocks) -> SequenceLayout:
        """Where `blocks` more of a new sequence go, of which `found` are here already. Raises
        CapacityExhausted."""

    def next_block(self, *, blocks: int, tail_blocks: int, tail_away: bool) -> Next:
        """A sequence of `blocks`, the last `tail_blocks` of which lie on one holder, is full."""

    def comes_home(self) -> bool:
        """Whether blocks that are away come home when there is room."""


def layout(*pieces: PlacedPiece, **how: bool) -> SequenceLayout:
    """Without pieces that are empty."""
    return SequenceLayout(pieces=tuple(one for one in pieces if one.blocks), **how)


def not_enough_blocks(blocks: int, free_blocks: int) -> CapacityExhausted:
    return CapacityExhausted(
        f"the sequence needs {blocks} blocks and this decode instance has {free_blocks} free: try "
        "another, retry later, raise capacity_tokens, or set placement to overflow",
        retry_after_ms=500,
    )
