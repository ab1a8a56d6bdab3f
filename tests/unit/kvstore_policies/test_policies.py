from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay.hierarchy import Capacity, Hierarchy
from benchmarks.replay.optimum import Belady
from kvcommons.errors import InvalidInput
from services.kvstore.policies.base import nothing_pinned
from services.kvstore.policies.catalogue import CATALOGUE, policy_entry
from services.kvstore.policies.hit_density import HitDensity
from services.kvstore.policies.look_ahead import LookAhead
from services.kvstore.policies.recency import Fifo, Lru, SegmentedLru
from tests.unit.kvstore_policies.driving import Run, maker, runs, serve_all


@pytest.mark.parametrize("name", CATALOGUE)
@given(jobs=runs, dram=st.integers(1, 8), disk=st.integers(0, 12), look_ahead=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_capacity_is_never_exceeded(
    name: str, jobs: list[Run], dram: int, disk: int, look_ahead: int
) -> None:
    chosen = CATALOGUE[name]
    capacity = Capacity(dram_blocks=dram, disk_blocks=disk, buffer_blocks=dram // 4)
    hierarchy: Hierarchy[int] = Hierarchy(
        capacity, maker(name), fetches=chosen.looks_ahead, paper_window=chosen.paper_window
    )
    serve_all(hierarchy, jobs, look_ahead if chosen.looks_ahead else None, capacity)


@pytest.mark.parametrize("name", CATALOGUE)
@given(jobs=runs, blocks=st.integers(1, 10))
@settings(max_examples=25, deadline=None)
def test_nothing_beats_the_optimum(name: str, jobs: list[Run], blocks: int) -> None:
    uses: dict[int, list[int]] = {}
    for number, run in enumerate(jobs):
        for block in run:
            uses.setdefault(block, []).append(number)
    capacity = Capacity(dram_blocks=blocks)
    best: Hierarchy[int] = Hierarchy(capacity, lambda: Belady(uses, deepest_first=True), fetches=False)
    other: Hierarchy[int] = Hierarchy(capacity, maker(name), fetches=False)
    ahead = 4 if CATALOGUE[name].looks_ahead else None
    assert serve_all(other, jobs, ahead, capacity) <= serve_all(best, jobs, None, capacity)


@pytest.mark.parametrize("name", CATALOGUE)
@given(jobs=runs, pinned=st.sets(st.integers(0, 30)), look_ahead=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_pinned_block_is_never_the_victim_and_all_others_are(
    name: str, jobs: list[Run], pinned: set[int], look_ahead: bool
) -> None:
    policy = maker(name)()
    held = {block for run in jobs for block in run}
    for number, run in enumerate(jobs):
        for block in run:
            if all(block not in earlier for earlier in jobs[:number]):
                policy.admit(block)
        policy.use(number, run, 0)
    if look_ahead:
        policy.expect(len(jobs), jobs[0])
    # A block that a pinned one continues may have to stay with it.
    kept = {b for run in jobs for d, b in enumerate(run) if any(deeper in pinned for deeper in run[d:])}
    gone: set[int] = set()
    while (block := policy.victim(pinned.__contains__)) is not None:
        assert block in held - pinned - gone
        gone.add(block)
        policy.remove(block)
    assert held - kept <= gone


@given(jobs=runs, blocks=st.integers(1, 10), look_ahead=st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_what_the_scheduler_aware_policy_keeps_is_closed_under_prefixes(
    jobs: list[Run], blocks: int, look_ahead: int
) -> None:
    policy: HitDensity[int] = HitDensity()
    held: set[int] = set()
    parents = {block: run[depth - 1] for run in jobs for depth, block in enumerate(run) if depth}
    for number, run in enumerate(jobs):
        if number + look_ahead < len(jobs) and look_ahead:
            policy.expect(number + look_ahead, jobs[number + look_ahead])
        for block in run:
            if block not in held:
                held.add(block)
                policy.admit(block)
        policy.use(number, run, 0)
        while len(held) > blocks:
            block = policy.victim(nothing_pinned)
            assert block is not None
            held.discard(block)
            policy.remove(block)
        assert all(parents[block] in held for block in held if block in parents)


def test_of_a_run_that_was_used_together_the_deepest_goes_first() -> None:
    policy: Lru[int] = Lru()
    for block in (1, 2, 3, 4):
        policy.admit(block)
    policy.use(0, [1, 2, 3], 3)
    assert _order(policy) == [4, 3, 2, 1]


def test_fifo_does_not_look_at_uses() -> None:
    policy: Fifo[int] = Fifo()
    for block in (1, 2, 3):
        policy.admit(block)
    policy.use(0, [1], 1)
    assert _order(policy) == [1, 2, 3]


def test_a_second_use_protects() -> None:
    policy: SegmentedLru[int] = SegmentedLru()
    for block in (1, 2, 3):
        policy.admit(block)
    policy.use(0, [1, 2, 3], 1)
    assert _order(policy)[-1] == 1


@pytest.mark.parametrize("name", ["scheduler-aware", "attention-store"])
def test_the_queue_exempts_and_of_the_exempt_its_tail_goes_first(name: str) -> None:
    """AttentionStore's figure 9: what no job wants goes first, then what the last job wants."""
    policy = maker(name)()
    for session in (10, 20, 30):
        for block in (session, session + 1):
            policy.admit(block)
        policy.use(session, [session, session + 1], 0)
    policy.expect(100, [20, 21])
    policy.expect(101, [10, 11])
    assert _order(policy) == [31, 30, 11, 10, 21, 20]


@pytest.mark.parametrize("name", ["scheduler-aware", "attention-store"])
def test_a_job_that_goes_away_exempts_nothing(name: str) -> None:
    policy = maker(name)()
    for block in (1, 2):
        policy.admit(block)
        policy.use(block, [block], 0)
    policy.expect(7, [1])
    policy.forget(7, [1])
    policy.expect(8, [2])
    assert _order(policy) == [1, 2]


def test_a_client_who_usually_comes_back_is_waited_for() -> None:
    """Sessions whose second turn comes after 100 others, in a stream of calls that never return."""
    hits = {}
    jobs: list[Run] = []
    for number in range(3000):
        jobs.append((1_000_000 + number,))
        if number % 4 == 0:
            jobs.append((number, number + 1))
        if number % 4 == 0 and number >= 400:
            jobs.append((number - 400, number - 399))
    for name in ("lru", "scheduler-aware"):
        capacity = Capacity(dram_blocks=300)
        hierarchy: Hierarchy[int] = Hierarchy(capacity, maker(name), fetches=False)
        hits[name] = serve_all(hierarchy, jobs, None, capacity)
    assert hits["lru"] == 0
    assert hits["scheduler-aware"] > 600


def test_exempt_blocks_come_back_to_the_policy_beneath() -> None:
    policy: LookAhead[int] = LookAhead(Lru())
    for block in (1, 2, 3):
        policy.admit(block)
    policy.expect(5, [1])
    assert policy.victim(nothing_pinned) == 2
    policy.use(5, [1], 1)
    assert _order(policy) == [2, 3, 1]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="scheduler-aware"):
        policy_entry("clairvoyant")


def _order(policy: object) -> list[int]:
    order = []
    while (block := policy.victim(nothing_pinned)) is not None:  # type: ignore[attr-defined]
        order.append(block)
        policy.remove(block)  # type: ignore[attr-defined]
    return order
