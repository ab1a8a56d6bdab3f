"""Blocks between a head group and a kvstore, by way of the debtor: a store's objects have all heads, and no
part of the group does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStore:
    """The debtor's, for all of its head groups."""

    model: bytes
    layout: Layout
    loader: BlockLoader
    saver: BlockSaver

    async def load(
        self,
        address: str,
        block_ids: Sequence[bytes],
        write: Callable[[int, int, Sequence[Buffer]], None],
        deadline: Deadline,
    ) -> int:
        """Gives each layer to `write`, with the first block's index and whole objects; how many leading
        blocks are there and verified. `write` is called by a loading thread, before the objects are
        verified."""

        @contextmanager
        def destination(layer: int, first: int, count: int) -> Iterator[Sequence[Buffer]]:
            objects = self._objects(count)
            yield objects
            write(layer, first, objects)

        load = self.loader.load(address, self.model, self.layout, block_ids, destination, deadline)

        def finish() -> int:
            try:
                return load.wait_all(Deadline.after(deadline.left() + 1))  # it ends at the deadline by itself
            finally:
                load.cancel()

        try:
            return await asyncio.to_thread(finish)
        except asyncio.CancelledError:
            asyncio.get_running_loop().run_in_executor(None, load.cancel)  # wakes the thread
            raise

    async def save(
        self,
        address: str,
        block_ids: Sequence[bytes],
        read: Callable[[int, Sequence[Buffer]], None],
        *,
        tenant: str,
        parent: bytes,
        first_index: int,
    ) -> None:
        """Has `read` fill each layer's objects, on a thread; returns when they wait to be written."""

        def work() -> None:
            for layer in range(self.layout.layers):
                objects = self._objects(len(block_ids))
                read(layer, objects)
                taken = self.saver.save(
                    address=address,
                    model=self.model,
                    layers=self.layout.layers,
                    tenant=tenant,
                    parent=parent,
                    first_index=first_index,
                    block_ids=block_ids,
                    layer=layer,
                    payload=objects,
                    done=lambda: None,
                )
                if not taken:
                    return  # the later layers would be of no use

        await asyncio.to_thread(work)

    def _objects(self, count: int) -> list[memoryview]:
        """New ones, in one piece of memory."""
        size = self.layout.object_bytes
        whole = memoryview(bytearray(count * size))
        return [whole[index * size : (index + 1) * size] for index in range(count)]
