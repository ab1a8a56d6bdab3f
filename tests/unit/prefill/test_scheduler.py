from __future__ import annotations

import itertools

import pytest

from kvcommons.errors import Overloaded
from services.prefill.scheduler import JobScheduler

CHUNK = 512


def make(*tokens: int, max_queue: int = 8, max_running: int = 4) -> JobScheduler:
    """Jobs 0, 1, … of so many tokens, all admitted."""
    made = JobScheduler(max_queue=max_queue, max_running=max_running)
    for job, length in enumerate(tokens):
        made.submit(job, tokens=length, deadline_s=100.0)
        made.admit(job, tokens_left=length)
    return made


def run(made: JobScheduler, left: dict[int, int]) -> list[int]:
    """The order of chunks until all jobs are done."""
    order = []
    while (job := made.next(lambda _: True)) is not None:
        order.append(job)
        left[job] -= CHUNK
        if left[job] <= 0:
            made.remove(job)
        else:
            made.progress(job, tokens_left=left[job])
    return order


def test_a_short_prompt_waits_for_two_chunks_at_most() -> None:
    left = {0: 20 * CHUNK, 1: 10 * CHUNK, 2: 10}
    order = run(make(*left.values()), left)
    assert order.index(2) <= 2


def test_the_oldest_job_gets_at_least_every_other_chunk() -> None:
    left = {0: 8 * CHUNK, 1: 4 * CHUNK, 2: 4 * CHUNK}
    order = run(make(*left.values()), left)
    until_done = order[: len(order) - order[::-1].index(0)]
    assert all(0 in pair for pair in itertools.pairwise(until_done))
    assert sorted(order) == [0] * 8 + [1] * 4 + [2] * 4


def test_admission_is_first_come_first_served_and_bounded() -> None:
    made = make(5, 5, max_running=2)
    made.submit(7, tokens=1, deadline_s=1.0)
    made.submit(8, tokens=1, deadline_s=1.0)
    assert made.admissible() == []
    made.remove(0)
    assert made.admissible() == [7, 8]
    assert (made.running, made.waiting) == (1, 2)


def test_the_queue_is_bounded() -> None:
    made = JobScheduler(max_queue=1, max_running=1)
    made.submit(0, tokens=1, deadline_s=1.0)
    with pytest.raises(Overloaded, match="retry later"):
        made.submit(1, tokens=1, deadline_s=1.0)


def test_jobs_that_are_not_ready_are_passed_over() -> None:
    made = make(CHUNK, 9 * CHUNK)
    assert [made.next(lambda job: job == 1) for _ in range(3)] == [1, 1, 1]
    assert made.next(lambda _: False) is None


def test_deadlines_hold_for_waiting_and_running_jobs() -> None:
    made = make(5)
    made.submit(1, tokens=5, deadline_s=3.0)
    assert made.expired(2.9) == []
    assert made.expired(3.0) == [1]
    assert made.expired(100.0) == [1, 0]
    made.remove(1)
    assert made.expired(3.0) == []
