"""What goes bad on disk is found before somebody asks for it, at a bounded rate."""

from __future__ import annotations

from pathlib import Path

from services.kvstore.blocks import BlockStore
from services.kvstore.tier import PAGE_BYTES
from tests.unit.kvstore.samples import SHAPE, block_ids, open_store, put_blocks, read_blocks, wait_durable
from tests.waiting import wait_until

IDS = block_ids(12)


def stored(folder: Path) -> None:
    store = open_store(folder, scrub_bytes_per_s=0)
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == len(IDS)
    assert store.stats().counters.scrubbed_bytes == 0
    store.close()


def test_a_flipped_bit_is_found_though_nobody_reads_the_block(tmp_path: Path) -> None:
    stored(tmp_path)
    with (tmp_path / "slabs" / "slab-00000001").open("r+b") as file:
        file.seek(PAGE_BYTES + 5 * SHAPE.slot_bytes + 77)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 8]))
    store = open_store(tmp_path, scrub_bytes_per_s=1 << 30)
    wait_until(lambda: store.stats().counters.scrubbed_bytes == len(IDS) * SHAPE.slot_bytes)
    assert store.stats().counters.corrupt == 1
    wait_until(lambda: store.stats().disk_blocks == len(IDS) - 1)
    store.close()
    again = open_store(tmp_path, scrub_bytes_per_s=1 << 30)
    wait_until(lambda: again.stats().counters.scrubbed_bytes == (len(IDS) - 1) * SHAPE.slot_bytes)
    assert again.stats().counters.corrupt == 0
    again.close()


def spoil(folder: Path, store: BlockStore, number: int) -> None:
    """Flips a bit of a block's copy on disk."""
    block = store._catalog.find(SHAPE.model, IDS[number])
    assert block is not None
    assert block.disk is not None
    with (folder / "slabs" / f"slab-{block.disk.region:08d}").open("r+b") as file:
        place = PAGE_BYTES + block.disk.place * SHAPE.slot_bytes + 77
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 8]))


def whole_pass(store: BlockStore) -> None:
    store.scrub._next_pass_s = 0.0
    for _ in range(2 * len(IDS)):
        store.scrub.step()


def test_what_memory_has_is_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, scrub_bytes_per_s=0)
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == len(IDS)
    spoil(tmp_path, store, 5)
    store.scrub._bytes_per_s = 1 << 30
    whole_pass(store)
    assert store.stats().counters.corrupt == 1
    assert wait_durable(store, IDS) == len(IDS)
    assert read_blocks(store, IDS) == len(IDS)
    whole_pass(store)
    assert store.stats().counters.corrupt == 1  # it is good now
    wait_until(lambda: store.stats().disk_blocks == len(IDS))  # and the bad slot is free
    store.close()
    again = open_store(tmp_path, scrub_bytes_per_s=0)
    assert read_blocks(again, IDS) == len(IDS)
    again.close()


def test_what_is_bad_in_memory_too_is_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path, scrub_bytes_per_s=0)
    put_blocks(store, IDS)
    assert wait_durable(store, IDS) == len(IDS)
    spoil(tmp_path, store, 5)
    block = store._catalog.find(SHAPE.model, IDS[5])
    assert block is not None
    assert block.dram is not None
    store.arena.slot(block.dram)[100] ^= 1
    store.scrub._bytes_per_s = 1 << 30
    whole_pass(store)
    assert store.stats().counters.corrupt == 1
    assert len(store.match(SHAPE.model, IDS)) == 5
    assert read_blocks(store, IDS) == 5
    store.close()


def test_the_rate_is_kept_and_a_pass_is_not_repeated_at_once(tmp_path: Path) -> None:
    stored(tmp_path)
    store = open_store(tmp_path, scrub_bytes_per_s=0)
    store.scrub._bytes_per_s = 10 * SHAPE.slot_bytes
    assert [store.scrub.step() for _ in IDS] == [0.1] * len(IDS)
    assert store.scrub.step() > 1
    assert store.stats().counters.scrubbed_bytes == len(IDS) * SHAPE.slot_bytes
    store.close()
