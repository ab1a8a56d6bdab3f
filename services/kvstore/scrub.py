"""Reads what lies on disk now and then, so that a bad sector is found before somebody needs what was there.

One pass goes over all blocks on disk in the order in which they lie, at a bounded rate; the next one begins
when it is over, an hour after its beginning at the earliest. A block that fails its check is counted as one
that a reader found. If DRAM has it, and right, it is written again, to another slot; else it is dropped.
"""

from __future__ import annotations

import logging
import mmap
import threading

from kvcommons.rblock.checksum import checksum
from services.kvstore.arena import Arena
from services.kvstore.block import Block, BlockOrigin
from services.kvstore.catalog import Catalog
from services.kvstore.clock import Clock
from services.kvstore.index import BlockIndex, IndexEntry
from services.kvstore.loader import Outcome
from services.kvstore.slab import SlabFiles
from services.kvstore.tier import Slot

log = logging.getLogger(__name__)

PASS_S_MIN = 3600.0
IDLE_S = 10.0  # between looks, with nothing to do


class Scrub:
    """`step` checks one block and says how long to wait. `bytes_per_s`: 0 is never."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        lock: threading.Lock,
        slabs: SlabFiles,
        index: BlockIndex,
        arena: Arena,
        clock: Clock,
        bytes_per_s: int,
    ) -> None:
        self._catalog = catalog
        self._lock = lock
        self._slabs = slabs
        self._index = index
        self._arena = arena
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._left: list[tuple[Slot, Block]] = []  # of this pass, the last one next
        self._next_pass_s = 0.0
        self._buffer = memoryview(b"")

    def step(self) -> float:
        """Checks the next block, if it is time. Seconds until the next step."""
        if not self._bytes_per_s:
            return IDLE_S
        if not self._left and not self._begin_pass():
            return IDLE_S
        slot, block = self._left.pop()
        with self._lock:
            if block.detached or block.disk != slot:
                return 0.0
            block.disk_pins += 1
        try:
            outcome, entry = self._check(slot, block)
            if outcome is not Outcome.GOOD:
                self._replace(block, outcome, entry)
        finally:
            with self._lock:
                self._catalog.counters.scrubbed_bytes += block.space.shape.slot_bytes
                self._catalog.unpin_disk(block)
        return block.space.shape.slot_bytes / self._bytes_per_s

    def _begin_pass(self) -> bool:
        now_s = self._clock.monotonic_s()
        if now_s < self._next_pass_s:
            return False
        with self._lock:
            spaces = self._catalog.evictor.spaces.values()
            blocks = [block for space in spaces for block in space.blocks.values()]
        placed = [(slot, block) for block in blocks if (slot := block.disk) is not None]
        self._left = sorted(placed, key=lambda pair: pair[0], reverse=True)
        if self._left:
            self._next_pass_s = now_s + PASS_S_MIN
        return bool(self._left)

    def _replace(self, block: Block, outcome: Outcome, entry: IndexEntry | None) -> None:
        """What is bad on disk goes; the block stays where DRAM has it and the index says whose it is."""
        with self._lock:
            if block.detached:
                return
            counters = self._catalog.counters
            counters.corrupt += outcome is Outcome.CORRUPT
            counters.read_errors += outcome is Outcome.UNREADABLE
            slot = block.dram if block.load is None else None
            if slot is None or entry is None:
                log.error("block %s on disk is %s: dropped", block.block_id.hex(), outcome.value)
                self._catalog.evictor.detach(block)
                return
            block.pins += 1
        right = False
        try:
            right = _is_right(block, entry, self._arena.slot(slot))
        finally:
            what = "written again from memory" if right else "dropped"
            log.error("block %s on disk is %s: %s", block.block_id.hex(), outcome.value, what)
            with self._lock:
                if right and not block.detached:
                    origin = BlockOrigin(
                        tenant=entry.tenant, parent=entry.parent, first_index=entry.first_index
                    )
                    self._catalog.rewrite(block, origin)
                else:
                    self._catalog.evictor.detach(block)
                self._catalog.unpin(block)

    def _check(self, slot: Slot, block: Block) -> tuple[Outcome, IndexEntry | None]:
        """And the block's entry, where there is one that fits."""
        shape = block.space.shape
        if len(self._buffer) < shape.slot_bytes:
            self._buffer = memoryview(mmap.mmap(-1, shape.slot_bytes))
        view = self._buffer[: shape.slot_bytes]
        entry = None
        try:
            entry = self._index.get(shape.model, block.block_id)
            if entry is None or (entry.generation, entry.slot) != (block.generation, slot):
                return Outcome.UNREADABLE, None
            self._slabs.read(slot, 0, [view])
        except Exception as error:
            log.error("checking block %s failed: %s", block.block_id.hex(), error)
            return Outcome.UNREADABLE, entry
        return Outcome.GOOD if _is_right(block, entry, view) else Outcome.CORRUPT, entry


def _is_right(block: Block, entry: IndexEntry, slot: memoryview) -> bool:
    """Whether a slot's content is what was stored."""
    size = block.space.shape.object_bytes
    return all(
        checksum(block.block_id, layer, slot[layer * size : (layer + 1) * size]) == digest
        for layer, digest in enumerate(entry.checksums)
    )


class ScrubThread:
    """Runs a scrub until it is stopped."""

    def __init__(self, scrub: Scrub) -> None:
        self._scrub = scrub
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-scrub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            try:
                wait_s = self._scrub.step()
            except Exception:
                log.exception("a step of the scrub failed")
                wait_s = IDLE_S
