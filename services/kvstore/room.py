"""Making room: which blocks go, from which tier, when a new one needs a slot. Decisions, as in `catalog`.

A block that is condemned, or evicted from its last tier, is detached: nobody finds it any more, and its slots
are free once nobody has them pinned and, on disk, its index entry is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from services.kvstore.block import Block, Counters, Doomed, Space
from services.kvstore.hints import Hints
from services.kvstore.tier import BlockShape, Region, Slot, Tier


class Memory(Protocol):
    """What lies behind the regions of the DRAM tier."""

    def create(self, number: int, shape: BlockShape, slots: int) -> None: ...

    def remove(self, number: int) -> None: ...


class Room:
    """The two tiers, and the blocks in them by model."""

    def __init__(self, *, dram: Tier, disk: Tier, memory: Memory) -> None:
        self.dram = dram
        self.disk = disk
        self.spaces: dict[bytes, Space] = {}
        self.counters = Counters()
        self.doomed: list[Doomed] = []  # disk copies whose index entries have to be deleted
        self.hints = Hints(self._slot_bytes, dram_bytes=dram.capacity_bytes, disk_bytes=disk.capacity_bytes)
        self._memory = memory

    def dram_slot(self, space: Space, *, sparing: bool = False) -> Slot | None:
        """A slot in DRAM, made free if need be; None where nothing can go.

        With `sparing`, neither blocks whose use is expected nor another model's go for it.
        """
        shape = space.shape
        while True:
            slot = self.dram.take(shape)
            if slot is not None:
                return slot
            if self._grow_dram(shape) or (not sparing and self._take_over_dram(space)):
                continue
            victim = next(self._victims(space, 1, disk=False, sparing=sparing), None)
            if victim is None:
                return None
            self._evict_dram_copy(victim)

    def give_dram(self, block: Block) -> None:
        """Frees the DRAM slot of a detached block that nobody has pinned."""
        if block.detached and not block.pins and block.dram is not None:
            self.dram.give(block.dram)
            block.dram = None

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
        return [self._evict_disk_copy(block) for block in self._victims(space, count, disk=True)]

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
        own = [r.last_used for r in tier.regions.values() if r.shape == space.shape]
        if other is None or (own and other.last_used >= min(own)):
            return None
        return other

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
        return inside if len(inside) == region.taken else None

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

    def _victims(self, space: Space, count: int, *, disk: bool, sparing: bool = False) -> Iterator[Block]:
        """Up to `count` blocks to go that nobody has pinned, in the policy's order; those whose use is
        expected only where no others are left, the last to be used first (AttentionStore, section 3.3)."""
        policy = space.disk_policy if disk else space.dram_policy
        expected = self.hints.window(disk=disk).get(space.shape.model, {})
        found: list[Block] = []
        spared: list[Block] = []
        for block_id in policy.victims():
            if len(found) == count:
                break
            block = space.blocks[block_id]
            if not (block.disk_pins if disk else block.pins):
                (spared if block_id in expected else found).append(block)
        if not sparing and len(found) < count:
            spared.sort(key=lambda block: expected[block.block_id], reverse=True)
            found += spared[: count - len(found)]
        return iter(found)

    def _slot_bytes(self, model: bytes) -> int:
        space = self.spaces.get(model)
        return space.shape.slot_bytes if space else 0
