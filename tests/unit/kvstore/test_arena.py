"""The memory of the DRAM tier: as it is used, or all of it at the start."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from kvcommons.errors import InvalidInput
from services.kvstore.arena import Arena
from services.kvstore.tier import BlockShape, Slot
from tests.unit.kvstore.samples import MIB, SHAPE, block_ids, open_store, put_blocks, read_blocks


def resident_pages(view: memoryview) -> tuple[int, int]:
    """Pages that the system has given, of all."""
    pages = -(-len(view) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(view)), found) == 0
    return sum(page & 1 for page in found), pages


@pytest.mark.skipif(sys.platform != "linux", reason="mincore as Linux has it")
def test_regions_have_their_memory_before_they_are_used_where_it_is_asked_for() -> None:
    shape = BlockShape(model=b"m" * 32, layers=1, object_bytes=64 << 10)
    arena = Arena()
    arena.touch(2, 4 * MIB)
    arena.create(1, shape, 128)  # larger than what was touched
    arena.create(2, shape, 64)
    arena.create(3, shape, 8)
    arena.create(4, shape, 64)  # one more
    given = {number: resident_pages(arena._memory[number][0]) for number in (1, 2, 3, 4)}
    assert given[1][0] < given[1][1]
    assert given[2] == given[3] == (4 * MIB // mmap.PAGESIZE, 4 * MIB // mmap.PAGESIZE)
    assert given[4][0] < given[4][1]
    for number, slots in ((1, 128), (2, 64), (3, 8), (4, 64)):
        last = Slot(number, slots - 1)
        arena.slot(last)[:] = bytes([number]) * shape.slot_bytes
        assert bytes(arena.object(last, 0)) == bytes([number]) * shape.object_bytes


def test_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="lower dram_bytes") as refused:
        open_store(tmp_path, dram_bytes=1 << 62, region_bytes_min=1 << 62, touch_memory=True)
    assert refused.value.param == "dram_bytes"


def test_a_store_whose_memory_is_touched_keeps_blocks_as_any_other(tmp_path: Path) -> None:
    store = open_store(tmp_path, dram_bytes=4 * MIB, touch_memory=True)
    ids = block_ids(100)
    assert put_blocks(store, ids) == []
    assert read_blocks(store, ids) == 100
    assert SHAPE.slot_bytes * 100 > MIB, "of several regions"
    store.close()
