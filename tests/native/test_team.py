"""Threads of the kernel that compute together: where they are, when they sleep, and that they end."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from kvcommons.attention.native import library

KERNEL = library.chosen()
pytestmark = pytest.mark.skipif(KERNEL is None, reason="the kernel is not compiled here")
TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
MEMORY = torch.ones(16 << 20, dtype=torch.uint8)


def followers() -> set[int]:
    """The threads of this process that follow one that computes."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "kvc-team":
                found.add(int(task.name))
        except OSError:
            continue
    return found


def ran_s(thread: int) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def taken(thread: int) -> int:
    """How often others had its core although it went on."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    (count,) = (line.split()[1] for line in lines if line.startswith("nonvoluntary_ctxt_switches"))
    return int(count)


class Leader:
    """A thread of its own that computes with others, on the first two cores. They end with it."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int) -> None:
        self._pool = pool
        before = followers()
        self.cores = set(sorted(os.sched_getaffinity(0))[:2])
        self.call(lambda: os.sched_setaffinity(0, self.cores))
        self.call(lambda: torch.set_num_threads(threads))
        self.compute()
        self.followers = followers() - before
        assert len(self.followers) == threads - 1

    def call(self, what: Callable[[], object]) -> None:
        self._pool.submit(what).result()

    def compute(self) -> None:
        assert KERNEL is not None
        self._pool.submit(KERNEL.read, MEMORY).result()

    def sleep_and_compute(self) -> None:
        """After a pause in which all of them have fallen asleep."""
        time.sleep(0.01)
        self.compute()
        time.sleep(0.01)  # who has come too late to compute has woken by now, too


@pytest.fixture
def leader(request: pytest.FixtureRequest) -> Iterator[Leader]:
    with ThreadPoolExecutor(1) as pool:
        leader, before = Leader(pool, getattr(request, "param", 2)), torch.get_num_threads()
        yield leader
        leader.call(lambda: torch.set_num_threads(before))


def test_threads_end_with_the_one_that_they_follow() -> None:
    with ThreadPoolExecutor(1) as pool:
        those = Leader(pool, 2).followers
        assert those <= followers()
    until_s = time.monotonic() + 10
    while those & followers():  # the thread ends a moment after Python has done with it
        assert time.monotonic() < until_s
        time.sleep(0.01)


@TWO_CORES
def test_each_of_a_team_for_all_cores_is_put_on_one(leader: Leader) -> None:
    (follower,) = leader.followers
    os.sched_setaffinity(follower, leader.cores)
    until_s = time.monotonic() + 10
    while os.sched_getaffinity(follower) == leader.cores:
        assert time.monotonic() < until_s
        leader.sleep_and_compute()
    (core,) = os.sched_getaffinity(follower)
    assert core in leader.cores


@TWO_CORES
@pytest.mark.parametrize("leader", [3], indirect=True)
def test_a_team_that_has_more_threads_than_cores_goes_where_others_say(leader: Leader) -> None:
    leader.sleep_and_compute()
    for follower in leader.followers:
        assert os.sched_getaffinity(follower) == leader.cores


def test_threads_wait_awake_for_as_long_as_was_said(leader: Leader) -> None:
    """Unless others take the core meanwhile, as tests that run beside this one do."""
    assert KERNEL is not None
    (follower,) = leader.followers

    def waited() -> tuple[float, int]:
        """For so many seconds, in which others took the core so often."""
        before = taken(follower)
        leader.compute()
        before_s = ran_s(follower)
        time.sleep(0.05)
        return ran_s(follower) - before_s, taken(follower) - before

    leader.call(partial(KERNEL.keep_awake, 0.04))
    until_s = time.monotonic() + 30
    while True:
        seconds, times = waited()
        if seconds > 0.002 or times:
            break
        assert time.monotonic() < until_s
        time.sleep(1.1)  # by then a core that others wanted counts as free again
    leader.call(partial(KERNEL.keep_awake, 0.0))
    waited()
    assert waited()[0] < 0.002


def test_a_process_that_was_forked_computes_by_itself(leader: Leader) -> None:
    """It has the thread that called alone: nobody that it waits for."""

    def forked() -> None:
        assert KERNEL is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads
            child = os.fork()
        if child == 0:
            KERNEL.read(MEMORY)
            os._exit(7)
        until_s = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < until_s, os.kill(child, 9)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 7

    leader.call(forked)
