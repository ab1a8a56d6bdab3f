"""Blocks on their way from the store to a reader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvcommons.rblock.checksum import checksum
from kvcommons.rblock.heads import HeadPart
from services.kvstore.block import Block
from services.kvstore.loader import BlockLoad

if TYPE_CHECKING:
    from services.kvstore.blocks import BlockStore


class Run(AbstractContextManager["Run"]):
    """Leading blocks of a request, pinned in DRAM or on their way there, until it is closed."""

    def __init__(
        self,
        store: BlockStore,
        blocks: list[Block],
        loads: list[BlockLoad | None],
        *,
        together: int,
        more: bool,
    ) -> None:
        """`together`: so many of them make a piece. `more`: whether others are stored behind them."""
        self.more = more
        self._store = store
        self._blocks = blocks
        self._loads = loads
        self._together = together
        self._length = len(blocks)

    def pieces(self) -> Iterator[range]:
        """Blocks that are sent together, in all layers, before those behind them: there is at least one
        piece. What the disk gives in one read of all layers does not wait for the disk's last block."""
        start = 0
        while True:
            end = min(start + self._together, self._length)
            yield range(start, end)
            if end >= self._length:
                return
            start = end

    def layer(
        self, layer: int, timeout_s: float, heads: HeadPart | None = None, piece: range | None = None
    ) -> tuple[list[int], list[int], list[memoryview]]:
        """Checksums, generations and objects of the leading blocks of a piece (None: of the run) that have
        this layer; of `heads` theirs, K and V of an object one after the other.

        Waits for those that come from disk. A block that failed, or did not come in time, ends the run for
        this layer and all later ones; so does one whose heads are asked for, if it is not what was stored:
        whoever reads some of them cannot tell.
        """
        piece = range(self._length) if piece is None else piece
        give_up_s = time.monotonic() + timeout_s
        for number in range(piece.start, min(piece.stop, self._length)):
            load = self._loads[number]
            if load is None or load.ready(layer):
                continue
            if not load.wait(layer, max(0.0, give_up_s - time.monotonic())):
                self._end_at(number)
                break
        blocks = self._blocks[piece.start : min(piece.stop, self._length)]
        object_in = self._store.arena.object
        checksums, views = [], []
        for block in blocks:
            assert block.checksums is not None
            assert block.dram is not None
            whole, stored = object_in(block.dram, layer), block.checksums[layer]
            if heads is None:
                checksums.append(stored)
                views.append(whole)
                continue
            if checksum(block.block_id, layer, whole) != stored:
                self._end_at(piece.start + len(checksums))
                self._store.condemn(block.space.shape.model, block.block_id, block.generation)
                break
            pieces = heads.pieces_of(whole)
            checksums.append(checksum(block.block_id, layer, *pieces))
            views += pieces
        return checksums, [block.generation for block in blocks[: len(checksums)]], views

    def more_behind(self, piece: range) -> bool:
        """Whether others follow this piece."""
        return self.more or piece.stop < self._length

    def _end_at(self, number: int) -> None:
        self._length = number
        self.more = False

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        self._store.unpin(self._blocks)
        self._blocks = []

    def __exit__(self, *_: object) -> None:
        self.close()
