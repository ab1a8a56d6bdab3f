"""Which block is where, and what happens to it: events in, decisions out.

No I/O, no clock, no lock: the caller holds one lock around every call, passes the time in, and carries out
what comes back. Life of a block:

    staging ──all layers──▶ in DRAM, pending ──payload, fdatasync, index──▶ in DRAM and on disk
       │ time-out, lost race                │ write failed                     │ DRAM wanted      ▲ load
       ▼                                    ▼                                  ▼                  │
      gone                             in DRAM only ──DRAM wanted──▶ gone   on disk only ─────────┘ ──▶ gone

A block that is condemned, or evicted from its last tier, is detached: nobody finds it any more, and its slots
are free once nobody has them pinned and, on disk, its index entry is deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvcommons.errors import CapacityExhausted, InvalidInput, Overloaded
from kvcommons.rblock.heads import HeadPart
from services.kvstore.ages import Ages
from services.kvstore.block import Block, BlockOrigin, Doomed, Refusal, Space, Staging, units
from services.kvstore.evictor import DramMemory, Evictor
from services.kvstore.policies.base import Policy
from services.kvstore.policies.floors import NO_CEILINGS, NO_FLOORS, Ceilings, Floors
from services.kvstore.tier import BlockShape, Slot, Tier

MODELS_MAX = 64
_PASSED_OF_DRAM = 8  # the part of it that a run of a longer history has which passes through
Stored = tuple[bytes, bytes, int, Slot, str]  # id, parent, generation, slot, tenant


class Catalog:
    """All blocks of all models in both tiers."""

    def __init__(
        self,
        *,
        dram: Tier,
        disk: Tier,
        memory: DramMemory,
        new_policy: Callable[[], Policy[bytes]],
        first_generation: int,
        looks_ahead: bool = True,
        paper_window: bool = False,
        buffer_bytes: int = 0,
        ttl_s: float | None = None,
        floors: Floors = NO_FLOORS,
        ceilings: Ceilings = NO_CEILINGS,
    ) -> None:
        """`looks_ahead`: what the queue will use is fetched ahead. `ttl_s`: unused blocks go after it."""
        self.evictor = Evictor(
            dram=dram,
            disk=disk,
            memory=memory,
            paper_window=paper_window,
            buffer_bytes=buffer_bytes,
            ceilings=ceilings,
        )
        self.looks_ahead = looks_ahead
        self.dram, self.disk = dram, disk
        self.counters = self.evictor.counters
        self.pending: deque[Block] = deque()  # whole, to be written
        self.writing = 0  # taken from `pending`, not settled yet
        self._new_policy, self._floors, self._ceilings = new_policy, floors, ceilings
        self._generation, self._tick = first_generation, 0
        self._spaces = self.evictor.spaces
        self.ages = Ages(ttl_s)

    # ---- what is there

    def find(self, model: bytes, block_id: bytes) -> Block | None:
        """The block, without counting it as used."""
        space = self._spaces.get(model)
        return space.blocks.get(block_id) if space else None

    def leading(
        self, model: bytes, block_ids: Sequence[bytes], now_s: float, *, begins: bool = True
    ) -> list[Block]:
        """The leading blocks that are stored, and so were asked for: they count as used.

        With `begins`, it may be the first that is heard of a job.
        """
        found = self.stored(model, block_ids)
        space = self._spaces.get(model)
        if space is None or not block_ids:
            return found
        if begins and self.evictor.hints.jobs.serve(model, block_ids, len(found), now_s):
            self.evictor.hints.served(len(block_ids) * space.shape.slot_bytes)
        self._use(found, now_s)
        return found

    def stored(self, model: bytes, block_ids: Sequence[bytes]) -> list[Block]:
        """The leading blocks that are stored, without counting them as used."""
        found: list[Block] = []
        for block_id in block_ids:
            block = self.find(model, block_id)
            if block is None:
                break
            found.append(block)
        return found

    def pin(self, block: Block, *, sparing: bool = False, passing: bool = False) -> bool:
        """Pins a block's DRAM copy, making room for one where there is none yet. False: there is no room;
        with `sparing`, none but that of blocks whose use is expected, or of another model. With `passing`,
        such a copy goes with its last pin.

        A block that has to come from disk gets its slot here, and its disk copy is pinned too: the caller
        sets `load` and calls `loaded` or `load_failed` later. It has one pin of its own for that, besides the
        caller's.
        """
        if block.dram is None:
            slot = self.evictor.dram_slot(block.space, sparing=sparing)
            if slot is None:
                return False
            block.dram = slot
            block.passing = passing
            if not passing:
                block.space.dram_policy.admit(block.block_id)
            self.dram.used([slot.region], self._tick)
            block.pins += 1
            block.disk_pins += 1
        block.pins += 1
        return True

    def pin_run(self, blocks: Sequence[Block], *, passing: bool = False) -> tuple[list[Block], list[Block]]:
        """Pins as many leading blocks as there is room for: all of them, and those that come from disk, as
        `passing` as with `pin`.

        What is in DRAM is pinned before room is made for the rest, so that its end alone makes room for it.
        """
        held = deque(block for block in blocks if block.dram is not None)
        for block in held:
            block.pins += 1
        pinned: list[Block] = []
        coming: list[Block] = []
        for block in blocks:
            if held and block is held[0]:
                held.popleft()
            else:
                comes = block.dram is None
                while not (is_pinned := not block.detached and self.pin(block, passing=passing)) and held:
                    self.unpin(held.pop())
                if not is_pinned:
                    break
                coming += [block] if comes else []
            pinned.append(block)
        for block in held:
            self.unpin(block)
        return pinned, coming

    def unpin(self, block: Block) -> None:
        block.pins -= 1
        self.evictor.give_dram(block)

    def unpin_disk(self, block: Block) -> None:
        """Whoever read the disk copy is done with it."""
        block.disk_pins -= 1
        if block.unindexed and not block.disk_pins and block.disk is not None:
            self.disk.give(block.disk)

    def loaded(self, block: Block) -> None:
        """All layers came from disk and are right."""
        block.load = None
        self.unpin_disk(block)
        self.unpin(block)

    def load_failed(self, block: Block) -> None:
        """Some layer did not come, or came wrong: this generation of the block is dropped."""
        self.evictor.detach(block)
        self.loaded(block)

    def passing_blocks(self, model: bytes) -> int:
        """How many blocks a run has that passes through DRAM, behind what is kept of a longer history."""
        return max(1, self._dram_blocks(model) // _PASSED_OF_DRAM)

    def kept_blocks(self, model: bytes, blocks: int) -> int:
        """How many leading ones of so many blocks stay in DRAM while all of them are read: where there is not
        room for all, two runs that pass through have the rest of it."""
        capacity = self._dram_blocks(model)
        return blocks if blocks <= capacity else max(1, capacity - 2 * self.passing_blocks(model))

    def _dram_blocks(self, model: bytes) -> int:
        """For how many of the model's blocks DRAM has room; 0 where none are known."""
        space = self._spaces.get(model)
        return self.dram.capacity_bytes // space.shape.slot_bytes if space else 0

    # ---- what comes in

    def stage(
        self,
        shape: BlockShape,
        writer: str,
        block_id: bytes,
        origin: BlockOrigin,
        layers: range,
        now_s: float,
        heads: HeadPart | None = None,
    ) -> Staging | Refusal:
        """Room for layers of a block, or for these heads of them; end with `received` or `broken_off`. Raises
        as `_admit` does."""
        coming, parts = units(layers, heads), 1 if heads is None else heads.parts
        space = self._admit(shape)
        if block_id in space.blocks:
            return Refusal.STORED
        staging = space.stagings.get(block_id, {}).get(writer)
        if staging is not None:
            again = staging.parts == parts and staging.receiving.isdisjoint(coming)
            if again and staging.missing.isdisjoint(coming):
                # One of its writer's processes has found the block, and saves it once more. What the others
                # have sent is right, and may not come again.
                return Refusal.DUPLICATE
            if again:
                staging.missing.update(coming)
            elif layers.start:
                return Refusal.DUPLICATE
            else:
                # Its writer begins anew, and what it computed before is still on its way.
                self._drop(staging)
                staging = None
        if staging is None:
            slot = self.evictor.dram_slot(space)
            if slot is None:
                return Refusal.NO_ROOM
            self.dram.used([slot.region], self._tick)
            staging = Staging(space, block_id, writer, origin, slot, now_s, parts)
            space.stagings.setdefault(block_id, {})[writer] = staging
        staging.receiving.update(coming)
        staging.touched_s = now_s
        return staging

    def arrived(self, staging: Staging, layers: range, heads: HeadPart) -> list[int]:
        """These heads of the layers have come, and are what was sent: of which layers all heads have now, for
        the caller to sum up. `received` is to follow."""
        staging.missing.difference_update(units(layers, heads))
        others = range(heads.parts)
        return [
            layer
            for layer in layers
            if staging.missing.isdisjoint(layer * heads.parts + number for number in others)
        ]

    def received(
        self,
        staging: Staging,
        layers: range,
        checksums: Sequence[int | None],
        now_s: float,
        heads: HeadPart | None = None,
    ) -> Block | Refusal | None:
        """The bytes of these layers, or of these heads of them, have come; no checksum for a layer of which
        other heads have not. The block if they were the last ones.

        STORED if another writer was faster.
        """
        coming = units(layers, heads)
        staging.receiving.difference_update(coming)
        staging.touched_s = now_s
        space = staging.space
        if staging.dropped or staging.block_id in space.blocks:
            self._drop(staging)
            return Refusal.STORED
        staging.missing.difference_update(coming)
        for layer, known in zip(layers, checksums, strict=True):
            if known is not None:
                staging.checksums[layer] = known
        if staging.missing or staging.receiving:
            return None
        self._generation += 1
        block = Block(space, staging.block_id, self._generation, staging.origin.tenant)
        block.dram = staging.slot
        block.checksums = tuple(staging.checksums)
        block.origin = staging.origin
        block.pins = 1  # the writer's
        others = space.stagings.pop(staging.block_id)
        del others[staging.writer]
        space.blocks[block.block_id] = block
        space.dram_policy.admit(block.block_id, block.origin.parent or None)
        self.pending.append(block)
        self.ages.touch([block], now_s)
        for other in others.values():
            self._drop(other)
        return block

    def broken_off(self, staging: Staging, layers: range, heads: HeadPart | None = None) -> None:
        """The bytes of these layers will not come: the connection broke."""
        staging.receiving.difference_update(units(layers, heads))
        if staging.dropped:
            self._drop(staging)

    def drop_stale(self, before_s: float) -> int:
        """Gives up stagings that nothing came for since then: their writer is dead. How many."""
        stale = [
            staging
            for space in self._spaces.values()
            for writers in space.stagings.values()
            for staging in writers.values()
            if staging.touched_s < before_s and not staging.receiving
        ]
        for staging in stale:
            self._drop(staging)
        self.counters.abandoned += len(stale)
        return len(stale)

    @property
    def staging(self) -> int:
        """Blocks that are not whole yet."""
        return sum(len(writers) for space in self._spaces.values() for writers in space.stagings.values())

    # ---- what goes to disk

    @property
    def work_waits(self) -> bool:
        """Whether there is something to write, or to delete from the index."""
        return bool(self.pending or self.evictor.doomed)

    def take_pending(self, blocks_max: int, bytes_max: int) -> list[Block]:
        """The next blocks to write, all of one model; none that was condemned meanwhile."""
        batch: list[Block] = []
        size = 0
        while self.pending and len(batch) < blocks_max:
            block = self.pending[0]
            if block.detached:
                self.writing += 1
                self.not_wanted(self.pending.popleft())
                continue
            size += block.space.shape.slot_bytes
            if batch and (size > bytes_max or block.space is not batch[0].space):
                break
            batch.append(self.pending.popleft())
        self.writing += len(batch)
        return batch

    def durable(self, block: Block, slot: Slot) -> None:
        """The block's payload and index entry are on disk."""
        self.writing -= 1
        parent = block.origin.parent if block.origin else b""
        block.disk = slot
        block.origin = None
        if block.detached:
            self.evictor.doom(block)
        else:
            block.space.disk_policy.admit(block.block_id, parent or None)
            self.disk.used([slot.region], self._tick)
        self.unpin(block)

    def write_failed(self, block: Block) -> None:
        """The block stays in DRAM for as long as nobody wants the room, and is lost then."""
        self.writing -= 1
        self.counters.write_failures += 1
        block.origin = None
        self.unpin(block)

    def not_wanted(self, block: Block) -> None:
        """The block was condemned before it got to disk: its successor may be on the way already."""
        self.writing -= 1
        block.origin = None
        self.unpin(block)

    def rewrite(self, block: Block, origin: BlockOrigin) -> None:
        """Its disk copy is bad and its DRAM copy is not: the one goes, the other is written elsewhere."""
        assert block.disk is not None
        assert block.dram is not None
        copy = Doomed(model=block.space.shape.model, block_id=block.block_id, slot=block.disk, block=None)
        self.evictor.doomed.append(copy)
        block.space.disk_policy.remove(block.block_id)
        block.disk = None
        block.origin = origin
        block.pins += 1  # the writer's
        self.pending.append(block)

    def put_back(self, block: Block) -> None:
        """Not written for a reason that may be over at the next attempt."""
        self.writing -= 1
        self.pending.appendleft(block)

    # ---- what goes

    def condemn(self, model: bytes, block_id: bytes, generation: int) -> bool:
        """Drops this generation of the block, and no other."""
        block = self.find(model, block_id)
        if block is None or block.generation != generation:
            return False
        self.evictor.detach(block)
        return True

    def expire(self, now_s: float) -> int:
        """Drops what nobody has used for the time to live. How many blocks."""
        old = self.ages.take_old(now_s)
        for block in old:
            self.evictor.detach(block)
        self.counters.expired += len(old)
        return len(old)

    # ---- at start

    def restore(self, shape: BlockShape, blocks: Iterable[Stored], now_s: float) -> None:
        """Blocks found in the index, least recently used first."""
        space = self._admit(shape)
        for block_id, parent, generation, slot, tenant in blocks:
            self._tick += 1
            block = Block(space, block_id, generation, tenant)
            block.disk = slot
            space.blocks[block_id] = block
            space.disk_policy.admit(block_id, parent or None)
            self.disk.used([slot.region], self._tick)
            self.ages.touch([block], now_s)

    # ---- within

    def _admit(self, shape: BlockShape) -> Space:
        """The model's space.

        Raises InvalidInput for another shape than before, Overloaded, CapacityExhausted.
        """
        space = self._spaces.get(shape.model)
        if space is None or (space.shape != shape and not space.blocks and not space.stagings):
            self._check_room(shape)
            space = Space(shape, self._new_policy, self._floors, self._ceilings)
            self._spaces[shape.model] = space
            self.evictor.hints.jobs.began(shape.model)
        if space.shape != shape:
            raise InvalidInput(
                f"blocks of this model have {space.shape.layers} layers of {space.shape.object_bytes} bytes, "
                f"not {shape.layers} of {shape.object_bytes}",
                param="layers",
            )
        return space

    def _check_room(self, shape: BlockShape) -> None:
        if shape.layers < 1 or shape.object_bytes < 1:
            raise InvalidInput("a block has at least one layer of at least one byte", param="layers")
        if not self.dram.fits(shape):
            raise CapacityExhausted(
                f"a block of this model takes {shape.slot_bytes} bytes and the store has "
                f"{self.dram.capacity_bytes} of DRAM: raise dram_bytes of the kvstore"
            )
        for model in [m for m, s in self._spaces.items() if not s.blocks and not s.stagings]:
            del self._spaces[model]
        if len(self._spaces) >= MODELS_MAX:
            raise Overloaded(f"the store has blocks of {MODELS_MAX} models and takes no further one")

    def _use(self, blocks: Sequence[Block], now_s: float) -> None:
        self._tick += 1
        self.ages.touch(reversed(blocks), now_s)
        self.dram.used({block.dram.region for block in blocks if block.dram is not None}, self._tick)
        self.disk.used({block.disk.region for block in blocks if block.disk is not None}, self._tick)

    def _drop(self, staging: Staging) -> None:
        """Frees a staging's slot once no bytes are under way into it."""
        writers = staging.space.stagings.get(staging.block_id, {})
        if writers.get(staging.writer) is staging:
            del writers[staging.writer]
            if not writers:
                del staging.space.stagings[staging.block_id]
        staging.dropped = True
        if not staging.receiving:
            self.dram.give(staging.slot)
