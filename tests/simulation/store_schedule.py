"""One life of a block store on a machine that fails: what clients do, what breaks, and what has to hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvcommons.errors import StoreUnavailable
from kvcommons.rblock.checksum import checksum
from services.kvstore.block import Block
from services.kvstore.blocks import BlockStore, BlockStoreSettings
from services.kvstore.incoming import Incoming, LayerPut
from services.kvstore.medium import Medium
from services.kvstore.policies.catalogue import CATALOGUE, DEFAULT
from services.kvstore.run import Run
from services.kvstore.tier import PAGE_BYTES, BlockShape
from services.kvstore.writer import Round
from tests.simulation.machine import Killed, Machine, Rocks, Threads, require
from tests.simulation.platter import Platter
from tests.simulation.sequences import RUN_BLOCKS, SEQUENCES, payload
from tests.simulation.store_invariants import blocks_of, check, check_untouched, on_disk, place_of

STEPS = 60
STAGING_S = 30.0


class StoreSchedule:
    """`run` lives it through; it raises Violation."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine = Machine(self.dice)
        self.platter = Platter(self.machine)
        self.rocks = Rocks(self.machine)
        self.damage = 0  # blocks whose bytes were spoilt on the medium
        self.failed_reads = False  # reads were made to fail at some time
        self.platter.punches = self.machine.strikes(0.8)
        self._disk_pages = self.dice.randint(3, 24)
        self._dram_pages = self.dice.randint(4, 16)
        self._policy = DEFAULT if self.machine.strikes(0.7) else self.dice.choice(list(CATALOGUE))
        self._buffer = self.dice.choice((0.0, 0.0, 0.2))
        self._ttl_s = self.dice.choice((0.0, 0.0, 100.0, 4000.0))
        self._within = False  # a step is under way: what comes now is another thread
        self._writing = self._scrubbing = False
        self._begin_life()
        self._open()

    def _begin_life(self) -> None:
        self.threads = Threads(self.dice)
        self.writers = Threads(self.dice)
        self.puts: list[tuple[LayerPut, Incoming]] = []
        self.runs: list[tuple[Run, BlockShape, Sequence[bytes]]] = []
        self.seen: dict[int, Block] = {}  # every block that somebody had pinned
        self.generations: list[tuple[bytes, bytes, int]] = []
        self.condemned = 0

    def _open(self) -> None:
        pools = {"kvstore-read": self.threads, "kvstore-write": self.writers}
        self.machine.meanwhile = lambda: None
        settings = BlockStoreSettings(
            dram_bytes=self._dram_pages * PAGE_BYTES,
            disk_bytes=self._disk_pages * PAGE_BYTES,
            policy=self._policy,
            dram_buffer=self._buffer,
            block_ttl_s=self._ttl_s,
            staging_s=STAGING_S,
            put_wait_s=0.0,
            region_bytes_min=4 * PAGE_BYTES,
            slab_bytes_min=6 * PAGE_BYTES,
            read_bytes=PAGE_BYTES,
        )
        medium = Medium(disk=self.platter, index=self.rocks, executor=lambda _, name: pools[name])
        self.platter.touched = lambda name, offset, length: None
        self.store = BlockStore(medium, settings, self.machine)
        self.platter.touched = lambda name, offset, length: check_untouched(self, name, offset, length)
        self.machine.meanwhile = self._meanwhile
        check(self)

    def run(self) -> None:
        for _ in range(STEPS):
            self._step(self.dice.choices(self._actions, self._weights)[0])
        self._settle()
        before = on_disk(self.store)
        self._reopen(before)
        self._settle()

    @property
    def _actions(self) -> list[Callable[[], object]]:
        return [
            self._put_blocks,
            self._begin_put,
            self._end_put,
            self._open_run,
            self._read_run,
            self._close_run,
            self.threads.run_one,
            self._write_round,
            self._hint,
            self._begin_turn,
            self._prefetch,
            self._condemn,
            self._replace,
            self._forget,
            self._scrub,
            self._ask,
            self._advance,
            self._change_faults,
            self._spoil,
            self._arm,
            self._restart,
        ]

    _weights = (9, 7, 7, 7, 8, 5, 12, 14, 3, 2, 4, 2, 2, 1, 3, 2, 2, 2, 1, 2, 1)
    _threads = 14  # of these actions, the first may happen while another thread is in the middle of I/O

    # ---- steps

    def _step(self, action: Callable[[], object]) -> None:
        store, lost_before, there_before = self.store, self._dropped(), on_disk(self.store)
        self._within = True
        try:
            action()
        except Killed:
            self._crash()
            return
        finally:
            self._within = False
        check(self)
        if store is self.store:
            gone = [key for key in there_before if key not in on_disk(self.store)]
            require(len(gone) <= self._dropped() - lost_before, f"{len(gone)} blocks left the disk uncounted")

    def _dropped(self) -> int:
        counters = self.store.stats().counters
        lost = counters.corrupt + counters.read_errors + counters.forgotten + counters.expired
        return counters.evictions_disk + lost

    def _meanwhile(self) -> None:
        """Another thread's turn, in the middle of this one's I/O."""
        if not self._within or not self.machine.strikes(0.1):
            return
        self._within = False
        try:
            actions = [
                a for a in self._actions[: self._threads] if a != self._write_round or not self._writing
            ]
            self.dice.choice(actions)()
        finally:
            self._within = True

    def _put(self, layers: range, ids: Sequence[bytes], shape: BlockShape, writer: str) -> LayerPut:
        return LayerPut(
            shape=shape,
            tenant="t",
            writer=writer,
            layers=layers,
            parent=b"",
            first_block=0,
            block_ids=ids,
            checksums=[
                checksum(block_id, layer, payload(block_id, layer, shape.object_bytes))
                for block_id in ids
                for layer in layers
            ],
        )

    def _some(self) -> tuple[BlockShape, list[bytes]]:
        shape, ids = self.dice.choice(SEQUENCES)
        return shape, ids[: self.dice.randint(1, RUN_BLOCKS)]

    def _put_blocks(self) -> None:
        self._send(*self._some())

    def _send(self, shape: BlockShape, ids: Sequence[bytes]) -> None:
        cuts = sorted({0, self.dice.randint(1, shape.layers), shape.layers})
        parts = [range(first, end) for first, end in pairwise(cuts)]
        self.dice.shuffle(parts)
        for layers in parts:
            put = self._put(layers, ids, shape, "whole")
            self._fill(put, self.store.begin_put(put), 0.0, 1.0).finish()

    def _begin_put(self) -> None:
        shape, ids = self._some()
        first = self.dice.randrange(shape.layers)
        layers = range(first, self.dice.randint(first + 1, shape.layers))
        put = self._put(layers, ids, shape, self.dice.choice("ab"))
        self.puts.append((put, self._fill(put, self.store.begin_put(put), 0.0, 0.5)))

    def _end_put(self) -> None:
        if self.puts:
            put, incoming = self.puts.pop(self.dice.randrange(len(self.puts)))
            if self.machine.strikes(0.15):
                incoming.break_off()
            else:
                self._fill(put, incoming, 0.5, 1.0).finish()

    @staticmethod
    def _fill(put: LayerPut, incoming: Incoming, begin: float, end: float) -> Incoming:
        """A part of each block's bytes, as shares of them."""
        for block_id, place in zip(put.block_ids, incoming.into, strict=True):
            if place is not None:
                whole = b"".join(payload(block_id, layer, put.shape.object_bytes) for layer in put.layers)
                part = slice(int(begin * len(whole)), int(end * len(whole)))
                (buffer,) = place
                buffer[part] = whole[part]
        return incoming

    def _open_run(self) -> None:
        shape, ids = self._some()
        run = self.store.open_run(shape.model, ids, continues=self.machine.strikes(0.3))
        self.runs.append((run, shape, ids))
        self.seen.update((id(block), block) for block in run._blocks)

    def _read_run(self) -> None:
        if not self.runs:
            return
        run, shape, ids = self.dice.choice(self.runs)
        if self.machine.strikes(0.7):
            while self.threads.run_one():
                pass
        layer = self.dice.randrange(shape.layers)
        checksums, generations, objects = run.layer(layer, 0.0)
        for block_id, digest, view in zip(ids, checksums, objects, strict=False):
            right = payload(block_id, layer, shape.object_bytes)
            require(bytes(view) == right, f"wrong bytes of layer {layer}")
            require(digest == checksum(block_id, layer, right), f"a wrong checksum of layer {layer}")
        self.generations += [(shape.model, *pair) for pair in zip(ids, generations, strict=False)]

    def _close_run(self) -> None:
        if self.runs:
            self.runs.pop(self.dice.randrange(len(self.runs)))[0].close()

    def _write_round(self) -> None:
        self._writing = True
        try:
            self.store.write_round()
        finally:
            self._writing = False

    def _hint(self) -> None:
        """A router tells of its queue: of the jobs that it told of before some are gone, some have come, and
        some have overtaken others."""
        uses = [(shape.model, ids, self.dice.uniform(0.0, 20.0)) for shape, ids in self._jobs()]
        uses.sort(key=lambda use: use[2])
        router = self.dice.choice("rs")
        require(self.store.prefetcher.hint(router, uses, 30.0) == len(uses), "a hint was not taken")

    def _begin_turn(self) -> None:
        shape, ids = self._some()
        self.store.prefetcher.begin(shape.model, ids)

    def _jobs(self) -> list[tuple[BlockShape, list[bytes]]]:
        return [self._some() for _ in range(self.dice.randint(0, 6))]

    def _prefetch(self) -> None:
        """A round of the thread that fetches ahead; its reads are done by `threads`."""
        there = list(blocks_of(self.store))  # what it begins to fetch may be condemned before it returns
        self.store.prefetcher.step()
        self.seen.update((id(block), block) for block in there if block.pins)

    def _scrub(self) -> None:
        self._scrubbing = True
        try:
            for _ in range(self.dice.randint(1, 4)):
                self.store.scrub.step()
        finally:
            self._scrubbing = False

    def _condemn(self) -> None:
        if self.generations:
            model, block_id, generation = self.dice.choice(self.generations)
            found = self.store._catalog.find(model, block_id)
            gone = self.store.condemn(model, block_id, generation)
            require(
                gone == (found is not None and found.generation == generation),
                "a condemnation hit another generation than it named",
            )
            self.condemned += gone

    def _replace(self) -> None:
        """A reader found a block wrong; it is computed and sent again."""
        shape, ids = self._some()
        block = self.store._catalog.find(shape.model, ids[0])
        if block is not None:
            self.condemned += self.store.condemn(shape.model, ids[0], block.generation)
            self.generations += [(shape.model, ids[0], block.generation)] * 3  # slow readers name it again
            self._send(shape, ids[:1])

    def _forget(self) -> None:
        shape, ids = self._some()
        self.store.forget(shape.model, ids)
        require(not self.store.match(shape.model, ids), "a forgotten block is found")

    def _ask(self) -> None:
        shape, ids = self._some()
        found = len(self.store.match(shape.model, ids))
        require(self.store.durable(shape.model, ids) <= found, "a durable block is not found")

    def _advance(self) -> None:
        self.machine.time_s += self.dice.choice((0.1, 5.0, STAGING_S + 1, 3600.0))

    def _change_faults(self) -> None:
        machine, rate = self.machine, self.dice.choice((0.0, 0.05, 0.3, 1.0))
        fault = self.dice.choice(("heal", "read", "write", "sync", "table", "full"))
        if fault == "heal":
            machine.heal()
        elif fault == "full":
            machine.room_pages = self.platter.allocated_pages + self.dice.randint(0, 2)
        elif fault == "read":
            machine.read_errors = rate
            self.failed_reads = True
        else:
            setattr(machine, f"{fault}_errors", rate)

    def _spoil(self) -> None:
        """Flips a bit, or swaps two slots, on the medium itself."""
        stored = [block for block in blocks_of(self.store) if block.disk is not None]
        if not stored:
            return
        block = self.dice.choice(stored)
        size = block.space.shape.slot_bytes
        name, start = place_of(block)
        if self.machine.strikes(0.5):
            self.platter.flip(name, start + self.dice.randrange(block.space.shape.block_bytes))
            self.damage += 1
            return
        others = [other for other in stored if place_of(other)[0] == name]
        self.platter.swap(name, start, place_of(self.dice.choice(others))[1], size)
        self.damage += 2

    def _arm(self) -> None:
        self.machine.kill_in = self.dice.randint(0, 20)

    def _restart(self) -> None:
        self._settle()
        self._reopen(on_disk(self.store))

    # ---- death and rest

    def _crash(self) -> None:
        before = on_disk(self.store)
        power = self.machine.strikes(0.5)
        self.platter.crash(power=power)
        self.rocks.crash(power=power)
        self._reopen(before)

    def _reopen(self, before: dict[tuple[bytes, bytes], int]) -> None:
        """Starts the process anew; it may die over that, too."""
        smaller = self.machine.strikes(0.1)
        if smaller:
            self._disk_pages = max(3, self._disk_pages - 6)
        if self.machine.strikes(0.2):
            self._arm()
        while True:
            self._begin_life()
            self._within = self._writing = self._scrubbing = False
            try:
                self._open()
                break
            except Killed:
                power = self.machine.strikes(0.5)
                self.platter.crash(power=power)
                self.rocks.crash(power=power)
            except StoreUnavailable:
                self.machine.heal()
        if not smaller:
            after = on_disk(self.store)
            for key, generation in before.items():
                require(after.get(key) == generation, "a durable block is not there after the restart")

    def _settle(self) -> None:
        """All faults over, everybody done: nothing may be left behind, and everything is readable."""
        self.machine.heal()
        self._within = False
        while self.puts:
            self._end_put()
        self._drain()
        while self.runs:
            self._close_run()
        self.machine.time_s += STAGING_S + 60
        while self.store.prefetcher.step():  # of turns that began
            self._drain()
        for _ in range(100):
            if self.store.write_round() is Round.IDLE:
                break
        else:
            require(False, "the writer finds no end")
        check(self)
        stats = self.store.stats()
        require(not stats.staging and not stats.pending_writes, "something was left behind")
        aside = sum(region.aside for region in self.store._catalog.disk.regions.values())
        require(not aside, "a slot stays aside though the disk answers again")
        require(not any(b.pins or b.disk_pins for b in blocks_of(self.store)), "a pin was left behind")
        require(not self.store.prefetcher.step(), "hints outlived their time")
        require(not any(self.store._catalog.evictor.hints.jobs._all()), "a job is expected that nobody hints")
        for shape, ids in SEQUENCES:
            run = self.store.open_run(shape.model, ids)
            self.runs.append((run, shape, ids))
            self._drain()
            for _ in range(shape.layers):
                self._read_run()
            self._close_run()
        check(self)

    def _drain(self) -> None:
        while self.threads.run_one():
            pass
