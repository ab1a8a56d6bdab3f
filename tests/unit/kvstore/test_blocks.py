"""The block store with real files: what goes in comes out, from DRAM, from disk, after a restart."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvcommons.errors import CapacityExhausted, InvalidInput
from services.kvstore.blocks import BlockStore
from services.kvstore.tier import BlockShape
from tests.unit.kvstore.samples import (
    MIB,
    OTHER,
    SHAPE,
    block_ids,
    layer_put,
    open_store,
    payload,
    put_blocks,
    put_layer,
    read_blocks,
    wait_durable,
)
from tests.waiting import wait_until

IDS = block_ids(12)


def test_a_block_is_readable_once_all_of_its_layers_have_come(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for layer in (2, 0):
        assert put_layer(store, layer_put(IDS, layer)) == []
        assert store.match(SHAPE.model, IDS) == []
        assert read_blocks(store, IDS) == 0
    put_layer(store, layer_put(IDS, 1))
    assert store.match(SHAPE.model, IDS) == [True] * len(IDS)
    assert read_blocks(store, IDS) == len(IDS)
    store.close()


def test_blocks_come_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_blocks(store, IDS)
    put_blocks(store, IDS, shape=OTHER)
    assert wait_durable(store, IDS) == len(IDS)
    assert wait_durable(store, IDS, OTHER) == len(IDS)
    store.close()
    again = open_store(tmp_path)
    assert again.match(SHAPE.model, IDS) == [False] * len(IDS)
    assert read_blocks(again, IDS) == len(IDS)
    assert read_blocks(again, IDS, OTHER) == len(IDS)
    assert again.match(SHAPE.model, IDS) == [True] * len(IDS)
    assert again.stats().counters.corrupt == 0
    again.close()


def test_only_a_leading_run_counts(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_blocks(store, [*IDS[:2], *IDS[3:]])
    assert len(store.match(SHAPE.model, IDS)) == 2
    assert read_blocks(store, IDS) == 2
    assert store.match(b"x" * 32, IDS) == []
    store.close()


def test_layers_of_two_writers_never_meet_in_a_block(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_layer(store, layer_put(IDS, 0, writer="a"))
    put_layer(store, layer_put(IDS, 1, writer="b"))
    put_layer(store, layer_put(IDS, 2, writer="b"))
    assert store.match(SHAPE.model, IDS) == []  # three layers came, but from two hands
    assert put_layer(store, layer_put(IDS, 0, writer="b")) == []
    assert read_blocks(store, IDS) == len(IDS)
    assert put_layer(store, layer_put(IDS, 1, writer="a")) == list(range(len(IDS)))  # too late
    wait_until(lambda: store.stats().staging == 0)
    store.close()


def test_layers_may_come_together(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert put_layer(store, layer_put(IDS, 1, count=2)) == []
    assert put_layer(store, layer_put(IDS, 1)) == []  # it is there: once is enough
    assert store.match(SHAPE.model, IDS) == []
    broken = store.begin_put(layer_put(IDS, 0))
    broken.break_off()
    assert put_layer(store, layer_put(IDS, 0)) == []
    assert read_blocks(store, IDS) == len(IDS)
    assert store.stats().counters.put_bytes == len(IDS) * SHAPE.block_bytes
    with pytest.raises(InvalidInput):
        layer_put(IDS, 1, count=3)
    store.close()


def test_a_writer_that_begins_a_block_anew_completes_it(tmp_path: Path) -> None:
    """A prompt that is given up between two layers and asked for again at once: its first layers are there,
    and one may be under way still."""
    store = open_store(tmp_path)
    put_layer(store, layer_put(IDS, 0))
    under_way = store.begin_put(layer_put(IDS, 1))
    for place in under_way.into:
        assert place is not None
        place[:] = b"?" * len(place)
    assert put_layer(store, layer_put(IDS, 0, count=2)) == []
    under_way.finish()
    assert store.match(SHAPE.model, IDS) == []
    assert put_layer(store, layer_put(IDS, 2)) == []
    assert read_blocks(store, IDS) == len(IDS)
    assert store.stats().staging == 0
    assert store.stats().dram_blocks == len(IDS)
    store.close()


def test_the_slower_of_two_writers_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    slow = store.begin_put(layer_put(IDS, 0, writer="slow"))
    put_blocks(store, IDS, writer="fast")
    for place in slow.into:
        assert place is not None
        place[:] = b"?" * len(place)
    assert slow.finish() == list(range(len(IDS)))
    assert read_blocks(store, IDS) == len(IDS)
    assert store.stats().dram_blocks == len(IDS)
    store.close()


def test_a_stored_block_is_not_wanted_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_blocks(store, IDS[:2])
    assert store.begin_put(layer_put(IDS[:3], 0, writer="b")).into[:2] == [None, None]
    store.close()


def test_layers_that_never_come_give_their_room_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, staging_s=0.05)
    put_layer(store, layer_put(IDS, 0))
    broken = store.begin_put(layer_put(IDS, 1))
    assert store.stats().staging == len(IDS)
    broken.break_off()
    wait_until(lambda: store.stats().staging == 0)
    stats = store.stats()
    assert (stats.dram_blocks, stats.counters.abandoned) == (0, len(IDS))
    assert put_blocks(store, IDS) == []
    assert read_blocks(store, IDS) == len(IDS)
    store.close()


def test_dram_gives_way_to_disk_and_disk_to_nothing(tmp_path: Path) -> None:
    disk_bytes = 128 * SHAPE.slot_bytes + 4096
    store = open_store(tmp_path, dram_bytes=MIB, disk_bytes=disk_bytes)
    ids = block_ids(400)
    for start in range(0, 400, 10):
        put_blocks(store, ids[start : start + 10])
        wait_durable(store, ids[start : start + 10])
    stats = store.stats()
    assert stats.dram_used_bytes <= MIB
    assert stats.disk_used_bytes <= disk_bytes
    assert stats.counters.evictions_dram > 0
    assert stats.counters.evictions_disk == 400 - stats.disk_blocks
    assert sum(f.stat().st_size for f in (tmp_path / "slabs").iterdir()) <= disk_bytes
    assert store.match(SHAPE.model, ids[:1]) == []
    assert read_blocks(store, ids[-20:]) == 20
    store.close()
    again = open_store(tmp_path, dram_bytes=MIB, disk_bytes=disk_bytes)
    assert again.stats().disk_blocks == stats.disk_blocks
    assert read_blocks(again, ids[-20:]) == 20
    again.close()


def test_a_model_that_is_used_takes_room_from_one_that_is_not(tmp_path: Path) -> None:
    store = open_store(tmp_path, dram_bytes=MIB, disk_bytes=2 * MIB)
    old, new = block_ids(120, "old"), block_ids(30, "new")
    for start in range(0, 120, 10):
        put_blocks(store, old[start : start + 10])
        wait_durable(store, old[start : start + 10])
    for start in range(0, 30, 5):
        assert put_blocks(store, new[start : start + 5], shape=OTHER) == []
        wait_durable(store, new[start : start + 5], OTHER)
    assert store.durable(OTHER.model, new[-20:]) == 20
    assert read_blocks(store, new[-10:], OTHER) == 10
    stats = store.stats()
    assert stats.dram_used_bytes <= MIB
    assert stats.disk_used_bytes <= 2 * MIB
    store.close()


def test_a_smaller_capacity_is_honoured_at_start(tmp_path: Path) -> None:
    ids = block_ids(3000)
    store = open_store(tmp_path, dram_bytes=64 * MIB, disk_bytes=128 * MIB)
    put_blocks(store, ids)
    assert wait_durable(store, ids) == 3000
    store.close()
    again = open_store(tmp_path, disk_bytes=20 * MIB)
    assert 0 < again.stats().disk_blocks < 3000
    assert sum(f.stat().st_size for f in (tmp_path / "slabs").iterdir()) <= 20 * MIB
    again.close()


def test_pinned_blocks_stay_while_others_come_and_go(tmp_path: Path) -> None:
    store = open_store(tmp_path, dram_bytes=MIB)
    put_blocks(store, IDS)
    wait_durable(store, IDS)
    with store.open_run(SHAPE.model, IDS) as run:
        _, _, views = run.layer(0, 1)
        for number in range(10):
            more = block_ids(20, f"more {number}")
            put_blocks(store, more)
            wait_durable(store, more)
        assert store.stats().counters.evictions_dram > 0
        assert [bytes(view) for view in views] == [payload(block_id, 0) for block_id in IDS]
    store.close()


def test_a_run_that_dram_cannot_hold_is_cut(tmp_path: Path) -> None:
    ids = block_ids(100)
    store = open_store(tmp_path, dram_bytes=MIB)
    for start in range(0, 100, 10):
        put_blocks(store, ids[start : start + 10])
        wait_durable(store, ids[start : start + 10])
    assert 0 < read_blocks(store, ids) <= MIB // SHAPE.slot_bytes
    store.close()


def test_many_readers_share_one_load(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_blocks(store, IDS)
    wait_durable(store, IDS)
    store.close()
    again = open_store(tmp_path)
    lengths: list[int] = []
    readers = [threading.Thread(target=lambda: lengths.append(read_blocks(again, IDS))) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    assert lengths == [len(IDS)] * 8
    assert again.stats().counters.disk_read_bytes == len(IDS) * SHAPE.slot_bytes
    again.close()


def test_condemning_removes_that_generation_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_blocks(store, IDS)
    wait_durable(store, IDS)
    with store.open_run(SHAPE.model, IDS) as run:
        _, generations, _ = run.layer(0, 1)
    assert not store.condemn(SHAPE.model, IDS[3], generations[2])
    assert store.condemn(SHAPE.model, IDS[3], generations[3])
    assert read_blocks(store, IDS) == 3
    wait_until(lambda: store.stats().disk_blocks == len(IDS) - 1)  # its slot is free again
    put_blocks(store, IDS[3:4])
    assert not store.condemn(SHAPE.model, IDS[3], generations[3])
    assert read_blocks(store, IDS) == len(IDS)
    wait_durable(store, IDS)
    store.close()
    again = open_store(tmp_path)
    assert read_blocks(again, IDS) == len(IDS)
    assert again.stats().disk_blocks == len(IDS)
    again.close()


def test_a_full_dram_refuses_and_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path, dram_bytes=MIB)
    slots = MIB // SHAPE.slot_bytes
    ids = block_ids(slots + 5)
    assert put_layer(store, layer_put(ids, 0)) == list(range(slots, slots + 5))
    assert store.stats().counters.refused == 5
    store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": range(3, 4)},
        {"layers": range(-1, 0)},
        {"layers": range(0), "checksums": []},
        {"layers": range(2, 4), "checksums": [1] * 2 * len(IDS)},
        {"checksums": [1]},
        {"block_ids": [], "checksums": []},
        {"writer": ""},
    ],
)
def test_a_put_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        replace(layer_put(IDS, 0), **changes)  # type: ignore[arg-type]


def test_a_model_has_one_shape_and_its_blocks_fit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_blocks(store, IDS[:1])
    other = BlockShape(model=SHAPE.model, layers=4, object_bytes=5000)
    with pytest.raises(InvalidInput, match="3 layers of 5000 bytes"):
        store.begin_put(layer_put(IDS, 0, shape=other))
    huge = BlockShape(model=b"h" * 32, layers=100, object_bytes=MIB)
    with pytest.raises(CapacityExhausted, match="dram_bytes"):
        store.begin_put(layer_put(IDS[:1], 0, shape=huge))
    with pytest.raises(InvalidInput, match="3 layers"):
        store.open_run(SHAPE.model, IDS, 0, 3)
    store.close()


def test_waiting_for_durability_ends_for_blocks_still_on_their_way(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    over = threading.Event()
    store.watch(SHAPE.model, IDS, over.set)
    assert not over.is_set()
    put_blocks(store, IDS)
    assert over.wait(10)
    assert store.durable(SHAPE.model, IDS) == len(IDS)
    store.close()


def test_closing_writes_what_is_pending(tmp_path: Path) -> None:
    ids = block_ids(200)
    store: BlockStore = open_store(tmp_path)
    put_blocks(store, ids)
    store.close()
    again = open_store(tmp_path)
    assert again.durable(SHAPE.model, ids) == 200
    again.close()
