"""The order by slack: what is urgent comes first, what is late makes nobody else late, nobody starves, and
tenants share."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission.queue import QueuedRequest, RequestQueue
from services.router.admission.scheduling import (
    DOCUMENT_PATIENCE_S,
    PATIENCE_S,
    FirstCome,
    OrderedRequest,
    Promise,
    SortKey,
    scheduling,
)

INF = float("inf")


class Line:
    """A queue whose requests run one at a time, `service_s` each; a virtual clock."""

    def __init__(self, policy: str = "slack", *, service_s: float = 1.0) -> None:
        self.queue = RequestQueue(max_running=1, max_waiting=10_000, policy=scheduling(policy))
        self.now_s = 0.0
        self._service_s = service_s
        self._running: QueuedRequest | None = None
        self.started: list[QueuedRequest] = []

    def come(
        self,
        tenant: str = "ann",
        *,
        ttft_s: float = INF,
        expected_s: float = 0.0,
        patience_s: float = PATIENCE_S,
    ) -> QueuedRequest:
        promise = Promise(tenant=tenant, ttft_s=ttft_s, expected_s=expected_s, patience_s=patience_s)
        request = self.queue.submit(cost=1, now_s=self.now_s, deadline_s=INF, promise=promise)
        if request.started_s is not None:
            self._began(request)
        return request

    def step(self) -> QueuedRequest:
        """The running one ends; the next one."""
        assert self._running is not None
        self.now_s += self._service_s
        self.queue.leave(self._running, self.now_s)
        self._began(self.queue.advance(self.now_s)[0][0])
        return self._running

    def order(self, requests: list[QueuedRequest]) -> list[int]:
        while self.queue.waiting:
            self.step()
        return [requests.index(one) for one in self.started if one in requests]

    def _began(self, request: QueuedRequest) -> None:
        self._running = request
        self.started.append(request)


def test_one_tenant_without_objectives_is_served_first_come_first_served() -> None:
    line, chance = Line(), random.Random(1)
    line.come()
    requests = []
    for _ in range(5):
        line.now_s += 0.1
        requests.append(line.come(expected_s=chance.random()))
    assert line.order(requests) == [0, 1, 2, 3, 4]


def test_the_least_slack_starts_first() -> None:
    line = Line()
    line.come()
    requests = [
        line.come(),
        line.come(ttft_s=20.0),
        line.come(ttft_s=10.0),
        line.come(ttft_s=20.0, expected_s=15.0),  # has to start after 5 s
    ]
    assert line.order(requests) == [3, 2, 1, 0]


def test_parts_of_documents_come_after_requests_for_minutes() -> None:
    line = Line()
    line.come()
    part = line.come(patience_s=DOCUMENT_PATIENCE_S)
    for _ in range(500):
        line.come()
        if line.step() is part:
            break
    assert (part.started_s or INF) == pytest.approx(DOCUMENT_PATIENCE_S - PATIENCE_S, abs=3)


def test_waiting_makes_urgent() -> None:
    line = Line()
    line.come()
    old = line.come(ttft_s=10.0)
    line.now_s = 7.0
    requests = [old, line.come(ttft_s=5.0), line.come(ttft_s=2.0)]
    assert line.order(requests) == [2, 0, 1]  # at 9, 10 and 12 s


def test_what_is_late_does_not_make_others_late() -> None:
    """Each takes a second, and five are promised the next two."""
    line = Line()
    line.come()
    urgent = [line.come(ttft_s=2.5) for _ in range(5)]
    patient = [line.come(ttft_s=4.5) for _ in range(2)]
    order = line.order(urgent + patient)
    assert order == [0, 1, 5, 6, 2, 3, 4]
    in_time = [one for one in urgent + patient if (one.started_s or 0) <= one.promise.ttft_s]
    assert len(in_time) == 4
    by_deadline_alone = 2  # the urgent ones, then nobody
    assert len(in_time) > by_deadline_alone


def test_a_request_without_an_objective_is_passed_for_a_bounded_time() -> None:
    """Urgent ones never end coming, as many as the machine can take."""
    line = Line()
    line.come()
    patient = line.come()
    for _ in range(200):
        line.come(ttft_s=2.0)
        if line.step() is patient:
            break
    assert PATIENCE_S - 3 <= (patient.started_s or INF) <= PATIENCE_S + 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nobody_is_passed_by_what_comes_after_its_moment(seed: int) -> None:
    """The theorem of `LeastSlackFirst`, under arrivals and promises at random."""
    chance = random.Random(seed)
    line = Line(service_s=chance.choice([0.2, 1.0, 3.0]))
    line.come("x")
    delay_s: dict[QueuedRequest, float] = {}
    for _ in range(300):
        for _ in range(chance.choice([0, 1, 1, 2])):
            line.come(
                chance.choice(["ann", "bob"]),
                ttft_s=chance.choice([0.5, 5.0, 50.0, INF]),
                expected_s=chance.choice([0.0, 1.0, 10.0]),
            )
        if not line.queue.waiting:
            line.come("x")
        waiting = line.queue.requests
        started = line.step()
        for one in waiting:
            delay_s[one] = max(delay_s.get(one, 0.0), one.delay_s)
            if one is not started:
                assert started.queued_s <= one.queued_s + PATIENCE_S + delay_s[one]


def test_a_tenant_with_one_request_does_not_wait_for_the_many_of_another() -> None:
    line = Line()
    many = [line.come("ann") for _ in range(100)]
    for _ in range(50):
        line.step()
    one = line.come("bob")
    assert one in (line.step(), line.step())
    assert line.step() in many
    first_come = Line("fcfs")
    for _ in range(100):
        first_come.come("ann")
    late = first_come.come("bob")
    first_come.order([])
    assert late.started_s == 100.0


@pytest.mark.parametrize("promised", [INF, 1.0])
def test_of_two_that_want_all_each_gets_half(promised: float) -> None:
    """Whatever one of them was promised."""
    line = Line()
    line.come("ann")
    had: Counter[str] = Counter()
    for number in range(1000):
        for _ in range(3):
            line.come("ann", ttft_s=promised)
        line.come("bob")
        line.come("bob")
        started = line.step()
        if number >= 200:  # bob is first promised a start within a minute
            had[started.promise.tenant] += 1
    assert had["bob"] == pytest.approx(had["ann"], rel=0.2)


def test_a_tenant_that_wants_less_than_its_share_gets_all_of_it() -> None:
    line = Line()
    for _ in range(500):
        line.come("ann")
    waits = []
    for number in range(300):
        modest = line.come("bob") if number % 5 == 0 else None
        line.step()
        if modest is not None:
            while modest.started_s is None:
                line.step()
            waits.append(modest.started_s - modest.queued_s)
    assert max(waits) <= 2.0


def test_the_wait_that_is_expected_is_for_those_that_would_start_before() -> None:
    line = Line()
    line.come()
    for _ in range(10):
        line.come()
    queue, now_s = line.queue, line.now_s
    assert queue.expected_wait_s(cost=1, now_s=now_s) == pytest.approx(11.0)  # a second each, as at first
    urgent = Promise(tenant="ann", ttft_s=5.0)
    assert queue.expected_wait_s(cost=1, now_s=now_s, promise=urgent) == pytest.approx(1.0)
    assert queue.waiting == 10, "to ask changes nothing"
    assert RequestQueue(max_running=1, max_waiting=9).expected_wait_s(cost=1, now_s=0.0) == 0.0


def test_asking_for_the_expected_wait_ranks_each_request_once() -> None:
    class Counting(FirstCome):
        ranked = 0

        def sort_key(self, request: OrderedRequest, sharers: int, now_s: float) -> SortKey:
            self.ranked += 1
            return super().sort_key(request, sharers, now_s)

    policy = Counting()
    queue = RequestQueue(max_running=1, max_waiting=10, policy=policy)
    assert queue.expected_wait_s(cost=1, now_s=0.0) == 0.0
    assert policy.ranked == 0
    for _ in range(5):
        queue.submit(cost=1, now_s=0.0, deadline_s=INF)
    assert queue.expected_wait_s(cost=1, now_s=0.0) == pytest.approx(5.0)
    assert policy.ranked == 4 + 1
