from __future__ import annotations

import pytest

from benchmarks.replay.hierarchy import Capacity, Hierarchy, Served
from tests.unit.kvstore_policies.driving import maker


def two_tiers(dram: int, disk: int, *, policy: str = "attention-store", buffer: int = 0) -> Hierarchy[int]:
    capacity = Capacity(dram_blocks=dram, disk_blocks=disk, buffer_blocks=buffer)
    return Hierarchy(capacity, maker(policy), fetches=True)


def test_only_a_run_from_the_first_block_is_a_hit() -> None:
    store = two_tiers(3, 0, policy="lru")
    store.serve(0, [1, 2, 3], 0.0)
    store.serve(1, [9], 1.0)  # pushes out the deepest
    assert store.serve(2, [1, 2, 3], 2.0) == Served(dram=2, disk=0)
    assert store.serve(3, [4, 2, 3], 3.0) == Served(dram=0, disk=0)


def test_what_dram_gives_up_is_found_on_disk_and_loaded() -> None:
    store = two_tiers(2, 4)
    store.serve(0, [1, 2], 0.0)
    store.serve(1, [3, 4], 1.0)
    assert store.moves.demoted == 2
    assert store.serve(2, [1, 2], 2.0) == Served(dram=0, disk=2)
    assert store.moves.loaded == 2


@pytest.mark.parametrize("policy", ["scheduler-aware", "attention-store"])
def test_the_head_of_the_queue_is_fetched_ahead(policy: str) -> None:
    store = two_tiers(4, 8, policy=policy)
    for job in range(3):
        store.serve(job, [10 * job, 10 * job + 1], float(job))
    store.expect(4, [50, 51])
    store.expect(5, [0, 1])
    store.serve(4, [50, 51], 4.0)
    assert store.moves.fetched == 2
    assert store.serve(5, [0, 1], 5.0) == Served(dram=2, disk=0)


def test_the_windows_follow_the_mean_size_of_a_session() -> None:
    """§3.3: L_pw = C_mem / S_kv and L_ev = (C_mem + C_disk) / S_kv."""
    store = two_tiers(10, 30)
    store.serve(0, [1, 2, 3], 0.0)
    store.serve(1, [4, 5, 6, 7, 8], 1.0)
    assert store.windows.session_size == 4
    assert store.windows.fetch == 2
    assert store.windows.eviction == 10


def test_a_buffer_of_dram_stays_free() -> None:
    store = two_tiers(8, 8, buffer=3)
    for job in range(6):
        store.serve(job, [10 * job, 10 * job + 1], float(job))
        assert store.dram_used <= 5


def test_unused_blocks_go_after_their_time_to_live() -> None:
    capacity = Capacity(dram_blocks=2, disk_blocks=4)
    store: Hierarchy[int] = Hierarchy(capacity, maker("lru"), fetches=False, ttl_s=60.0)
    store.serve(0, [1, 2], 0.0)
    store.serve(1, [3, 4], 30.0)
    assert store.serve(2, [1, 2], 59.0) == Served(dram=0, disk=2)
    assert store.serve(3, [3, 4], 90.0) == Served(dram=0, disk=0)
    assert store.moves.expired == 2
    assert store.serve(4, [1, 2], 118.0) == Served(dram=0, disk=2)


def test_a_pinned_block_stays_where_it_is() -> None:
    pinned = {1, 2}
    store: Hierarchy[int] = Hierarchy(
        Capacity(dram_blocks=2, disk_blocks=0),
        maker("lru"),
        fetches=False,
        ttl_s=5.0,
        pinned=pinned.__contains__,
    )
    store.serve(0, [1, 2], 0.0)
    store.serve(1, [3, 4], 100.0)
    assert store.dram_used == 2
    assert store.serve(2, [1, 2], 200.0) == Served(dram=2, disk=0)


def test_a_job_that_left_the_queue_is_not_fetched_for() -> None:
    store = two_tiers(2, 8)
    store.serve(0, [1, 2], 0.0)
    store.serve(1, [3, 4], 1.0)
    store.expect(7, [1, 2])
    store.forget(7)
    store.serve(2, [5, 6], 2.0)
    assert store.moves.fetched == 0
