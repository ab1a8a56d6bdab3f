"""Hints of several routers: merged, bounded, forgotten in time; what they do to eviction and to disk."""

from __future__ import annotations

from pathlib import Path

from services.kvstore.expected import ExpectedUse
from services.kvstore.hints import TTL_S_MAX, Hints
from tests.unit.kvstore.samples import (
    MIB,
    SHAPE,
    block_ids,
    open_store,
    put_blocks,
    read_blocks,
    wait_durable,
)
from tests.waiting import wait_until

A, B, C, D = block_ids(4)
MODEL = SHAPE.model


def use(at_s: float, *ids: bytes, model: bytes = MODEL) -> ExpectedUse:
    return ExpectedUse(model=model, block_ids=ids, at_s=at_s)


def hints(dram: int = 3, disk: int = 1, blocks_max: int = 100) -> Hints:
    """Blocks take 10 bytes each; `dram` and `disk` are in blocks."""
    return Hints(
        lambda model: 10 if model == MODEL else 0,
        dram_bytes=10 * dram,
        disk_bytes=10 * disk,
        blocks_max=blocks_max,
    )


def test_hints_of_several_routers_are_merged_by_expected_start() -> None:
    all_hints = hints()
    assert all_hints.put("r1", [use(5.0, A), use(9.0, B)], now_s=0.0, ttl_s=5.0) == 2
    assert all_hints.put("r2", [use(7.0, C)], now_s=0.0, ttl_s=5.0) == 1
    assert [one.at_s for one in all_hints.upcoming()] == [5.0, 7.0, 9.0]
    assert all_hints.window() == {MODEL: {A: 0, C: 1, B: 2}}


def test_a_newer_hint_replaces_the_routers_older_one_and_an_old_one_runs_out() -> None:
    all_hints = hints()
    all_hints.put("r1", [use(5.0, A)], now_s=0.0, ttl_s=5.0)
    all_hints.put("r2", [use(6.0, B)], now_s=3.0, ttl_s=5.0)
    all_hints.put("r1", [use(5.0, C)], now_s=3.0, ttl_s=1.0)
    assert all_hints.window() == {MODEL: {C: 0, B: 1}}
    all_hints.expire(4.0)
    assert all_hints.window() == {MODEL: {B: 0}}
    all_hints.put("r2", [], now_s=4.0, ttl_s=5.0)
    assert (len(all_hints), all_hints.window()) == (0, {})


def test_the_windows_are_what_has_room() -> None:
    """DRAM for three blocks, and a fourth on disk; a block that two jobs use counts once. Then the paper's
    lengths: C_mem / S_kv and (C_mem + C_disk) / S_kv."""
    all_hints = hints(dram=3, disk=1)
    e = b"e" * 32
    all_hints.put("r", [use(1.0, A, B), use(2.0, A, C), use(3.0, A, D), use(4.0, e)], now_s=0.0, ttl_s=5.0)
    assert all_hints.window() == {MODEL: {A: 0, B: 1, C: 2}}
    assert all_hints.windows.eviction == 40
    all_hints.served(20)  # two blocks: S_kv
    assert (all_hints.windows.fetch, all_hints.windows.eviction) == (1, 2)
    assert all_hints.window() == {MODEL: {A: 0, B: 1}}


def test_what_is_remembered_is_bounded() -> None:
    all_hints = hints(blocks_max=3)
    assert all_hints.put("r", [use(1.0, A, B), use(2.0, C, D)], now_s=0.0, ttl_s=1e9) == 1
    assert all_hints.window() == {MODEL: {A: 0, B: 1}}
    all_hints.expire(TTL_S_MAX)
    assert len(all_hints) == 0
    all_hints = hints(blocks_max=64)  # for all of them together
    accepted = [all_hints.put(f"r{n}", [use(1.0, A)], now_s=0.0, ttl_s=1.0) for n in range(100)]
    assert sum(accepted) == len(all_hints) == 64


def test_models_that_are_not_stored_take_no_room() -> None:
    all_hints = hints(dram=1)
    all_hints.put("r", [use(1.0, A, model=b"x" * 32), use(2.0, B)], now_s=0.0, ttl_s=1.0)
    assert all_hints.window() == {MODEL: {B: 0}}


def fill(folder: Path, waves: int) -> tuple[list[bytes], list[list[bytes]]]:
    """A closed store's folder with 12 blocks, then `waves` of 10 more blocks, all durable."""
    store = open_store(folder, dram_bytes=MIB)
    first, others = block_ids(12), [block_ids(10, f"wave {number}") for number in range(waves)]
    for ids in (first, *others):
        put_blocks(store, ids)
        assert wait_durable(store, ids) == len(ids)
    store.close()
    return first, others


def test_hinted_blocks_come_to_dram_before_anyone_asks(tmp_path: Path) -> None:
    ids, _ = fill(tmp_path, 0)
    store = open_store(tmp_path, dram_bytes=MIB)
    assert store.match(MODEL, ids, peek=True) == [False] * len(ids)
    assert store.prefetcher.hint("r", [(MODEL, [*ids, b"?" * 32], 1.0)], 30.0) == 1
    wait_until(lambda: store.match(MODEL, ids, peek=True) == [True] * len(ids))
    assert store.stats().counters.prefetched == len(ids)
    assert (store.stats().counters.hits_dram, store.stats().counters.hits_disk) == (0, 0)
    assert store.match(MODEL, ids) == [True] * len(ids)
    assert read_blocks(store, ids) == len(ids)
    store.close()


def test_the_history_of_a_turn_that_has_begun_comes_to_dram(tmp_path: Path) -> None:
    """As far as it is stored; two turns, one behind the other."""
    ids, waves = fill(tmp_path, 2)
    store = open_store(tmp_path, dram_bytes=MIB)
    store.prefetcher.begin(MODEL, [*ids, b"?" * 32, *waves[1]])
    store.prefetcher.begin(b"another model".ljust(32), ids)
    store.prefetcher.begin(MODEL, waves[0])
    wait_until(lambda: store.match(MODEL, [*ids], peek=True) == [True] * len(ids))
    wait_until(lambda: all(store.match(MODEL, waves[0], peek=True)))
    assert store.match(MODEL, waves[1], peek=True) == [False] * 10
    assert store.stats().counters.prefetched == len(ids) + 10
    store.prefetcher.begin(MODEL, ids)
    assert read_blocks(store, ids) == len(ids)
    assert store.stats().counters.prefetched == len(ids) + 10, "it is there"
    store.close()


def test_of_a_history_that_dram_does_not_hold_the_beginning_comes(tmp_path: Path) -> None:
    """None of it drives another part of it out, nor what a router's queue will use."""
    store = open_store(tmp_path, dram_bytes=MIB)
    ids, waiting = block_ids(100), block_ids(10, "waiting")
    for first in range(0, 100, 10):
        put_blocks(store, ids[first : first + 10])
        assert wait_durable(store, ids[: first + 10]) == first + 10
    put_blocks(store, waiting)
    assert wait_durable(store, waiting) == 10
    store.close()
    store = open_store(tmp_path, dram_bytes=MIB)
    capacity = MIB // SHAPE.slot_bytes
    store.prefetcher.hint("r", [(MODEL, waiting, 1.0)], 30.0)
    wait_until(lambda: all(store.match(MODEL, waiting, peek=True)))
    store.prefetcher.begin(MODEL, ids)
    kept = store._catalog.kept_blocks(MODEL, len(ids))
    assert capacity // 2 < kept < capacity
    wait_until(lambda: sum(store.match(MODEL, ids, peek=True)) >= kept - 10)
    assert read_blocks(store, ids[:kept]) == kept
    assert store.match(MODEL, waiting, peek=True) == [True] * 10
    assert store.stats().counters.prefetched <= kept + 10
    store.close()


def test_hinted_blocks_stay_while_others_come_and_go(tmp_path: Path) -> None:
    """DRAM has room for about 60 blocks; 200 others pass through it, and only without the hint do they push
    the hinted ones out."""
    for hinted in (True, False):
        folder = tmp_path / str(hinted)
        folder.mkdir()
        store = open_store(folder, dram_bytes=MIB)
        ids = block_ids(12)
        put_blocks(store, ids)
        assert wait_durable(store, ids) == len(ids)
        if hinted:
            store.prefetcher.hint("r", [(MODEL, ids, 1.0)], 30.0)
        for number in range(20):
            wave = block_ids(10, f"wave {number}")
            put_blocks(store, wave)
            assert wait_durable(store, wave) == len(wave)
        assert store.match(MODEL, ids, peek=True) == [hinted] * len(ids)
        store.close()


def test_more_hints_than_dram_holds_do_not_chase_each_other_out(tmp_path: Path) -> None:
    """What is needed first is fetched as far as there is room, once; the rest stays on disk, and saves still
    find room."""
    ids, waves = fill(tmp_path, 12)
    store = open_store(tmp_path, dram_bytes=MIB)
    uses = [(MODEL, wave, float(number)) for number, wave in enumerate(waves)]
    store.prefetcher.hint("r", uses, 30.0)
    wait_until(lambda: all(store.match(MODEL, waves[3], peek=True)))
    capacity = store.stats().dram_capacity_blocks
    wait_until(lambda: store.stats().counters.prefetched >= capacity - 10)
    store.prefetcher.hint("r", uses, 30.0)
    assert store.stats().counters.prefetched <= capacity
    assert put_blocks(store, block_ids(5, "new")) == []
    assert store.match(MODEL, waves[0], peek=True) == [True] * 10
    assert store.match(MODEL, ids, peek=True) == [False] * len(ids)
    store.close()
