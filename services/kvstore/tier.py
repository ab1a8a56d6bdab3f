"""Where blocks of several models find room in one capacity: DRAM and disk alike. Pure bookkeeping, no I/O.

Blocks of one model have one size, blocks of two models do not. So a tier is cut into regions, each a row of
slots of one model: an anonymous mapping in DRAM, a slab file on disk. Regions are added while the capacity
allows; when it is used up, a model's own blocks make room for it, or a region of another model changes hands
whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What the store knows of a model: `layers` objects of `object_bytes` make a block."""

    model: bytes
    layers: int
    object_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.object_bytes

    @property
    def slot_bytes(self) -> int:
        """Room of a block, padded to whole pages, as O_DIRECT wants it."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES


class Slot(NamedTuple):
    region: int
    place: int


class Region:
    """A row of slots of one model. `last_used` is the tick of the latest use of any of its blocks."""

    __slots__ = (
        "aside",
        "fresh",
        "last_used",
        "number",
        "occupied",
        "recycled",
        "shape",
        "size_bytes",
        "slots",
        "unwritten",
    )

    def __init__(self, number: int, shape: BlockShape, slots: int, overhead_bytes: int) -> None:
        self.number = number
        self.shape = shape
        self.slots = slots
        self.size_bytes = overhead_bytes + slots * shape.slot_bytes
        self.fresh = 0  # slots from here on were never written: on disk they may have no room behind them
        self.recycled: list[int] = []
        self.unwritten: list[int] = []  # handed out once, but the medium had no room behind them
        self.occupied = 0
        self.aside = (
            0  # of the occupied ones: the medium failed in them, so they stay unused until it answers again
        )
        self.last_used = 0


class Tier:
    """Regions and their free slots, within `capacity_bytes`. Regions are about `region_bytes` large."""

    def __init__(self, capacity_bytes: int, region_bytes: int, *, overhead_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0  # capacity given to regions
        self.regions: dict[int, Region] = {}
        self._rows: dict[BlockShape, dict[int, Region]] = {}  # the same regions, by model
        # What may still be written where nothing was written before; without it, only slots that have room
        # behind them are given.
        self.growth_bytes: float = math.inf
        self._region_bytes = region_bytes
        self._overhead_bytes = overhead_bytes  # of a region, beside its slots
        self._next_number = 1

    @property
    def occupied(self) -> int:
        """Slots with a block in them."""
        return sum(region.occupied for region in self.regions.values())

    @property
    def occupied_bytes(self) -> int:
        """Of slots with a block in them."""
        return sum(region.occupied * region.shape.slot_bytes for region in self.regions.values())

    def capacity_slots(self, shape: BlockShape) -> int:
        """Slots that this model could have beside the regions of the others."""
        others = self.used_bytes - sum(region.size_bytes for region in self.regions_of(shape))
        return max(0, self.capacity_bytes - others - self._overhead_bytes) // shape.slot_bytes

    def regions_of(self, shape: BlockShape) -> Collection[Region]:
        """Of this model, in the order in which they were added."""
        row = self._rows.get(shape)
        return row.values() if row is not None else ()

    def fits(self, shape: BlockShape) -> bool:
        """Whether the tier could hold even one block of this shape."""
        return shape.slot_bytes + self._overhead_bytes <= self.capacity_bytes

    def take(self, shape: BlockShape) -> Slot | None:
        """A free slot of this model, the lowest region first so that blocks saved together lie together."""
        fresh: Region | None = None
        for region in self.regions_of(shape):
            if region.recycled:
                region.occupied += 1
                return Slot(region.number, region.recycled.pop())
            if fresh is None and (region.unwritten or region.fresh < region.slots):
                fresh = region
        if fresh is None or self.growth_bytes < shape.slot_bytes:
            return None
        self.growth_bytes -= shape.slot_bytes
        fresh.occupied += 1
        if fresh.unwritten:
            return Slot(fresh.number, fresh.unwritten.pop())
        fresh.fresh += 1
        return Slot(fresh.number, fresh.fresh - 1)

    def give(self, slot: Slot) -> None:
        """The slot is free again."""
        region = self.regions.get(slot.region)
        if region is not None:
            region.occupied -= 1
            region.recycled.append(slot.place)

    def give_unwritten(self, slot: Slot) -> None:
        """The medium had no room for the slot: it is free, for when growth is possible again."""
        region = self.regions.get(slot.region)
        if region is not None:
            region.occupied -= 1
            region.unwritten.append(slot.place)

    def reclaim(self, count: int) -> list[Slot]:
        """Up to `count` free slots that have room behind them: to be given back, then `give_unwritten`."""
        slots: list[Slot] = []
        for region in self.regions.values():
            while region.recycled and len(slots) < count:
                slots.append(Slot(region.number, region.recycled.pop()))
                region.occupied += 1
        return slots

    def empty(self) -> list[int]:
        """Regions in which no slot is taken."""
        return [region.number for region in self.regions.values() if not region.occupied]

    def set_aside(self, slot: Slot) -> None:
        """The medium failed in this slot: it is not used again, and counts as taken."""
        self.regions[slot.region].aside += 1

    def take_back(self, slot: Slot) -> None:
        """The medium answers again in a slot that was set aside: it is free."""
        self.regions[slot.region].aside -= 1
        self.give(slot)

    def growth_slots(self, shape: BlockShape) -> int:
        """How many slots a further region may have within the capacity; 0: none."""
        if self.growth_bytes < shape.slot_bytes + self._overhead_bytes:
            return 0
        free = (self.capacity_bytes - self.used_bytes - self._overhead_bytes) // shape.slot_bytes
        return min(max(0, free), max(1, self._region_bytes // shape.slot_bytes))

    def next_number(self) -> int:
        """A region number that was never used."""
        number = self._next_number
        self._next_number += 1
        return number

    def add(self, number: int, shape: BlockShape, slots: int) -> Region:
        """A new, empty region; its memory or file exists already."""
        region = Region(number, shape, slots, self._overhead_bytes)
        self.regions[number] = region
        self._rows.setdefault(shape, {})[number] = region
        self.used_bytes += region.size_bytes
        self._next_number = max(self._next_number, number + 1)
        return region

    def restore(self, number: int, occupied: Iterable[int]) -> None:
        """Rebuilds a region's free list from the slots that the index names."""
        region = self.regions[number]
        used = set(occupied)
        region.fresh = max(used, default=-1) + 1
        region.recycled = [index for index in range(region.fresh - 1, -1, -1) if index not in used]
        region.occupied = len(used)

    def remove(self, number: int) -> None:
        """Gives the region's capacity back; its blocks are gone already."""
        region = self.regions.pop(number)
        row = self._rows[region.shape]
        del row[number]
        if not row:
            del self._rows[region.shape]
        self.used_bytes -= region.size_bytes

    def used(self, numbers: Iterable[int], tick: int) -> None:
        """Blocks in these regions were used at `tick`."""
        for number in numbers:
            region = self.regions.get(number)
            if region is not None:
                region.last_used = tick

    def oldest(self) -> Region | None:
        """The region that has gone unused for longest."""
        return min(self.regions.values(), key=lambda region: region.last_used, default=None)

    def oldest_other(self, shape: BlockShape) -> Region | None:
        """The region of another model that has gone unused for longest."""
        rows = [row for of, row in self._rows.items() if of != shape]
        others = [region for row in rows for region in row.values()]
        return min(others, key=lambda region: region.last_used, default=None)
