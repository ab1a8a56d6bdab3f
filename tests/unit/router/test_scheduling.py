"""The order in which requests start, by policy; what each promises about waiting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcommons.errors import InvalidInput
from services.router.admission.queue import Prefix, QueuedRequest, RequestQueue
from services.router.admission.scheduling import ABSENT, DEVICE, DISK, DRAM, scheduling


def queued(queue: RequestQueue, distance: float, now_s: float, prefix: bytes = b"") -> QueuedRequest:
    """`prefix`: its blocks, of one letter each; none of them is on the device."""
    request = queue.submit(cost=1, now_s=now_s, deadline_s=1e9)
    queue.set_prefix(
        request, Prefix(model=b"model", block_ids=[prefix[: end + 1] for end in range(len(prefix))])
    )
    request.distance = distance
    return request


def order_of(
    policy: str,
    *requests: tuple[float, float] | tuple[float, float, bytes],
    now_s: float,
    overtakes_max: int = 256,
) -> list[int]:
    """In which order requests of (distance, arrival, prefix) start after `now_s`, one a second."""
    queue = RequestQueue(
        max_running=1, max_waiting=100, policy=scheduling(policy, overtakes_max=overtakes_max)
    )
    running = queue.submit(cost=1, now_s=0.0, deadline_s=1e9)
    waiting = [queued(queue, *request) for request in requests]
    started: list[int] = []
    while queue.waiting:
        queue.leave(running, now_s)
        running = queue.advance(now_s)[0][0]
        started.append(waiting.index(running))
        now_s += 1.0
    return started


def test_first_come_first_served_does_not_look_at_prefixes() -> None:
    assert order_of("fcfs", (ABSENT, 0), (DEVICE, 1), (DISK, 2), now_s=3) == [0, 1, 2]


def test_the_fastest_prefix_first_and_among_equals_the_first_come() -> None:
    requests = ((ABSENT, 0.0), (DRAM, 1.0), (DEVICE, 2.0), (DISK, 3.0), (DEVICE, 4.0))
    assert order_of("fpf", *requests, now_s=5) == [2, 4, 1, 3, 0]


def test_relaxed_weighs_waiting_by_nearness() -> None:
    """At 10 s: 10 * 1, 4 * 3, 2 * 4 and 5 * 2; at 11 s 11, 12, 12; at 12 s 12, 14; the paper's formula."""
    assert order_of("relaxed_fpf", (ABSENT, 0), (DRAM, 6), (DEVICE, 8), (DISK, 5), now_s=10) == [1, 2, 3, 0]


def test_relaxed_lets_a_long_wait_win() -> None:
    assert order_of("relaxed_fpf", (ABSENT, 0), (DEVICE, 8), now_s=10) == [0, 1]
    assert order_of("relaxed_fpf", (ABSENT, 0), (DEVICE, 7), now_s=10) == [1, 0]


def test_bounded_is_fastest_first_until_somebody_was_overtaken_enough() -> None:
    near = [(DEVICE, float(at)) for at in range(1, 6)]
    assert order_of("bounded_fpf", (ABSENT, 0), *near, now_s=9, overtakes_max=3) == [1, 2, 3, 0, 4, 5]
    assert order_of("bounded_fpf", (ABSENT, 0), *near, now_s=9, overtakes_max=0) == [0, 1, 2, 3, 4, 5]
    mixed = ((ABSENT, 0.0), (DRAM, 1.0), (DEVICE, 2.0), (DISK, 3.0), (DEVICE, 4.0))
    assert order_of("bounded_fpf", *mixed, now_s=9) == order_of("fpf", *mixed, now_s=9) == [2, 4, 1, 3, 0]


def test_bounded_brings_near_what_most_wait_for_unless_another_waited_long() -> None:
    """At 10 s: 1 * 10 * 10 against 3 * 6 * 6, or against 3 * 5 * 5."""
    many = [(ABSENT, 4.0, b"many") for _ in range(3)]
    assert order_of("bounded_fpf", (ABSENT, 0.0, b"one"), *many, now_s=10)[0] == 1
    fewer = [(ABSENT, 5.0, b"many") for _ in range(3)]
    assert order_of("bounded_fpf", (ABSENT, 0.0, b"one"), *fewer, now_s=10)[0] == 0
    assert order_of("fpf", (ABSENT, 0.0, b"one"), *many, now_s=10)[0] == 0


def test_sharers_need_the_next_block_that_is_missing_on_the_device() -> None:
    """Three prompts begin with "sys" and go on in two ways: as long as that is missing, three need it."""
    queue = RequestQueue(max_running=1, max_waiting=100, policy=scheduling("bounded_fpf"))
    queue.submit(cost=1, now_s=0.0, deadline_s=1e9)
    requests = [
        queued(queue, ABSENT, at, prefix) for at, prefix in ((0.0, b"x"), (2.0, b"sys-a"), (2.0, b"sys-b"))
    ]
    requests.append(queued(queue, ABSENT, 2.0, b"sys-b"))
    assert [request for request, _ in queue.look_ahead(9, 10.0)] == [
        requests[1],
        requests[2],
        requests[3],
        requests[0],
    ]
    for request in requests[1:]:
        request.on_device = len(b"sys-")  # "-a" is wanted by one now, "-b" by two
    assert [request for request, _ in queue.look_ahead(9, 10.0)] == [
        requests[2],
        requests[3],
        requests[0],
        requests[1],
    ]
    queue.leave(requests[3], 10.0)  # who leaves is no sharer
    assert [request for request, _ in queue.look_ahead(9, 10.0)] == [requests[0], requests[1], requests[2]]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="fcfs, fpf, relaxed_fpf, bounded_fpf"):
        scheduling("sjf")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    overtakes_max=st.integers(0, 12),
    max_running=st.integers(1, 4),
)
def test_bounded_never_passes_its_bound(seed: int, overtakes_max: int, max_running: int) -> None:
    """Under arrivals, costs and distances that change at random, a request starts after at most as many
    others as waited when it came, and `overtakes_max` more; in the worst case it is so many."""
    rng = random.Random(seed)
    policy = scheduling("bounded_fpf", overtakes_max=overtakes_max)
    queue = RequestQueue(max_running=max_running, max_waiting=1000, policy=policy)
    starts, running = 0, list[QueuedRequest]()
    came: dict[QueuedRequest, tuple[int, int]] = {}  # starts and waiting requests when it came
    for now_s in range(300):
        for _ in range(rng.randint(0, 2)):
            ahead = len(queue.requests)
            request = queue.submit(cost=rng.randint(1, max_running), now_s=now_s, deadline_s=1e9)
            queue.set_prefix(request, Prefix(model=b"model", block_ids=[b"%d" % rng.randrange(5)]))
            request.distance = rng.choice((DEVICE, DRAM, DISK, ABSENT))
            if request.started_s is None:
                came[request] = (starts, ahead)
            else:
                starts += 1
                running.append(request)
        for request in queue.requests:
            if rng.random() < 0.1:
                request.distance = rng.choice((DEVICE, DRAM, DISK, ABSENT))
                request.on_device = int(request.distance == DEVICE)
            if rng.random() < 0.01:
                queue.leave(request, now_s)  # given up
        if running and rng.random() < 0.8:
            queue.leave(running.pop(rng.randrange(len(running))), now_s)
        for request in queue.advance(now_s)[0]:
            before, ahead = came[request]
            assert starts - before <= ahead + overtakes_max
            assert request.overtaken <= overtakes_max
            starts += 1
            running.append(request)


def starve(policy: str, rounds: int = 2000) -> int | None:
    """A cold request among hot ones that never end coming: after how many starts does it start?"""
    queue = RequestQueue(max_running=1, max_waiting=100, policy=scheduling(policy, overtakes_max=64))
    running = queue.submit(cost=1, now_s=0.0, deadline_s=1e9)
    cold = queued(queue, ABSENT, 0.0)
    for number in range(rounds):
        now_s = float(number + 1)
        queued(queue, DEVICE, now_s)
        queue.leave(running, now_s)
        running = queue.advance(now_s)[0][0]
        if running is cold:
            return number
    return None


def test_who_starves() -> None:
    assert starve("fcfs") == 0
    assert starve("fpf") is None
    assert starve("relaxed_fpf") == 0
    assert starve("bounded_fpf") == 64


def test_a_queue_knows_what_comes_next_and_when() -> None:
    queue = RequestQueue(max_running=2, max_waiting=10, policy=scheduling("fpf"))
    for _ in range(2):
        queue.submit(cost=1, now_s=0.0, deadline_s=1e9)
    far, near = queued(queue, DISK, 0.0), queued(queue, DRAM, 1.0)
    assert queue.look_ahead(9, 2.0) == [(near, 0.5), (far, 1.0)]  # requests are thought to run for a second
    assert queue.look_ahead(1, 2.0) == [(near, 0.5)]
