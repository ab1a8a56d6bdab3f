"""Blocks on their way from the store to a reader."""

from __future__ import annotations

import time
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

    def __init__(self, store: BlockStore, blocks: list[Block], loads: list[BlockLoad | None]) -> None:
        self._store = store
        self._blocks = blocks
        self._loads = loads
        self._length = len(blocks)

    def layer(
        self, layer: int, timeout_s: float, heads: HeadPart | None = None
    ) -> tuple[list[int], list[int], list[memoryview]]:
        """Checksums, generations and objects of the leading blocks that have this layer; of `heads` theirs,
        K and V of an object one after the other.

        Waits for those that come from disk. A block that failed, or did not come in time, ends the run for
        this layer and all later ones; so does one whose heads are asked for, if it is not what was stored:
        whoever reads some of them cannot tell.
        """
        give_up_s = time.monotonic() + timeout_s
        for number, load in enumerate(self._loads[: self._length]):
            if load is not None and not load.wait(layer, max(0.0, give_up_s - time.monotonic())):
                self._length = number
                break
        blocks = self._blocks[: self._length]
        arena = self._store.arena
        checksums, views = [], []
        for block in blocks:
            assert block.checksums is not None
            assert block.dram is not None
            whole, stored = arena.object(block.dram, layer), block.checksums[layer]
            if heads is None:
                checksums.append(stored)
                views.append(whole)
                continue
            if checksum(block.block_id, layer, whole) != stored:
                self._length = len(checksums)
                self._store.condemn(block.space.shape.model, block.block_id, block.generation)
                break
            pieces = heads.pieces_of(whole)
            checksums.append(checksum(block.block_id, layer, *pieces))
            views += pieces
        return checksums, [block.generation for block in blocks[: len(checksums)]], views

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        self._store.unpin(self._blocks)
        self._blocks = []

    def __exit__(self, *_: object) -> None:
        self.close()
