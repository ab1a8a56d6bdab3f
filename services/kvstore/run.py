"""Blocks on their way from the store to a reader."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

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

    def layer(self, layer: int, timeout_s: float) -> tuple[list[int], list[int], list[memoryview]]:
        """Checksums, generations and objects of the leading blocks that have this layer.

        Waits for those that come from disk. A block that failed, or did not come in time, ends the run for
        this layer and all later ones.
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
            checksums.append(block.checksums[layer])
            views.append(arena.object(block.dram, layer))
        return checksums, [block.generation for block in blocks], views

    def __len__(self) -> int:
        return self._length

    def close(self) -> None:
        self._store.unpin(self._blocks)
        self._blocks = []

    def __exit__(self, *_: object) -> None:
        self.close()
