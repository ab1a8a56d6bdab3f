"""Schemes of staggered pipelining, and who runs when."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from itertools import pairwise

import pytest

from benchmarks.slice_schedule import SliceSchedule, SliceStart, attend_s_wanted
from services.decode.staggering.pipelines import Fixed, Rotational, Scheme, Timing, period_s


def run(scheme: Scheme, timing: Timing, slices: int) -> tuple[list[SliceStart], dict[str, float], float]:
    """What started on the replicas, busy seconds of each device, and the period at the end; the pool computes
    attention of one batch after the other."""
    order, busy = SliceSchedule(scheme), defaultdict[str, float](float)
    events: list[tuple[float, int, str, int]] = []
    pool: deque[int] = deque()
    pool_free = True
    begun: list[SliceStart] = []
    done = [0] * scheme.batches
    half_s = now_s = 0.0

    def start(what: SliceStart | None) -> None:
        if what is not None:
            begun.append(what)
            busy[f"replica {what.replica}"] += timing.slice_s
            heapq.heappush(events, (now_s + timing.slice_s, len(begun), "slice", what.batch))

    for batch in range(scheme.batches):
        start(order.ask(batch))
    while min(done) < slices:
        now_s, _, kind, batch = heapq.heappop(events)
        if kind == "slice":
            start(order.ended(batch))
            pool.append(batch)
        else:
            pool_free = True
            done[batch] += 1
            if min(done) == max(done) == slices // 2:
                half_s = now_s
            start(order.ask(batch))
        if pool_free and pool:
            pool_free = False
            busy["pool"] += timing.attend_s
            heapq.heappush(events, (now_s + timing.attend_s, -len(begun), "attention", pool.popleft()))
    return begun, dict(busy), (now_s - half_s) / (slices - slices // 2)


@pytest.mark.parametrize("batches", [2, 3, 4, 9])
def test_rotation_leaves_no_bubbles_where_the_pool_has_the_right_size(batches: int) -> None:
    """Section 5.1.1: with t_a = t_m / (n - 1) every replica and the pool are busy all the time."""
    scheme = Rotational(batches)
    timing = Timing(slice_s=1.0, attend_s=attend_s_wanted(scheme, 1.0))
    begun, busy, period = run(scheme, timing, 60)
    assert period == pytest.approx(period_s(scheme, timing)) == pytest.approx(1 + 1 / (batches - 1))
    spent_s = 60 * period + 2 * timing.slice_s  # filling and draining
    assert all(seconds / spent_s > 0.94 for seconds in busy.values()), busy
    # Figure 8 (a): in the steady state a replica takes batch after batch in turn.
    for replica in range(scheme.replicas):
        taken = [start.batch for start in begun if start.replica == replica][batches:]
        assert all((a - b) % batches == 1 for a, b in pairwise(taken)), taken


@pytest.mark.parametrize("batches", [2, 3, 5])
def test_a_fixed_batch_leaves_its_replica_idle_while_it_attends(batches: int) -> None:
    scheme = Fixed(batches)
    timing = Timing(slice_s=1.0, attend_s=attend_s_wanted(scheme, 1.0))
    begun, busy, period = run(scheme, timing, 60)
    assert all(start.batch == start.replica for start in begun)
    assert period == pytest.approx(1 + timing.attend_s)
    assert busy["replica 0"] / (61 * period) == pytest.approx((batches - 1) / batches, abs=0.02)


def test_as_many_batches_as_replicas_make_more_of_them_under_rotation() -> None:
    """Of equal hardware, rotation gets n / (n - 1) as much done: it has no bubbles, fixed batches have."""
    timing = Timing(slice_s=1.0, attend_s=1 / 3)
    rotating, fixed = Rotational(4), Fixed(3)
    gain = (4 / period_s(rotating, timing)) / (3 / period_s(fixed, timing))
    assert gain == pytest.approx(4 / 3)


@pytest.mark.parametrize("scheme", [Fixed(1), Fixed(4), Rotational(2), Rotational(4)], ids=repr)
def test_the_period_is_what_the_schedule_takes(scheme: Scheme) -> None:
    """Over many proportions of slice and attention."""
    dice = random.Random(5)
    for _ in range(20):
        timing = Timing(slice_s=dice.uniform(0.2, 2), attend_s=dice.uniform(0.05, 2))
        _, _, period = run(scheme, timing, 400)
        assert period == pytest.approx(period_s(scheme, timing), rel=0.02), timing


def test_a_slice_goes_to_the_replica_that_the_paper_names() -> None:
    """The kth slice of the jth batch: replica (j + k) mod (n - 1), counted from 0 here."""
    scheme = Rotational(4)
    assert [[scheme.replica_of(j, k) for k in range(4)] for j in range(4)] == [
        [0, 1, 2, 0],
        [1, 2, 0, 1],
        [2, 0, 1, 2],
        [0, 1, 2, 0],
    ]
    assert {Rotational(2).replica_of(j, k) for j in range(2) for k in range(5)} == {0}


def test_a_batch_that_rests_is_not_waited_for() -> None:
    slices = SliceSchedule(Rotational(2))
    assert slices.ask(0) == SliceStart(0, 0)
    assert slices.ask(1) is None
    assert slices.ended(0) == SliceStart(1, 0)
    assert slices.ended(1) is None  # the first one does not ask: the second goes on alone
    assert slices.ask(1) == SliceStart(1, 0)
    assert slices.ended(1) is None
    assert slices.ask(0) == SliceStart(0, 0)
