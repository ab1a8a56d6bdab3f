"""The block store: one catalog, one lock around it, and the threads that move bytes.

The lock is held for dictionary work only, never for I/O. Bytes move straight between sockets, DRAM slots and
slab files; what moves is pinned meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcommons.errors import DataLoss, InvalidInput
from kvcommons.rblock.checksum import checksum
from services.kvstore.arena import Arena
from services.kvstore.block import Block, BlockOrigin, Refusal, Staging, StoreStats
from services.kvstore.catalog import Catalog
from services.kvstore.clock import Clock, SystemClock
from services.kvstore.durability import Durability, DurableWatch
from services.kvstore.incoming import Incoming, LayerPut
from services.kvstore.index import BlockIndex, StoredCopy
from services.kvstore.loader import READ_BYTES, Loader, Outcome
from services.kvstore.medium import Medium
from services.kvstore.policies.catalogue import DEFAULT, policy_entry
from services.kvstore.policies.floors import NO_CEILINGS, Ceilings, Floors
from services.kvstore.prefetch import Prefetcher
from services.kvstore.recovery import recover
from services.kvstore.run import Run
from services.kvstore.scrub import Scrub, ScrubThread
from services.kvstore.slab import SlabFiles
from services.kvstore.tier import PAGE_BYTES, Tier
from services.kvstore.writer import Round, Writer

log = logging.getLogger(__name__)

_MIB = 1 << 20
_REGIONS = 16  # of DRAM
_SLABS = 64
_SLAB_BYTES_MAX = 1 << 30
_WRITE_THREADS = 2
_IDLE_S = 1.0
_RETRY_S = 1.0
_EVICTED_ROUND = 256  # blocks that leave a tier for the buffer, or for a tenant's ceiling, in one round


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStoreSettings:
    dram_bytes: int
    disk_bytes: int
    policy: str = DEFAULT
    dram_buffer: float = 0.0  # share of DRAM that is kept free
    touch_memory: bool = False  # whether the system gives all of DRAM at the start, or as it is used
    block_ttl_s: float = 0.0  # blocks that nobody uses for so long go; 0: when their room is wanted
    floors: Floors = Floors()  # noqa: RUF009 (frozen)
    ceilings: Ceilings = NO_CEILINGS
    io_threads: int = 4
    blocks_max: int = 100_000  # on disk; each takes about 800 bytes of memory to know
    scrub_bytes_per_s: int = 4 * _MIB
    staging_s: float = 30.0  # a block whose next layer does not come for so long is given up
    put_wait_s: float = 0.5  # how long a writer waits for room in DRAM
    region_bytes_min: int = _MIB  # of DRAM that a model takes at a time
    slab_bytes_min: int = 16 * _MIB
    read_bytes: int = READ_BYTES  # layers are read together up to here


class BlockStore:
    """Blocks of all models, in DRAM and on disk.

    All methods but `start` and `close` may be called by any thread.
    """

    def __init__(self, medium: Medium, settings: BlockStoreSettings, clock: Clock | None = None) -> None:
        """Opens what is on disk. Raises UnknownFormat, StoreUnavailable, InvalidInput."""
        region_bytes = max(settings.region_bytes_min, settings.dram_bytes // _REGIONS)
        self.arena = Arena()
        if settings.touch_memory:
            try:
                self.arena.touch(settings.dram_bytes // region_bytes, region_bytes)
            except OSError as error:
                raise InvalidInput(
                    f"the system does not give {settings.dram_bytes} bytes of memory: lower dram_bytes",
                    param="dram_bytes",
                ) from error
        self._settings = settings
        self._clock = clock or SystemClock()
        chosen = policy_entry(settings.policy)
        self._slabs = SlabFiles(medium.disk)
        self._index = BlockIndex(medium.index)
        self._catalog = Catalog(
            dram=Tier(settings.dram_bytes, region_bytes),
            disk=Tier(
                settings.disk_bytes,
                min(_SLAB_BYTES_MAX, max(settings.slab_bytes_min, settings.disk_bytes // _SLABS)),
                overhead_bytes=PAGE_BYTES,
            ),
            memory=self.arena,
            new_policy=chosen.make,
            first_generation=self._index.first_generation,
            looks_ahead=chosen.looks_ahead,
            paper_window=chosen.paper_window,
            buffer_bytes=int(settings.dram_buffer * settings.dram_bytes),
            ttl_s=settings.block_ttl_s or None,
            floors=settings.floors,
            ceilings=settings.ceilings,
        )
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)  # a DRAM slot may have become free
        self._work = threading.Condition(self._lock)  # there is something for the writer
        self._durability = Durability(self._catalog)
        self._stopping = False
        pool = medium.executor(settings.io_threads, "kvstore-read")
        self._loader = Loader(self._slabs, self.arena, pool, self._loaded, settings.read_bytes)
        self._writer = Writer(
            catalog=self._catalog,
            lock=self._lock,
            slabs=self._slabs,
            index=self._index,
            arena=self.arena,
            pool=medium.executor(_WRITE_THREADS, "kvstore-write"),
            blocks_max=settings.blocks_max,
            reserve=medium.reserve,
            clock=self._clock,
            settled=self._settled,
        )
        self.prefetcher = Prefetcher(
            self._catalog,
            self._lock,
            self._clock,
            begin_load=self._loader.begin,
            start_loads=self._start_loads,
        )
        self.scrub = Scrub(
            catalog=self._catalog,
            lock=self._lock,
            slabs=self._slabs,
            index=self._index,
            arena=self.arena,
            clock=self._clock,
            bytes_per_s=settings.scrub_bytes_per_s,
        )
        self._scrubbing = ScrubThread(self.scrub)
        self._thread = threading.Thread(target=self._write_loop, name="kvstore-writer", daemon=True)
        now_s = self._clock.monotonic_s()
        log.info("%d blocks found on disk", recover(self._catalog, self._slabs, self._index, now_s))

    def start(self) -> None:
        self._thread.start()
        self.prefetcher.start()
        self._scrubbing.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes what is pending, as far as the time allows, and ends all threads."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        self.prefetcher.stop(timeout_s / 2)
        self._scrubbing.stop(timeout_s / 2)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._loader.close()
        self._writer.close()
        if not self._thread.is_alive():
            self._index.close()
            self._slabs.close()

    # ---- in

    def begin_put(self, put: LayerPut) -> Incoming:
        """Room for what comes; waits a moment for some if there is none.

        Raises InvalidInput, CapacityExhausted.
        """
        now_s = self._clock.monotonic_s()
        give_up_s = now_s + self._settings.put_wait_s
        places: list[Staging | Refusal] = []
        with self._lock:
            for number, block_id in enumerate(put.block_ids):
                origin = BlockOrigin(
                    tenant=put.tenant,
                    parent=put.block_ids[number - 1] if number else put.parent,
                    first_index=put.first_block + number,
                )
                place = self._stage(put, block_id, origin, now_s)
                while place is Refusal.NO_ROOM and (left_s := give_up_s - self._clock.monotonic_s()) > 0:
                    self._freed.wait(left_s)
                    place = self._stage(put, block_id, origin, now_s)
                places.append(place)
        return Incoming(self, put, places)

    def finish_put(self, put: LayerPut, places: Sequence[Staging | Refusal]) -> list[int]:
        """See Incoming.finish."""
        now_s = self._clock.monotonic_s()
        sums = self._sum_up(put, places)
        unwanted = []
        with self._lock:
            counters = self._catalog.counters
            for number, place in enumerate(places):
                result: Block | Refusal | None
                if isinstance(place, Staging):
                    result = self._catalog.received(place, put.layers, sums[number], now_s, put.heads)
                    counters.put_bytes += put.block_bytes
                else:
                    result = place
                    counters.refused += place is Refusal.NO_ROOM
                if result in (Refusal.STORED, Refusal.NO_ROOM):
                    unwanted.append(number)
            if self._catalog.pending:
                self._work.notify()
            if unwanted:
                self._freed.notify_all()
        return unwanted

    def break_put(self, put: LayerPut, places: Sequence[Staging | Refusal]) -> None:
        """See Incoming.break_off."""
        with self._lock:
            for place in places:
                if isinstance(place, Staging):
                    self._catalog.broken_off(place, put.layers, put.heads)
            self._freed.notify_all()

    def _stage(self, put: LayerPut, block_id: bytes, origin: BlockOrigin, now_s: float) -> Staging | Refusal:
        return self._catalog.stage(put.shape, put.writer, block_id, origin, put.layers, now_s, put.heads)

    def _sum_up(self, put: LayerPut, places: Sequence[Staging | Refusal]) -> list[list[int | None]]:
        """Checksums of whole objects, block by block. Those of some heads are made here once all heads of a
        layer have come, from parts that are what was sent: raises DataLoss where one is not."""
        if put.heads is None:
            return [list(put.checksums_of(number)) for number in range(len(places))]
        for number, place in enumerate(places):
            if isinstance(place, Staging):
                for layer, sent in zip(put.layers, put.checksums_of(number), strict=True):
                    pieces = put.heads.pieces_of(self.arena.object(place.slot, layer))
                    if checksum(place.block_id, layer, *pieces) != sent:
                        self.break_put(put, places)
                        raise DataLoss(f"heads {put.heads} of layer {layer} came as something else")
        with self._lock:
            whole = [
                self._catalog.arrived(place, put.layers, put.heads) if isinstance(place, Staging) else []
                for place in places
            ]
        return [
            [
                checksum(block_id, layer, self.arena.object(place.slot, layer))
                if isinstance(place, Staging) and layer in layers
                else None
                for layer in put.layers
            ]
            for block_id, place, layers in zip(put.block_ids, places, whole, strict=True)
        ]

    # ---- out

    def match(self, model: bytes, block_ids: Sequence[bytes], *, peek: bool = False) -> list[bool]:
        """Of the leading blocks that are stored: whether they are in DRAM (else they are on disk).

        With `peek` it counts as no use of them, and as neither hit nor miss.
        """
        with self._lock:
            if peek:
                return [block.in_dram for block in self._catalog.stored(model, block_ids)]
            found = self._catalog.leading(model, block_ids, self._clock.monotonic_s())
            tiers = [block.in_dram for block in found]
            counters = self._catalog.counters
            counters.hits_dram += sum(tiers)
            counters.hits_disk += len(tiers) - sum(tiers)
            counters.misses += len(block_ids) - len(tiers)
            return tiers

    def open_run(
        self,
        model: bytes,
        block_ids: Sequence[bytes],
        first_layer: int = 0,
        last_layer: int = 0,
        *,
        continues: bool = False,
    ) -> Run:
        """Pins the leading blocks that are stored and begins to load those on disk, `first_layer` first.

        One load per block, whoever waits for it. The run is shorter, and says so, where DRAM has no room for
        all of it. Its beginning has most of DRAM then, and stays there. What `continues` it passes through
        the rest, in runs of which one is read while the one before is sent: if each made room for the next,
        nothing would be left in DRAM of what comes first when all of it is asked for again.
        """
        with self._lock:
            condition = threading.Condition()
            passed = self._catalog.passing_blocks(model)
            if continues:  # all of them were asked for before
                block_ids = block_ids[: passed + 1]
            begins, now_s = first_layer == 0 and not continues, self._clock.monotonic_s()
            found = self._catalog.leading(model, block_ids, now_s, begins=begins)
            layers = found[0].space.shape.layers if found else 0
            if found and not 0 <= first_layer <= max(first_layer, last_layer) < layers:
                raise InvalidInput(f"the model has {layers} layers", param="layers")
            most = passed if continues else self._catalog.kept_blocks(model, len(found))
            blocks, started = self._catalog.pin_run(found[:most], passing=continues)
            for block in started:
                self._loader.begin(block, condition)
            loads = [block.load for block in blocks]
        self._start_loads(model, started, first_layer)
        together = len(blocks)
        if blocks and 2 * len(started) > together:
            together = self._loader.together(blocks[0].space.shape) or together
        return Run(self, blocks, loads, together=together, more=0 < len(blocks) < len(found))

    def unpin(self, blocks: Sequence[Block]) -> None:
        """See Run.close."""
        with self._lock:
            for block in blocks:
                self._catalog.unpin(block)
            self._freed.notify_all()

    def sent(self, size_bytes: int) -> None:
        """Counts what went out."""
        with self._lock:
            self._catalog.counters.sent_bytes += size_bytes

    def condemn(self, model: bytes, block_id: bytes, generation: int) -> bool:
        """A reader found this generation of the block corrupt. Whether it was still there."""
        with self._lock:
            gone = self._catalog.condemn(model, block_id, generation)
            self._catalog.counters.corrupt += gone
            self._work.notify()
            return gone

    def forget(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        """Nobody names these blocks any more: they go at once, and their room goes back to the system."""
        with self._lock:
            for block_id in block_ids:
                block = self._catalog.find(model, block_id)
                if block is not None:
                    self._catalog.evictor.detach(block)
                    self._catalog.counters.forgotten += 1
            self._work.notify()
            self._freed.notify_all()

    # ---- durability

    def durable(self, model: bytes, block_ids: Sequence[bytes]) -> int:
        """How many of the leading blocks are on disk."""
        with self._lock:
            return self._durability.leading(model, block_ids)

    def watch(self, model: bytes, block_ids: Sequence[bytes], callback: Callable[[], None]) -> DurableWatch:
        """`callback` is called once, by any thread, when no block is worth waiting for any more.

        See `unwatch`.
        """
        with self._lock:
            watch = self._durability.watch(model, block_ids, callback)
            over = not watch.waiting_for
        if over:
            callback()
        return watch

    @property
    def watching(self) -> int:
        """Watches that are not over."""
        return self._durability.watching

    def unwatch(self, watch: DurableWatch) -> None:
        with self._lock:
            self._durability.unwatch(watch)

    # ---- figures

    def stats(self) -> StoreStats:
        with self._lock:
            catalog = self._catalog
            shape = max(
                (region.shape for region in catalog.disk.regions.values()),
                key=lambda shape: shape.slot_bytes,
                default=next((region.shape for region in catalog.dram.regions.values()), None),
            )
            return StoreStats(
                dram_blocks=catalog.dram.occupied,
                dram_capacity_blocks=catalog.dram.capacity_slots(shape) if shape else 0,
                disk_blocks=catalog.disk.occupied,
                disk_capacity_blocks=catalog.disk.capacity_slots(shape) if shape else 0,
                dram_used_bytes=catalog.dram.occupied_bytes,
                dram_capacity_bytes=catalog.dram.capacity_bytes,
                disk_used_bytes=catalog.disk.occupied_bytes,
                disk_capacity_bytes=catalog.disk.capacity_bytes,
                pending_writes=len(catalog.pending) + catalog.writing,
                staging=catalog.staging,
                counters=replace(catalog.counters),
            )

    # ---- within

    def _start_loads(self, model: bytes, blocks: list[Block], first_layer: int) -> None:
        if not blocks:
            return
        good: list[Block] = []
        lost: list[Block] = []
        copies: Sequence[StoredCopy | None]
        try:
            copies = self._index.stored(model, [block.block_id for block in blocks])
        except Exception as error:
            log.error("the block index cannot be read: %s", error)
            copies = [None] * len(blocks)
        for block, copy in zip(blocks, copies, strict=True):
            if copy is None or copy.generation != block.generation or copy.slot != block.disk:
                lost.append(block)
            else:
                block.checksums = copy.checksums
                good.append(block)
        self._loader.give_up(lost)
        self._loader.start(good, first_layer)

    def _loaded(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in blocks:
                self._load_over(block)
            self._freed.notify_all()

    def _load_over(self, block: Block) -> None:
        assert block.load is not None
        counters, outcome = self._catalog.counters, block.load.outcome
        if outcome is Outcome.GOOD:
            counters.disk_read_bytes += block.space.shape.slot_bytes
            self._catalog.loaded(block)
            return
        assert outcome is not None
        if not block.detached:  # else somebody condemned it while it was loading
            counters.corrupt += outcome is Outcome.CORRUPT
            counters.read_errors += outcome is Outcome.UNREADABLE
            log.error("block %s on disk is %s: dropped", block.block_id.hex(), outcome.value)
        self._catalog.load_failed(block)
        self._work.notify()

    def _settled(self, blocks: Sequence[Block], durable: bool) -> None:
        with self._lock:
            self._freed.notify_all()
            done = self._durability.settled(blocks, durable)
        for watch in done:
            watch.callback()

    def write_round(self) -> Round:
        """One round of the thread that changes the disk."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            freed = self._catalog.drop_stale(now_s - self._settings.staging_s)
            evictor = self._catalog.evictor
            freed += self._catalog.expire(now_s)
            freed += evictor.keep_ceilings(_EVICTED_ROUND) + evictor.keep_buffer(_EVICTED_ROUND)
            if freed:
                self._freed.notify_all()
        return self._writer.cycle()

    def _write_loop(self) -> None:
        while True:
            try:
                outcome = self.write_round()
            except Exception:
                log.exception("a round of writing failed")
                outcome = Round.REFUSED
            with self._lock:
                if outcome is Round.WORKED or (outcome is Round.IDLE and self._catalog.work_waits):
                    continue
                if self._stopping:
                    return
                self._work.wait(_IDLE_S if outcome is Round.IDLE else _RETRY_S)
