"""Blocks of an engine's memory on their way to a kvstore: pinned, read in place, released when they are
there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass

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
    """Hands blocks to the saver. Any thread; on the CPU nothing is copied, elsewhere a thread of its own
    copies."""

    def __init__(self, core: Core, saver: BlockSaver) -> None:
        self._core = core
        self._saver = saver
        on_cpu = core.memory.device.type == "cpu"
        self._copier = None if on_cpu else ThreadPoolExecutor(1, thread_name_prefix="keep")

    def save(self, run: KeptRun, layer: int) -> None:
        """One layer, whose content is final."""
        self._core.allocator.retain(run.blocks)
        if self._copier is None:
            self._hand_over(run, layer)
        else:
            self._copier.submit(copy_context().run, self._hand_over, run, layer)

    def save_all_layers(self, run: KeptRun) -> None:
        for layer in range(self._core.layout.layers):
            self.save(run, layer)

    def make_room(self) -> bool:
        """Lets go of blocks that only wait to be saved, by moving them to the write buffer: whether there
        were any."""
        return self._saver.detach()

    def close(self) -> None:
        """Before the saver is closed: what it was to be given, it has."""
        if self._copier is not None:
            self._copier.shutdown()

    def _hand_over(self, run: KeptRun, layer: int) -> None:
        core, blocks = self._core, run.blocks
        self._saver.save(
            address=run.store,
            model=core.info.fingerprint,
            layers=core.layout.layers,
            tenant=run.tenant,
            parent=run.parent,
            first_index=run.first_index,
            block_ids=run.ids,
            layer=layer,
            payload=core.memory.read_buffers(layer, blocks),
            done=lambda: core.allocator.release(blocks),
        )
