"""The shell around the request queue: a request waits here until it may run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvcommons.errors import DeadlineExceeded
from services.router.admission.look_ahead import QueueLookAhead
from services.router.admission.queue import Prefix, QueuedRequest, RequestQueue
from services.router.admission.scheduling import Promise


class Admission:
    def __init__(
        self, queue: RequestQueue, look_ahead: QueueLookAhead, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._look_ahead = look_ahead
        self._clock = clock
        self._permits: dict[QueuedRequest, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    def running(self) -> int:
        return self._queue.running

    def expected_wait_s(self, cost: int, promise: Promise) -> float:
        """How long a request of so many choices that came now would likely wait."""
        return self._queue.expected_wait_s(cost=cost, now_s=self._clock(), promise=promise)

    @asynccontextmanager
    async def slot(
        self, *, cost: int, deadline_s: float, prefix: Callable[[], Prefix], promise: Promise
    ) -> AsyncIterator[float]:
        """Yields, once the request may run, the seconds it waited. `deadline_s` is by the clock; `prefix` is
        called where the order of the queue depends on it.

        Raises Overloaded when too many wait, DeadlineExceeded when its deadline passed in the queue.
        """
        request = self._queue.submit(cost=cost, now_s=self._clock(), deadline_s=deadline_s, promise=promise)
        try:
            if request.started_s is None or self._look_ahead.asks_distance:
                self._queue.set_prefix(request, prefix())
            if request.started_s is None:
                self._look_ahead.enqueued(request)
                await self._started(request)
            else:
                self._look_ahead.started(request)
            yield self._clock() - request.queued_s
        finally:
            self._look_ahead.dequeued(request)
            self._queue.leave(request, self._clock())
            self._start_next()

    async def _started(self, request: QueuedRequest) -> None:
        loop = asyncio.get_running_loop()
        self._permits[request] = loop.create_future()
        # Only this request's own deadline needs a timer: whatever else moves the queue calls `_start_next`.
        timer = loop.call_later(max(0.0, request.deadline_s - self._clock()) + 0.001, self._start_next)
        try:
            await self._permits[request]
        finally:
            timer.cancel()
            del self._permits[request]

    def _start_next(self) -> None:
        started, expired = self._queue.advance(self._clock())
        for request in started:
            self._look_ahead.started(request)
            _settle(self._permits[request], None)
        for request in expired:
            _settle(self._permits[request], DeadlineExceeded("the request's deadline passed in the queue"))


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
