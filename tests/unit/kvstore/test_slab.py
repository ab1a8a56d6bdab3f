from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from services.kvstore.disk import LocalDisk
from services.kvstore.folder import UnknownFormat
from services.kvstore.slab import SlabFiles
from services.kvstore.tier import PAGE_BYTES, Slot
from tests.unit.kvstore.samples import (
    OTHER,
    SHAPE,
    block_ids,
    open_store,
    put_blocks,
    read_blocks,
    wait_durable,
)


def buffer(pages: int, fill: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, pages * PAGE_BYTES))
    view[:] = bytes([fill]) * len(view)
    return view


def test_slots_side_by_side_are_written_and_read_at_once(tmp_path: Path) -> None:
    slabs = SlabFiles(LocalDisk(tmp_path))
    slabs.create(1, SHAPE, 8)
    pages = SHAPE.slot_bytes // PAGE_BYTES
    slabs.write(Slot(1, 2), [buffer(pages, 2), buffer(pages, 3)])
    slabs.sync(1)
    into = [buffer(pages, 0), buffer(pages, 0)]
    slabs.read(Slot(1, 2), 0, into)
    assert [bytes(view[:1]) + bytes(view[-1:]) for view in into] == [b"\x02\x02", b"\x03\x03"]
    part = buffer(1, 0)
    slabs.read(Slot(1, 3), PAGE_BYTES, [part])
    assert bytes(part) == b"\x03" * PAGE_BYTES
    slabs.close()


def test_what_was_made_is_found_again_and_stays_sparse(tmp_path: Path) -> None:
    slabs = SlabFiles(LocalDisk(tmp_path))
    slabs.create(1, SHAPE, 1000)
    slabs.create(2, OTHER, 3)
    slabs.close()
    assert (tmp_path / "slab-00000001").stat().st_blocks * 512 < 100_000
    assert SlabFiles(LocalDisk(tmp_path)).discover() == [(1, SHAPE, 1000), (2, OTHER, 3)]


def test_a_removed_slab_gives_its_file_back(tmp_path: Path) -> None:
    slabs = SlabFiles(LocalDisk(tmp_path))
    slabs.create(1, SHAPE, 8)
    slabs.remove(1)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_slab_is_dropped_and_another_versions_refused(tmp_path: Path) -> None:
    slabs = SlabFiles(LocalDisk(tmp_path))
    for number in (1, 2, 3):
        slabs.create(number, SHAPE, 8)
    slabs.close()
    with (tmp_path / "slab-00000001").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    with (tmp_path / "slab-00000002").open("r+b") as file:
        file.truncate(PAGE_BYTES)
    assert [number for number, _, _ in SlabFiles(LocalDisk(tmp_path)).discover()] == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["slab-00000003"]
    with (tmp_path / "slab-00000003").open("r+b") as file:
        file.seek(8)
        file.write(b"\x09")
    with pytest.raises(UnknownFormat, match="format 9"):
        SlabFiles(LocalDisk(tmp_path)).discover()
    assert (tmp_path / "slab-00000003").exists()


def test_a_file_system_without_direct_io_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    ids = block_ids(12)
    store = open_store(tmp_path)
    assert "refuses O_DIRECT" in caplog.text
    put_blocks(store, ids)
    assert wait_durable(store, ids) == 12
    store.close()
    again = open_store(tmp_path)
    assert read_blocks(again, ids) == 12
    again.close()


def test_reading_past_the_end_is_an_error(tmp_path: Path) -> None:
    slabs = SlabFiles(LocalDisk(tmp_path))
    slabs.create(1, SHAPE, 2)
    with pytest.raises(OSError, match="ends before"):
        slabs.read(Slot(1, 1), 0, [buffer(SHAPE.slot_bytes // PAGE_BYTES, 0), buffer(1, 0)])
    slabs.close()
