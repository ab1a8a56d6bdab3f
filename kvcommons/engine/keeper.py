"""Blocks of an engine's memory on their way to a kvstore: pinned, read in place, released when they are
there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

from kvcommons.backend.interface import DeviceEvent
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """Consecutive full blocks of a sequence: `ids` and, as many, their physical `blocks`. `parent` is the
    identity of the block before, `first_index` the first one's index in the sequence, `store` a data
    address."""

    store: str
    tenant: str
    parent: bytes
    first_index: int
    ids: tuple[bytes, ...]
    blocks: tuple[int, ...]


class BlockKeeper:
    """Hands blocks to the saver. Any thread; nothing is copied where blocks are in host memory, and elsewhere
    a thread of its own waits until they are."""

    def __init__(self, core: Core, saver: BlockSaver) -> None:
        self._core = core
        self._saver = saver
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="keep")

    def save(self, run: KeptRun, layer: int) -> None:
        """One layer, whose content is final; nothing where another rank has the same, and saves it."""
        if not self._core.keeps:
            return
        self._core.allocator.retain(run.blocks)
        payload, event = self._core.memory.begin_read(layer, run.blocks)
        if event.done:
            self._hand_over(run, layer, payload, event)
        else:
            self._waiting.submit(copy_context().run, self._hand_over, run, layer, payload, event)

    def save_all_layers(self, run: KeptRun) -> None:
        for layer in self._core.layers:
            self.save(run, layer)

    def make_room(self) -> bool:
        """Lets go of blocks that only wait to be saved, by moving them to the write buffer: whether there
        were any."""
        return self._saver.detach()

    def close(self) -> None:
        """Before the saver is closed: what it was to be given, it has."""
        self._waiting.shutdown()

    def _hand_over(self, run: KeptRun, layer: int, payload: list[memoryview], event: DeviceEvent) -> None:
        event.wait()
        core, blocks = self._core, run.blocks
        self._saver.save(
            address=run.store,
            model=core.info.fingerprint,
            layers=core.layout.layers,
            part=core.layers,
            heads=core.heads,
            tenant=run.tenant,
            parent=run.parent,
            first_index=run.first_index,
            block_ids=run.ids,
            layer=layer,
            payload=payload,
            done=lambda: core.allocator.release(blocks),
        )
