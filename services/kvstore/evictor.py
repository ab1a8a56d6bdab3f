"""Eviction: which blocks go, from which tier, when a new one needs a slot. Decisions only, as in `catalog`.

A block that is condemned, or evicted from its last tier, is detached: nobody finds it any more, and its slots
are free once nobody has them pinned and, on disk, its index entry is deleted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from services.kvstore.block import Block, Counters, Doomed, Space
from services.kvstore.hints import Hints
from services.kvstore.policies.base import Policy
from services.kvstore.policies.floors import NO_CEILINGS, Ceilings, ceiling_of
from services.kvstore.tier import BlockShape, Region, Slot, Tier


class DramMemory(Protocol):
    """What lies behind the regions of the DRAM tier."""

    def create(self, number: int, shape: BlockShape, slots: int) -> None: ...

    def remove(self, number: int) -> None: ...


class Evictor:
    """The two tiers, and the blocks in them by model. `buffer_bytes` of DRAM are kept free, so that new
    blocks need not wait (AttentionStore, section 3.3.1)."""

    def __init__(
        self,
        *,
        dram: Tier,
        disk: Tier,
        memory: DramMemory,
        paper_window: bool = False,
        buffer_bytes: int = 0,
        ceilings: Ceilings = NO_CEILINGS,
    ) -> None:
        self.dram = dram
        self.disk = disk
        self.spaces: dict[bytes, Space] = {}
        self.counters = Counters()
        self.doomed: list[Doomed] = []  # disk copies whose index entries have to be deleted
        self.hints = Hints(
            self._slot_bytes,
            dram_bytes=max(0, dram.capacity_bytes - buffer_bytes),
            disk_bytes=disk.capacity_bytes,
            policies=self._policies,
            paper_window=paper_window,
        )
        self._memory = memory
        self._buffer_bytes = buffer_bytes
        self._ceilings = ceilings

    def dram_slot(self, space: Space, *, sparing: bool = False) -> Slot | None:
        """A slot in DRAM, made free if need be; None where nothing can go.

        With `sparing`, neither blocks of the fetch window nor another model's go for it.
        """
        shape = space.shape
        while True:
            slot = self.dram.take(shape)
            if slot is not None:
                return slot
            if self._grow_dram(shape) or (not sparing and self._take_over_dram(space)):
                continue
            victim = self._victim(space, disk=False)
            if victim is None or (sparing and self._is_next(victim)):
                return None
            self._evict_dram_copy(victim)

    def keep_buffer(self, blocks_max: int) -> int:
        """Frees DRAM down to the buffer, of blocks that are on disk as well; how many, at most `blocks_max`.

        The model whose blocks take most gives them.
        """
        freed = 0
        while freed < blocks_max and self.dram.capacity_bytes - self.dram.occupied_bytes < self._buffer_bytes:
            space = max(self.spaces.values(), key=self._dram_bytes, default=None)
            victim = self._victim(space, disk=False, stored=True) if space else None
            if victim is None or self._is_next(victim):
                break
            self._evict_dram_copy(victim)
            freed += 1
        return freed

    def keep_ceilings(self, blocks_max: int) -> int:
        """Drops copies, at most `blocks_max`, of tenants that have more in a tier than they may; how many.

        The model gives them of whose blocks the tenant has most, or else has some that nobody uses."""
        dropped = 0
        for disk, ceilings in ((False, self._ceilings.dram_bytes), (True, self._ceilings.disk_bytes)):
            held: dict[str, dict[Space, int]] = {}  # bytes
            for space in self.spaces.values():
                for tenant, blocks in space.policy(disk=disk).blocks_under_ceilings().items():
                    held.setdefault(tenant, {})[space] = blocks * space.shape.slot_bytes
            for tenant, bytes_in in held.items():
                too_much = sum(bytes_in.values()) - ceiling_of(tenant, ceilings)
                while too_much > 0 and bytes_in and dropped < blocks_max:
                    space = max(bytes_in, key=bytes_in.__getitem__)
                    if not self._drop_oldest(space, tenant, disk=disk):
                        del bytes_in[space]  # all that is left of it is in use
                        continue
                    bytes_in[space] -= space.shape.slot_bytes
                    too_much -= space.shape.slot_bytes
                    dropped += 1
        return dropped

    def _drop_oldest(self, space: Space, tenant: str, *, disk: bool) -> bool:
        """Whether one copy of the tenant's could go from the tier."""
        oldest = space.policy(disk=disk).oldest(tenant, partial(space.pinned, disk=disk))
        if oldest is None:
            return False
        if disk:
            self.doomed.append(self._evict_disk_copy(space.blocks[oldest]))
        else:
            self._evict_dram_copy(space.blocks[oldest])
        return True

    def give_dram(self, block: Block) -> None:
        """Frees the DRAM slot of a block that nobody has pinned, if it is detached or only passing."""
        if block.pins or block.dram is None or not (block.detached or block.passing):
            return
        self.dram.give(block.dram)
        block.dram = None
        block.checksums = None
        block.passing = False
        if block.disk is None:  # evicted while it was read
            self.detach(block)

    def detach(self, block: Block) -> None:
        """Nobody finds the block from now on."""
        if block.detached:
            return
        block.detached = True
        space = block.space
        del space.blocks[block.block_id]
        space.dram_policy.remove(block.block_id)
        space.disk_policy.remove(block.block_id)
        if block.disk is not None:
            self.doom(block)
        self.give_dram(block)

    def doom(self, block: Block) -> None:
        assert block.disk is not None
        self.doomed.append(
            Doomed(model=block.space.shape.model, block_id=block.block_id, slot=block.disk, block=block)
        )

    def evict_disk(self, space: Space, count: int) -> list[Doomed]:
        """Up to `count` disk copies that go so that this model's next blocks have room."""
        gone: list[Doomed] = []
        while len(gone) < count and (victim := self._victim(space, disk=True)) is not None:
            gone.append(self._evict_disk_copy(victim))
        return gone

    def evict_oldest(self, count: int, size_bytes: int) -> list[Doomed]:
        """Up to `count` disk copies of the model that is used least, as many as make up `size_bytes`."""
        region = self.disk.oldest()
        space = self.spaces.get(region.shape.model) if region is not None else None
        if space is None:
            return []
        return self.evict_disk(space, min(count, -(-size_bytes // space.shape.slot_bytes)))

    def empty_disk_region(self, space: Space) -> tuple[Region, list[Doomed]] | None:
        """A region of another model, unused for longer than any of this one's, and its copies."""
        region = self._surplus(self.disk, space)
        inside = self._inside(region, disk=True) if region else None
        if region is None or inside is None:
            return None
        return region, [self._evict_disk_copy(block) for block in inside]

    def excess_disk_region(self) -> tuple[Region, list[Doomed]] | None:
        """At start, where the capacity was lowered: the region to give up next."""
        if self.disk.used_bytes <= self.disk.capacity_bytes:
            return None
        region = min(self.disk.regions.values(), key=lambda region: region.last_used)
        return region, [self._evict_disk_copy(block) for block in self._inside(region, disk=True) or ()]

    def unindexed(self, doomed: Iterable[Doomed]) -> None:
        """Their index entries are deleted: the slots are free once no reader has them."""
        for copy in doomed:
            if copy.block is not None:
                copy.block.unindexed = True
            if copy.block is None or not copy.block.disk_pins:
                self.disk.give(copy.slot)

    def _grow_dram(self, shape: BlockShape) -> bool:
        slots = self.dram.growth_slots(shape)
        if not slots:
            return False
        number = self.dram.next_number()
        try:
            self._memory.create(number, shape, slots)
        except OSError:
            return False  # the machine has less memory than dram_bytes says
        self.dram.add(number, shape, slots)
        return True

    def _take_over_dram(self, space: Space) -> bool:
        region = self._surplus(self.dram, space)
        inside = self._inside(region, disk=False) if region else None
        if region is None or inside is None:
            return False
        for block in inside:
            self._evict_dram_copy(block)
        self.dram.remove(region.number)
        self._memory.remove(region.number)
        return True

    def _surplus(self, tier: Tier, space: Space) -> Region | None:
        """The region of another model that is used least, if this model's least used one is used more."""
        other = tier.oldest_other(space.shape)
        if other is None:
            return None
        own = min((region.last_used for region in tier.regions_of(space.shape)), default=math.inf)
        return other if other.last_used < own else None

    def _inside(self, region: Region, *, disk: bool) -> list[Block] | None:
        """The blocks in a region; None where some slot of it is in use and cannot be emptied now."""
        space = self.spaces.get(region.shape.model)
        inside: list[Block] = []
        for block in space.blocks.values() if space else ():
            slot = block.disk if disk else block.dram
            if slot is not None and slot.region == region.number:
                if block.disk_pins if disk else block.pins:
                    return None
                inside.append(block)
        return inside if len(inside) == region.occupied else None

    def _evict_dram_copy(self, block: Block) -> None:
        assert block.dram is not None
        self.counters.evictions_dram += 1
        self.dram.give(block.dram)
        block.dram = None
        block.checksums = None
        block.space.dram_policy.remove(block.block_id)
        if block.disk is None:
            self.detach(block)

    def _evict_disk_copy(self, block: Block) -> Doomed:
        assert block.disk is not None
        self.counters.evictions_disk += 1
        copy = Doomed(model=block.space.shape.model, block_id=block.block_id, slot=block.disk, block=None)
        block.disk = None
        block.space.disk_policy.remove(block.block_id)
        if block.dram is None:
            self.detach(block)
        return copy

    def _victim(self, space: Space, *, disk: bool, stored: bool = False) -> Block | None:
        """The block to go next, of those that nobody has pinned; with `stored`, that are on disk too."""

        def kept(block_id: bytes) -> bool:
            return space.pinned(block_id, disk=disk) or (stored and space.blocks[block_id].disk is None)

        victim = space.policy(disk=disk).victim(kept)
        if victim is not None:
            return space.blocks[victim]
        if stored:
            return None
        # What the policy would let go later may all be in use. Then what comes before it has to go first.
        held = (b for b in space.blocks.values() if (b.disk if disk else b.dram) is not None)
        return next((block for block in held if not kept(block.block_id)), None)

    def _is_next(self, block: Block) -> bool:
        return block.block_id in self.hints.window().get(block.space.shape.model, {})

    def _dram_bytes(self, space: Space) -> int:
        regions = self.dram.regions_of(space.shape)
        return sum(region.occupied for region in regions) * space.shape.slot_bytes

    def _policies(self, model: bytes) -> Sequence[Policy[bytes]]:
        space = self.spaces.get(model)
        return (space.dram_policy, space.disk_policy) if space else ()

    def _slot_bytes(self, model: bytes) -> int:
        space = self.spaces.get(model)
        return space.shape.slot_bytes if space else 0
