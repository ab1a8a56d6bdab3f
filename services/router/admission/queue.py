"""The request queue: bounded, in the order of a scheduling policy, each request with a deadline. Pure: the
clock is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import count

from kvcommons.errors import Overloaded, QuotaExceeded
from services.router.admission.prefixes import PrefixSharers
from services.router.admission.scheduling import ABSENT, NO_PROMISE, FirstCome, Promise, Scheduling, SortKey
from services.router.admission.shares import TenantShares

_RETRY_AFTER_MS_MIN = 1000
_RETRY_AFTER_MS_MAX = 60_000
_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What a request could reuse: its prompt's blocks, in order. Without reuse there are none."""

    model: bytes
    block_ids: Sequence[bytes]
    home: bytes = b""  # the key whose home has them


NO_PREFIX = Prefix(model=b"", block_ids=())


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedRequest:
    """A request that waits or runs. `cost`: how many choices it generates at once."""

    cost: int
    number: int  # of requests in the order in which they came
    queued_s: float
    deadline_s: float
    started_s: float | None = None
    prefix: Prefix = NO_PREFIX
    distance: float = ABSENT  # of the prefix; see `scheduling`
    on_device: int = 0  # so many of the prefix's blocks are there
    overtaken: int = 0  # requests that came later and started earlier
    promise: Promise = NO_PROMISE
    delay_s: float = 0.0  # of its tenant, as of the last time that the order was asked for
    charged_s: float = 0.0  # to its tenant's share, while it runs


class RequestQueue:
    """Lets requests of up to `max_running` choices run; up to `max_waiting` choices wait, and more are
    refused. The request that is next by the policy is not overtaken for being too large to start now."""

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        policy: Scheduling | None = None,
        share: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        """Without a policy it is first come, first served. `share`: of the choices that may wait, the part
        that a tenant's may be."""
        self._share = share
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._policy = policy or FirstCome()
        self._waiting: dict[QueuedRequest, None] = {}  # in the order in which they came
        self._sharers = PrefixSharers()
        self._running: set[QueuedRequest] = set()
        self._shares = TenantShares()
        self._numbers = count()
        self._service_s = 1.0  # how long a request runs, smoothed

    @property
    def waiting(self) -> int:
        """Choices that wait."""
        return sum(request.cost for request in self._waiting)

    @property
    def running(self) -> int:
        """Choices under way."""
        return sum(request.cost for request in self._running)

    @property
    def requests(self) -> list[QueuedRequest]:
        """Requests that wait, in the order in which they came."""
        return list(self._waiting)

    def submit(
        self, *, cost: int, now_s: float, deadline_s: float, promise: Promise = NO_PROMISE
    ) -> QueuedRequest:
        """A request that runs at once (`started_s` set) or waits for `advance` to start it.

        Raises Overloaded, with the time after which to try again, when too many wait, and QuotaExceeded when
        too many of its tenant's do.
        """
        request = QueuedRequest(
            cost=min(cost, self._max_running),
            number=next(self._numbers),
            queued_s=now_s,
            deadline_s=deadline_s,
            promise=promise,
        )
        if not self._waiting and self._fits(request):
            self._shares.join(promise.tenant)
            self._start(request, now_s)
            return request
        if self.waiting + request.cost > self._max_waiting:
            raise Overloaded(
                f"{self.waiting} requests are waiting already; try again later",
                retry_after_ms=self.retry_after_ms(),
            )
        self._check_share(request)
        self._shares.join(promise.tenant)
        self._waiting[request] = None
        return request

    def _check_share(self, request: QueuedRequest) -> None:
        """One request of a tenant may wait in any case. Raises QuotaExceeded."""
        tenant = request.promise.tenant
        own = sum(other.cost for other in self._waiting if other.promise.tenant == tenant)
        most = int(self._share(tenant) * self._max_waiting)
        if own and own + request.cost > most:
            raise QuotaExceeded(
                f"{own} requests of the tenant {tenant!r} wait already, of at most {most} (queue_share): try "
                "again later",
                retry_after_ms=self.retry_after_ms(),
            )

    def set_prefix(self, request: QueuedRequest, prefix: Prefix) -> None:
        """Sets what a request could reuse; called once, before it waits for long."""
        request.prefix = prefix
        if request in self._waiting:
            self._sharers.join(prefix.block_ids)

    def advance(self, now_s: float) -> tuple[list[QueuedRequest], list[QueuedRequest]]:
        """Requests that start now, and requests whose deadline passed while they waited (they leave the
        queue)."""
        expired = [request for request in self._waiting if request.deadline_s <= now_s]
        for request in expired:
            self.leave(request, now_s)
        started: list[QueuedRequest] = []
        while self._waiting and self.running < self._max_running:
            request = min(self._waiting, key=self._sort_keys(now_s))
            if not self._fits(request):
                break
            self._drop(request)
            for other in self._waiting:
                if other.number > request.number:
                    break
                other.overtaken += 1
            self._start(request, now_s)
            started.append(request)
        return started, expired

    def leave(self, request: QueuedRequest, now_s: float) -> None:
        """The request is done, or was given up, wherever it was. Call `advance` afterwards."""
        if request in self._running:
            self._running.remove(request)
            ran_s = now_s - (request.started_s if request.started_s is not None else now_s)
            self._service_s += _SMOOTHING * (ran_s - self._service_s)
            self._shares.use(request.promise.tenant, self._share_s(request, ran_s) - request.charged_s)
            self._shares.leave(request.promise.tenant)
        elif request in self._waiting:
            self._drop(request)
            self._shares.leave(request.promise.tenant)

    def look_ahead(self, requests_max: int, now_s: float) -> list[tuple[QueuedRequest, float]]:
        """The next requests, and in how many seconds each will likely start, by how long requests run."""
        order = nsmallest(requests_max, self._waiting, key=self._sort_keys(now_s))
        turnover_s = self._service_s / self._max_running
        return [(request, (place + 1) * turnover_s) for place, request in enumerate(order)]

    def expected_wait_s(self, *, cost: int, now_s: float, promise: Promise = NO_PROMISE) -> float:
        """How long a request of so many choices that came now would wait, by those that would start before
        it and by how long others ran; 0 where it would run at once."""
        request = QueuedRequest(
            cost=min(cost, self._max_running),
            number=next(self._numbers),
            queued_s=now_s,
            deadline_s=now_s,
            promise=promise,
        )
        if not self._waiting and self._fits(request):
            return 0.0
        self._shares.join(promise.tenant)
        sort_key = self._sort_keys(now_s)
        own = sort_key(request)
        before = sum(other.cost for other in self._waiting if sort_key(other) < own)
        self._shares.leave(promise.tenant)
        return self._share_s(request, self._service_s) + self._service_s * before / self._max_running

    def retry_after_ms(self) -> int:
        """How long until the queue has likely moved on by one request."""
        turnover_s = self._service_s * max(1, self.waiting) / self._max_running
        return int(min(max(turnover_s * 1000, _RETRY_AFTER_MS_MIN), _RETRY_AFTER_MS_MAX))

    def _sort_keys(self, now_s: float) -> Callable[[QueuedRequest], SortKey]:
        """Of requests as they are now."""
        oldest_s: dict[str, float] = {}
        for waiting in self._waiting:  # in the order in which they came
            oldest_s.setdefault(waiting.promise.tenant, waiting.queued_s)
        delays = {tenant: self._shares.delay_s(tenant, came_s) for tenant, came_s in oldest_s.items()}

        def sort_key(request: QueuedRequest) -> SortKey:
            tenant = request.promise.tenant
            if tenant not in delays:  # none of its requests waits yet
                delays[tenant] = self._shares.delay_s(tenant, request.queued_s)
            request.delay_s = delays[tenant]
            sharers = self._sharers.of(request.prefix.block_ids, request.on_device)
            return self._policy.sort_key(request, sharers, now_s)

        return sort_key

    def _drop(self, request: QueuedRequest) -> None:
        del self._waiting[request]
        self._sharers.leave(request.prefix.block_ids)

    def _fits(self, request: QueuedRequest) -> bool:
        return self.running + request.cost <= self._max_running

    def _start(self, request: QueuedRequest, now_s: float) -> None:
        request.started_s = now_s
        self._running.add(request)
        request.charged_s = self._share_s(request, self._service_s)
        self._shares.start(request.promise.tenant, request.charged_s, now_s)

    def _share_s(self, request: QueuedRequest, seconds: float) -> float:
        """What it has of the whole machine in so many seconds."""
        return seconds * request.cost / self._max_running
