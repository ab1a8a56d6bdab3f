"""The policies that place all sequences alike."""

from __future__ import annotations

from typing import Self

from kvcommons.placement.base import FreeBlocks, Next, PlacedPiece, SequenceLayout, layout, not_enough_blocks


class _Fixed:
    """The same for all sequences."""

    borrows = True
    offloads = False

    def of(self, *, blocks: int, found: int, free: FreeBlocks) -> Self:
        return self

    def otherwise(self) -> None:
        return None


class Local(_Fixed):
    """All here, or not at all."""

    name = "local"
    borrows = False

    def arrive(self, *, blocks: int, found: int, free: FreeBlocks) -> SequenceLayout:
        if blocks > free.free_blocks:
            raise not_enough_blocks(blocks, free.free_blocks)
        return layout(PlacedPiece(blocks=blocks, away=False))

    def next_block(self, *, blocks: int, tail_blocks: int, tail_away: bool) -> Next:
        return Next.HERE

    def comes_home(self) -> bool:
        return False


class Overflow(_Fixed):
    """What does not fit here is borrowed (Infinite-LLM, section 4.4). Older blocks are the ones that go: the
    newest stay, so that tokens are appended here for as long as there is room. Each other sequence is left a
    block, so that a long prompt does not push it out."""

    name = "overflow"

    def arrive(self, *, blocks: int, found: int, free: FreeBlocks) -> SequenceLayout:
        if blocks <= free.free_blocks:
            return layout(PlacedPiece(blocks=blocks, away=False))
        here = free.beside_others()
        return layout(PlacedPiece(blocks=blocks - here, away=True), PlacedPiece(blocks=here, away=False))

    def next_block(self, *, blocks: int, tail_blocks: int, tail_away: bool) -> Next:
        return Next.HERE_FIRST

    def comes_home(self) -> bool:
        return True


class Offload(_Fixed):
    """All on the pool (Lamina, section 5): this instance computes all but attention, so that its batch is as
    large as the pool. A sequence lies on one holder (divided by requests) or one head group (by heads), the
    one where this instance has least KV on a device, for attention takes as long as the device with most."""

    name = "offload"
    offloads = True

    def arrive(self, *, blocks: int, found: int, free: FreeBlocks) -> SequenceLayout:
        return layout(PlacedPiece(blocks=blocks, away=True), balance=True)

    def next_block(self, *, blocks: int, tail_blocks: int, tail_away: bool) -> Next:
        return Next.AWAY

    def comes_home(self) -> bool:
        return False


class Grow(_Fixed):
    """A new holder each so many tokens (KVP: Mnemosyne, section 4.4): the first ones lie here, then holder
    after holder joins, in the middle of the prompt too, and all compute their partials at the same time."""

    name = "grow"

    def __init__(self, *, holder_blocks: int) -> None:
        """`holder_blocks`: of one sequence, the most on one holder."""
        assert holder_blocks > 0
        self._most = holder_blocks

    def arrive(self, *, blocks: int, found: int, free: FreeBlocks) -> SequenceLayout:
        # What was found here is more than a share, maybe: it stays.
        here = min(blocks, max(self._most - found, 0), free.beside_others())
        pieces, left = [PlacedPiece(blocks=here, away=False)], blocks - here
        while left:
            pieces.append(PlacedPiece(blocks=min(left, self._most), away=True))
            left -= pieces[-1].blocks
        return layout(*pieces, spread=True, grows=True)

    def next_block(self, *, blocks: int, tail_blocks: int, tail_away: bool) -> Next:
        if tail_blocks >= self._most:
            return Next.NEW_HOLDER
        return Next.AWAY if tail_away else Next.HERE_FIRST

    def comes_home(self) -> bool:
        return False
