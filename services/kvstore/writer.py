"""From DRAM to disk: payloads, fdatasync, one batch of index entries; and deletions in the other order.

One thread does all that changes the disk, so the order of its steps is the order on disk. `cycle` is one
round of it; nothing else writes slab files or the block index.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from enum import Enum

from kvcommons.errors import KVCommonsError
from services.kvstore.arena import Arena
from services.kvstore.ballast import DiskReserve
from services.kvstore.block import Block, Doomed
from services.kvstore.catalog import Catalog
from services.kvstore.clock import Clock
from services.kvstore.index import BlockIndex, IndexEntry
from services.kvstore.slab import SlabFiles
from services.kvstore.tier import Slot

log = logging.getLogger(__name__)

BATCH_BLOCKS_MAX = 256
BATCH_BYTES_MAX = 32 << 20
WRITE_BYTES_MAX = 4 << 20
RECLAIM_SLOTS = 64  # in one round
FROZEN_S = 30.0  # how long after "no space left" before files may grow again
ASIDE_S = 10.0  # between looks whether the disk answers again where it failed

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Round(Enum):
    """How a round of writing went."""

    WORKED = "worked"
    IDLE = "idle"  # there was nothing to do
    REFUSED = "refused"  # the index cannot be written: to be tried again, not at once


class Writer:
    """Carries out what the catalog decides about the disk.

    `settled` is called with blocks that became durable, or that the writer gave up.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        lock: threading.Lock,
        slabs: SlabFiles,
        index: BlockIndex,
        arena: Arena,
        pool: Executor,
        blocks_max: int,
        reserve: DiskReserve,
        clock: Clock,
        settled: Callable[[Sequence[Block], bool], None],
    ) -> None:
        self._catalog = catalog
        self._evictor = catalog.evictor
        self._lock = lock
        self._slabs = slabs
        self._index = index
        self._arena = arena
        self._blocks_max = blocks_max
        self._reserve = reserve
        self._clock = clock
        self._settled = settled
        self._pool = pool
        self._frozen_until_s = 0.0
        self._reclaims = True  # until the file system refuses
        self._aside: deque[tuple[Slot, Block]] = deque()  # slots that the disk failed in, and for which block
        self._look_aside_s = 0.0

    def cycle(self) -> Round:
        """Deletes what is doomed, then writes one batch."""
        growth_bytes = self._growth_bytes()
        with self._lock:
            if growth_bytes < 0 and self._reclaims:
                self._evictor.doomed += self._evictor.evict_oldest(RECLAIM_SLOTS, -growth_bytes)
            doomed, self._evictor.doomed = self._evictor.doomed, []
            frozen = self._clock.monotonic_s() < self._frozen_until_s
            self._catalog.disk.growth_bytes = 0 if frozen else max(0, growth_bytes)
            # In the same breath: a block that is sent anew while its old entry goes must not be written now,
            # or the deletion of the old entry, which comes in the next round, would take the new one along.
            batch = self._catalog.take_pending(BATCH_BLOCKS_MAX, BATCH_BYTES_MAX)
        if doomed and not self._unindex(doomed):
            with self._lock:
                for block in reversed(batch):
                    self._catalog.put_back(block)
            return Round.REFUSED  # nothing may be written over them
        if batch:
            try:
                self._write(batch)
            finally:  # whatever happens, no block stays pinned by a write that is over
                with self._lock:
                    waiting = set(self._catalog.pending)
                self._give_up([block for block in batch if block.origin and block not in waiting])
        taken_back = self._look_aside()
        if growth_bytes < 0 and doomed:
            self._reclaim()  # at once: it is not for the next blocks that they went
        return Round.WORKED if doomed or batch or taken_back or self._reclaim() else Round.IDLE

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    # ---- deletions

    def _unindex(self, doomed: list[Doomed]) -> bool:
        """Deletes index entries; only then are the slots free. False where the index cannot be written."""
        try:
            self._index.remove([(copy.model, copy.block_id) for copy in doomed])
        except KVCommonsError as error:
            log.error("the block index cannot be written: %s", error.message)
            with self._lock:
                self._evictor.doomed = doomed + self._evictor.doomed
            return False
        with self._lock:
            self._evictor.unindexed(doomed)
        return True

    # ---- room

    def _growth_bytes(self) -> int:
        """How much KV may grow; below 0: by how much it has to shrink."""
        try:
            return self._reserve.growth_bytes(self._slabs.free_bytes())
        except OSError as error:
            log.warning("nobody knows how much room the disk has: %s", error)
            return 0

    def _reclaim(self) -> bool:
        """Gives room of blocks that went back to the file system. Whether there was any to give.

        Only when there is nothing else to do: in a full store the next block takes a free slot at once.
        """
        with self._lock:
            empty = self._catalog.disk.empty()
            for number in empty:
                self._catalog.disk.remove(number)
            slots = self._catalog.disk.reclaim(RECLAIM_SLOTS) if self._reclaims else []
        for number in empty:
            self._slabs.remove(number)
        for slot in slots:
            try:
                self._reclaims = self._reclaims and self._slabs.punch(slot)
            except OSError as error:
                log.warning("room of deleted blocks cannot be given back: %s", error)
                self._reclaims = False
            with self._lock:
                if self._reclaims:
                    self._catalog.disk.give_unwritten(slot)
                else:
                    self._catalog.disk.give(slot)
        return bool(empty or slots)

    def _look_aside(self) -> bool:
        """Takes slots back that the disk failed in, once it answers there again. Whether there were any."""
        if not self._aside or self._clock.monotonic_s() < self._look_aside_s:
            return False
        self._look_aside_s = self._clock.monotonic_s() + ASIDE_S
        slots = [self._aside.popleft() for _ in range(min(len(self._aside), RECLAIM_SLOTS))]
        answering: list[Slot] = []
        try:
            self._unname(slots)
            while slots and self._slabs.answers(slots[0][0]):
                answering.append(slots.pop(0)[0])
        except KVCommonsError as error:
            log.warning("slots that were set aside stay so: %s", error.message)
        finally:
            self._aside.extend(slots)
            with self._lock:
                for slot in answering:
                    self._catalog.disk.take_back(slot)
        if answering:
            log.info("the disk answers again: %d slots are used again", len(answering))
        return bool(answering)

    def _unname(self, slots: Sequence[tuple[Slot, Block]]) -> None:
        """Deletes entries that name such slots after all: writing them had failed, and nobody knew how."""
        self._index.settle()
        stale = []
        for slot, block in slots:
            model = block.space.shape.model
            entry = self._index.get(model, block.block_id)
            if entry is not None and entry.slot == slot:
                stale.append((model, block.block_id))
        if stale:
            self._index.remove(stale)

    def _slots(self, batch: Sequence[Block]) -> list[Slot]:
        """Room on disk for as many of the batch's blocks as can have it."""
        space = batch[0].space
        slots: list[Slot] = []
        while len(slots) < len(batch):
            with self._lock:
                disk = self._catalog.disk
                while len(slots) < len(batch) and disk.occupied < self._blocks_max:
                    slot = disk.take(space.shape)
                    if slot is None:
                        break
                    slots.append(slot)
                lacking = len(batch) - len(slots)
                may_grow = disk.occupied < self._blocks_max
            if not lacking or (may_grow and self._grow(batch[0])):
                continue
            with self._lock:
                doomed = self._evictor.evict_disk(space, lacking)
            if doomed:
                if not self._unindex(doomed):
                    break
            elif not self._take_over(batch[0]):
                break
        return slots

    def _grow(self, block: Block) -> bool:
        """Another slab file, if the capacity allows it, or if another model's can go for it."""
        shape = block.space.shape
        with self._lock:
            slots = self._catalog.disk.growth_slots(shape)
            number = self._catalog.disk.next_number()
        if not slots:
            return self._take_over(block)
        try:
            self._slabs.create(number, shape, slots)
        except OSError as error:
            self._freeze(error)
            return False
        with self._lock:
            self._catalog.disk.add(number, shape, slots)
        return True

    def _take_over(self, block: Block) -> bool:
        """Empties and deletes a slab file of a model that is used less."""
        with self._lock:
            emptied = self._evictor.empty_disk_region(block.space)
        if emptied is None:
            return False
        region, doomed = emptied
        if doomed and not self._unindex(doomed):
            return False
        with self._lock:
            self._catalog.disk.remove(region.number)
            # There is room on the disk again.
            self._catalog.disk.growth_bytes = max(self._catalog.disk.growth_bytes, region.size_bytes)
        self._slabs.remove(region.number)
        self._frozen_until_s = 0.0
        return True

    def _freeze(self, error: OSError) -> None:
        log.error("a slab file cannot grow, blocks on disk make room for new ones from now on: %s", error)
        self._frozen_until_s = self._clock.monotonic_s() + FROZEN_S
        with self._lock:
            self._catalog.disk.growth_bytes = 0

    # ---- writing

    def _write(self, batch: list[Block]) -> None:
        slots = self._slots(batch)
        for block in batch[len(slots) :]:
            log.debug("no room on disk for block %s", block.block_id.hex())
        self._give_up(batch[len(slots) :])
        placed = sorted(zip(slots, batch[: len(slots)], strict=True), key=lambda pair: pair[0])
        runs = _runs(placed)
        frozen = self._clock.monotonic_s() < self._frozen_until_s
        errors = list(self._pool.map(self._write_run, runs))
        written = [pair for run, error in zip(runs, errors, strict=True) if error is None for pair in run]
        written = self._sync(written)
        if written:
            self._publish(written)
        for run, error in zip(runs, errors, strict=True):
            if error is not None:
                self._failed(run, error, retry=not frozen)

    def _write_run(self, run: Sequence[tuple[Slot, Block]]) -> OSError | None:
        payload = []
        for _, block in run:
            assert block.dram is not None
            payload.append(self._arena.slot(block.dram))
        try:
            self._slabs.write(run[0][0], payload)
        except OSError as error:
            return error
        with self._lock:
            self._catalog.counters.disk_written_bytes += sum(len(part) for part in payload)
        return None

    def _sync(self, written: list[tuple[Slot, Block]]) -> list[tuple[Slot, Block]]:
        """fdatasync of every file; what is in one that fails is given up, and its slots set aside."""
        good = []
        for number in {slot.region for slot, _ in written}:
            inside = [pair for pair in written if pair[0].region == number]
            try:
                self._slabs.sync(number)
            except OSError as error:
                log.error("fdatasync of slab file %d failed, slots are set aside: %s", number, error)
                self._abandon(inside)
                continue
            good += inside
        return good

    def _publish(self, placed: Sequence[tuple[Slot, Block]]) -> None:
        entries = []
        now_ms = self._clock.now_ms()
        with self._lock:
            # A block that was condemned meanwhile may have a successor, even in this batch: one entry is its.
            written = [(slot, block) for slot, block in placed if not block.detached]
            for slot, block in placed:
                if block.detached:
                    self._catalog.not_wanted(block)
                    self._catalog.disk.give(slot)
        for slot, block in written:
            assert block.origin is not None
            assert block.checksums is not None
            entry = IndexEntry(
                model=block.space.shape.model,
                tenant=block.origin.tenant,
                parent=block.origin.parent,
                first_index=block.origin.first_index,
                slot=slot,
                generation=block.generation,
                created_ms=now_ms,
                checksums=block.checksums,
            )
            entries.append((block.block_id, entry))
        try:
            self._index.add(entries)
        except KVCommonsError as error:
            # The batch may be in the log all the same: the slots stay taken until the index is read again.
            log.error("blocks stay in memory only: %s", error.message)
            self._abandon(written)
            return
        with self._lock:
            for slot, block in written:
                self._catalog.durable(block, slot)
        self._settled([block for _, block in written], True)

    def _failed(self, run: Sequence[tuple[Slot, Block]], error: OSError, *, retry: bool) -> None:
        if error.errno in _FULL:
            # Slots that have room behind them take the blocks instead, by eviction; these go back unused.
            self._freeze(error)
            with self._lock:
                for slot, block in run:
                    self._catalog.disk.give_unwritten(slot)
                    if retry:
                        self._catalog.put_back(block)
            if not retry:
                self._give_up([block for _, block in run])
            return
        log.error("writing to slab file %d failed, its slots are set aside: %s", run[0][0].region, error)
        self._abandon(run)

    def _abandon(self, placed: Sequence[tuple[Slot, Block]]) -> None:
        """Nobody knows what is in these slots, or whether the index names them: both stay for now."""
        with self._lock:
            for slot, _ in placed:
                self._catalog.disk.set_aside(slot)
        self._aside.extend(placed)
        self._look_aside_s = self._clock.monotonic_s() + ASIDE_S
        self._give_up([block for _, block in placed])

    def _give_up(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        with self._lock:
            for block in blocks:
                self._catalog.write_failed(block)
        self._settled(blocks, False)


def _runs(placed: Sequence[tuple[Slot, Block]]) -> list[list[tuple[Slot, Block]]]:
    """Slots side by side, together: one write takes them all."""
    runs: list[list[tuple[Slot, Block]]] = []
    size = 0
    for slot, block in placed:
        last = runs[-1][-1][0] if runs else None
        size += block.space.shape.slot_bytes
        if last is None or slot != (last.region, last.place + 1) or size > WRITE_BYTES_MAX:
            runs.append([])
            size = block.space.shape.slot_bytes
        runs[-1].append((slot, block))
    return runs
