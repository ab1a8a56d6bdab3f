"""The request queue: order, bounds, deadlines."""

from __future__ import annotations

import random

import pytest

from kvcommons.errors import Overloaded
from services.router.admission.queue import QueuedRequest, RequestQueue


def submit(
    queue: RequestQueue, now_s: float = 0.0, cost: int = 1, deadline_s: float = 100.0
) -> QueuedRequest:
    return queue.submit(cost=cost, now_s=now_s, deadline_s=deadline_s)


def test_first_come_first_served_and_bounded() -> None:
    queue = RequestQueue(max_running=2, max_waiting=2)
    running = [submit(queue), submit(queue)]
    waiting = [submit(queue), submit(queue)]
    assert [request.started_s for request in (*running, *waiting)] == [0.0, 0.0, None, None]
    with pytest.raises(Overloaded) as full:
        submit(queue)
    assert full.value.retry_after_ms >= 1000
    queue.leave(running[1], 5.0)
    assert queue.advance(5.0) == ([waiting[0]], [])
    queue.leave(waiting[1], 6.0)
    queue.leave(running[0], 6.0)
    assert queue.advance(6.0) == ([], [])
    assert (queue.running, queue.waiting) == (1, 0)


def test_a_large_request_is_not_overtaken() -> None:
    queue = RequestQueue(max_running=4, max_waiting=10)
    small = submit(queue, cost=2)
    large = submit(queue, cost=4)
    late = submit(queue, cost=1)
    assert (large.started_s, late.started_s) == (None, None)
    queue.leave(small, 1.0)
    assert queue.advance(1.0)[0] == [large]


def test_a_request_larger_than_the_limit_runs_alone() -> None:
    queue = RequestQueue(max_running=2, max_waiting=2)
    assert submit(queue, cost=9).started_s == 0.0
    assert queue.running == 2


def test_requests_expire_where_they_wait() -> None:
    queue = RequestQueue(max_running=1, max_waiting=5)
    submit(queue)
    early = submit(queue, deadline_s=3.0)
    later = submit(queue, deadline_s=9.0)
    assert queue.advance(3.0) == ([], [early])
    assert queue.waiting == later.cost


def test_the_counts_hold_under_any_order() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        queue = RequestQueue(max_running=5, max_waiting=8)
        alive: list[QueuedRequest] = []
        for now_s in range(300):
            if rng.random() < 0.6:
                try:
                    alive.append(
                        submit(
                            queue, float(now_s), cost=rng.randint(1, 6), deadline_s=now_s + rng.randint(1, 9)
                        )
                    )
                except Overloaded:
                    assert queue.waiting > 2, seed
            if alive and rng.random() < 0.5:
                queue.leave(alive.pop(rng.randrange(len(alive))), float(now_s))
            _, expired = queue.advance(float(now_s))
            alive = [request for request in alive if request not in expired]
            assert queue.running <= 5, seed
            assert queue.waiting <= 8, seed
        for request in alive:
            queue.leave(request, 300.0)
        assert (queue.running, queue.waiting) == (0, 0), seed
