"""Threads that compute together begin on cores of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcommons.backend.team import Team, parallel_address

pytestmark = pytest.mark.skipif(parallel_address() is None, reason="torch has another OpenMP here")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def worker() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Calls on one thread of its own, which has two threads to compute with; both end with it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_num_threads, 2).result()
        yield lambda call: pool.submit(call).result()


def kept_on() -> dict[int, int]:
    """By the id of each thread of this process that may use one core alone, that core.

    OpenMP ends the threads of a worker that has ended when it comes to it, so those of an earlier test may
    still be among them, and gone a moment later.
    """
    kept = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            cores = os.sched_getaffinity(thread)
        except ProcessLookupError:
            continue
        if len(cores) == 1:
            (kept[thread],) = cores
    return kept


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_each_of_a_team_for_all_cores_is_put_on_one(worker: Callable[[Callable[[], object]], object]) -> None:
    two, clock = set(sorted(os.sched_getaffinity(0))[:2]), Clock()
    team, before = Team(parallel_address(), cores=lambda: two, clock=clock), kept_on()

    def begun() -> set[int]:
        team.begin()
        return os.sched_getaffinity(0)

    assert worker(begun) == two, "whose thread it is may use all, as those that it starts"
    (core,) = (core for thread, core in kept_on().items() if thread not in before)
    assert core in two


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_one_that_has_just_computed_is_left_alone(worker: Callable[[Callable[[], object]], object]) -> None:
    asked, clock = [], Clock()

    def cores() -> set[int]:
        asked.append(threading.get_ident())
        return set(sorted(os.sched_getaffinity(0))[:2])

    team = Team(parallel_address(), cores=cores, clock=clock)
    for later_s, times in ((0.0, 1), (0.001, 1), (0.004, 1), (0.1, 2)):
        clock.now_s += later_s
        worker(team.begin)
        worker(team.end)
        assert len(asked) == times


@pytest.mark.parametrize("cores", [set(), {0}, {0, 1, 2}])
def test_a_team_that_does_not_fill_the_cores_goes_where_others_say(
    cores: set[int], worker: Callable[[Callable[[], object]], object]
) -> None:
    before = kept_on()
    worker(Team(parallel_address(), cores=lambda: cores).begin)
    assert kept_on().keys() <= before.keys()


def test_without_openmp_nothing_is_placed() -> None:
    def unasked() -> set[int]:
        raise AssertionError

    Team(None, cores=unasked).begin()
