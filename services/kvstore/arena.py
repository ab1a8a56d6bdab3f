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

    def create(self, number: int, shape: BlockShape, slots: int) -> None:
        """Maps a region. Raises OSError (out of memory)."""
        # Private: shared anonymous memory, mmap's default, gets huge pages on few systems.
        area = mmap.mmap(-1, slots * shape.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        self._memory[number] = (memoryview(area), shape.slot_bytes, shape.object_bytes)

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
