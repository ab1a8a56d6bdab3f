"""Who waits for which blocks to be on disk. Pure: the store holds its lock around every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.kvstore.block import Block
from services.kvstore.catalog import Catalog


class DurableWatch:
    """Calls back once, when all blocks are on disk or one of them will not get there."""

    def __init__(self, model: bytes, waiting_for: set[bytes], callback: Callable[[], None]) -> None:
        self.model = model
        self.waiting_for = waiting_for
        self.callback = callback


class Durability:
    """All watches. A block that nobody has sent yet is waited for: it may still be on its way."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._watches: list[DurableWatch] = []

    @property
    def watching(self) -> int:
        return len(self._watches)

    def leading(self, model: bytes, block_ids: Iterable[bytes]) -> int:
        """How many of the leading blocks are on disk."""
        count = 0
        for block_id in block_ids:
            block = self._catalog.find(model, block_id)
            if block is None or block.disk is None:
                break
            count += 1
        return count

    def watch(self, model: bytes, block_ids: Iterable[bytes], callback: Callable[[], None]) -> DurableWatch:
        """A watch that waits for nothing is over already: its callback is the caller's to call."""
        waiting_for = set()
        for block_id in block_ids:
            block = self._catalog.find(model, block_id)
            if block is None or block.disk is None:
                waiting_for.add(block_id)
            if block is not None and block.disk is None and block.origin is None:  # writing it has failed
                waiting_for.clear()
                break
        watch = DurableWatch(model, waiting_for, callback)
        if waiting_for:
            self._watches.append(watch)
        return watch

    def unwatch(self, watch: DurableWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    def settled(self, blocks: Iterable[Block], durable: bool) -> list[DurableWatch]:
        """Blocks are on disk, or will never be. The watches that are over with that."""
        done = []
        for block in blocks:
            for watch in self._watches:
                if block.block_id in watch.waiting_for and block.space.shape.model == watch.model:
                    watch.waiting_for.discard(block.block_id)
                    if not durable:
                        watch.waiting_for.clear()
        done = [watch for watch in self._watches if not watch.waiting_for]
        self._watches = [watch for watch in self._watches if watch.waiting_for]
        return done
