"""Blocks in DRAM: anonymous mappings, huge pages advised, in the form in which objects travel.

A slot holds a block's objects layer by layer without gaps, padded to a page at its end, exactly as a slab
file's slot does. So a socket receives into it, a socket sends from it, and O_DIRECT reads and writes it: no
copy between.
"""

from __future__ import annotations

import mmap

from services.kvstore.tier import BlockShape, Slot


class Arena:
    """Memory of the DRAM tier's regions. Bounds are the tier's affair.

    Views stay valid as long as they are held.
    """

    def __init__(self) -> None:
        self._memory: dict[int, tuple[memoryview, int, int]] = {}  # and the bytes of a slot and of an object
        self._touched: list[memoryview] = []  # of regions to come

    def touch(self, regions: int, region_bytes: int) -> None:
        """Has the system give the memory of so many regions now. One that is larger, or comes after them, is
        given its memory as it is used. Raises OSError (out of memory)."""
        for _ in range(regions):
            area = _mapped(region_bytes)
            for offset in range(0, region_bytes, mmap.PAGESIZE):
                area[offset] = 0
            self._touched.append(area)

    def create(self, number: int, shape: BlockShape, slots: int) -> None:
        """Maps a region. Raises OSError (out of memory)."""
        size = slots * shape.slot_bytes
        is_touched = self._touched and size <= len(self._touched[-1])
        area = self._touched.pop() if is_touched else _mapped(size)
        self._memory[number] = (area, shape.slot_bytes, shape.object_bytes)

    def remove(self, number: int) -> None:
        """Forgets a region; its memory goes back to the system when the last view of it is gone."""
        del self._memory[number]

    def slot(self, slot: Slot) -> memoryview:
        """The whole slot, padding included: `slot_bytes`, page-aligned."""
        memory, slot_bytes, _ = self._memory[slot.region]
        return memory[slot.place * slot_bytes : (slot.place + 1) * slot_bytes]

    def object(self, slot: Slot, layer: int) -> memoryview:
        """One layer's object of the block in this slot: `object_bytes`."""
        memory, slot_bytes, object_bytes = self._memory[slot.region]
        start = slot.place * slot_bytes + layer * object_bytes
        return memory[start : start + object_bytes]

    def objects(self, slot: Slot, layers: range) -> memoryview:
        """The objects of consecutive layers, one after another."""
        memory, slot_bytes, object_bytes = self._memory[slot.region]
        start = slot.place * slot_bytes
        return memory[start + layers.start * object_bytes : start + layers.stop * object_bytes]


def _mapped(size: int) -> memoryview:
    # Private: shared anonymous memory, mmap's default, gets huge pages on few systems.
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)
