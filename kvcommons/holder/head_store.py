"""Blocks between a head group and a kvstore, by way of the debtor: a store's objects have all heads, and no
part of the group does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, TypeVar

from kvcommons.blockstore.loader import BlockLoader, CorruptObject
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.errors import Unavailable
from kvcommons.holder.copying import BlockSave
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_LOADS_MAX, _SAVES_MAX = 4, 2  # at a time
_START_S = 10.0  # that a save waits for a thread
_END_S = 1.0  # for a load to end past its deadline, or once it was cancelled


class WholeStore:
    """The debtor's, for all of its head groups. It reads and writes on threads of its own, so that a store or
    a part that stands still holds up nobody else."""

    def __init__(
        self,
        *,
        model: bytes,
        layout: Layout,
        condemn: Callable[[CorruptObject], None],
        saver: BlockSaver,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`condemn` as at BlockLoader; the saver is the owner's, and is not closed here."""
        self.layout = layout
        self._model = model
        self._saver = saver
        self._loader = BlockLoader(condemn, name="group-load", loads_max=_LOADS_MAX, dialer=dialer)
        # Apart: a save is a moment's work, a load waits for a store.
        self._loading = ThreadPoolExecutor(_LOADS_MAX, thread_name_prefix="group-loaded")
        self._saving = ThreadPoolExecutor(_SAVES_MAX, thread_name_prefix="group-save")
        self._closed = False

    def close(self, deadline: Deadline) -> None:
        """Cancels all loads, and waits for them to end until the deadline."""
        self._closed = True
        self._loader.close(deadline)
        for threads in (self._loading, self._saving):
            threads.shutdown(wait=False, cancel_futures=True)

    async def load(
        self,
        address: str,
        block_ids: Sequence[bytes],
        write: Callable[[int, int, Sequence[Buffer]], None],
        deadline: Deadline,
    ) -> int:
        """Gives each layer to `write`, with the first block's index and whole objects; how many leading
        blocks are there and verified. `write` is called by a loading thread, once the layer was verified,
        with what is corrupt, too: those objects do not count. When this is cancelled a `write` may still be
        under way."""

        @contextmanager
        def destination(layer: int, first: int, count: int) -> Iterator[Sequence[Buffer]]:
            objects = self._objects(count)
            yield objects
            write(layer, first, objects)

        load = self._loader.load(address, self._model, self.layout, block_ids, destination, deadline)

        def finish() -> int:
            try:
                return load.wait_all(Deadline.after(deadline.left() + _END_S))  # it ends by itself
            finally:
                load.cancel(Deadline.after(_END_S))

        try:
            return await self._on(self._loading, finish)
        except asyncio.CancelledError:
            load.cancel(Deadline.after(0))  # wakes the threads; its buffers are nobody else's
            raise

    async def save(
        self,
        blocks: BlockSave,
        read: Callable[[int, Sequence[Buffer], Deadline], None],
        *,
        timeout_s: float,
    ) -> None:
        """Has `read` fill each layer's objects, on a thread, within `timeout_s` of its start; returns when
        they wait to be written."""
        start = Deadline.after(_START_S)

        def work() -> None:
            start.check("waiting for a thread to save with")
            deadline = Deadline.after(timeout_s)
            for layer in range(self.layout.layers):
                objects = self._objects(len(blocks.block_ids))
                read(layer, objects, deadline)
                accepted = self._saver.save(
                    address=blocks.store,
                    model=self._model,
                    layers=self.layout.layers,
                    tenant=blocks.tenant,
                    parent=blocks.parent,
                    first_index=blocks.first_index,
                    block_ids=blocks.block_ids,
                    layer=layer,
                    payload=objects,
                    done=lambda: None,
                )
                if not accepted:
                    return  # the later layers would be of no use

        await self._on(self._saving, work)

    async def _on(self, threads: Executor, work: Callable[[], T]) -> T:
        """With the caller's trace."""
        if self._closed:
            raise Unavailable("this instance ends: it moves no blocks any more")
        return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work)

    def _objects(self, count: int) -> list[memoryview]:
        """New ones, in one piece of memory."""
        size = self.layout.object_bytes
        whole = memoryview(bytearray(count * size))
        return [whole[index * size : (index + 1) * size] for index in range(count)]
