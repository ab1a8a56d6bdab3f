from __future__ import annotations

import itertools

import pytest

from kvcommons.engine.scheduler import Scheduler
from kvcommons.errors import Overloaded

CHUNK = 512


def make(*tokens: int, max_queue: int = 8, max_running: int = 4) -> Scheduler:
    """Jobs 0, 1, … of so many tokens, all admitted."""
    made = Scheduler(max_queue=max_queue, max_prompts=max_running)
    for job, length in enumerate(tokens):
        made.submit(job, tokens=length, deadline_s=100.0)
        made.admit(job, tokens_left=length)
    return made


def run(made: Scheduler, left: dict[int, int]) -> list[int]:
    """The order of chunks until all jobs are done."""
    order = []
    while spans := made.spans(lambda _: True, CHUNK):
        assert sum(tokens for _, tokens in spans) <= CHUNK
        for job, tokens in spans:
            order.append(job)
            left[job] -= tokens
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
    assert (made.computing, made.waiting) == (1, 2)


def test_the_queue_is_bounded() -> None:
    made = Scheduler(max_queue=1, max_prompts=1)
    made.submit(0, tokens=1, deadline_s=1.0)
    with pytest.raises(Overloaded, match="retry later"):
        made.submit(1, tokens=1, deadline_s=1.0)


def test_jobs_that_are_not_ready_are_passed_over() -> None:
    made = make(CHUNK, 9 * CHUNK)
    assert [made.spans(lambda job: job == 1, CHUNK) for _ in range(3)] == [[(1, CHUNK)]] * 3
    assert made.spans(lambda _: False, CHUNK) == []


def test_short_prompts_share_an_iteration() -> None:
    made = make(100, 9 * CHUNK, 60)
    assert made.spans(lambda _: True, CHUNK) == [(0, 100), (2, 60), (1, CHUNK - 160)]
    assert made.spans(lambda _: True, 80) == [(2, 60), (0, 20)], "the shortest one's turn"
    assert made.spans(lambda _: True, 0) == []


def test_deadlines_hold_for_waiting_and_running_jobs() -> None:
    made = make(5)
    made.submit(1, tokens=5, deadline_s=3.0)
    assert made.expired(2.9) == []
    assert made.expired(3.0) == [1]
    assert made.expired(100.0) == [0, 1]
    made.remove(1)
    assert made.expired(3.0) == []
