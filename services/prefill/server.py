"""Prefill's gRPC face: requests to jobs, results to events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio

from kvcommons.engine.core import Core
from kvcommons.engine.history import Condemner
from kvcommons.engine.request import Request
from kvcommons.errors import KVCommonsError, Loading, Overloaded
from kvcommons.pb import ledger_pb2, prefill_pb2_grpc
from kvcommons.pb import prefill_pb2 as pb
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.deadline import Deadline
from services.prefill.engine import PrefillEngine
from services.prefill.job import First, Job, Target
from services.prefill.metrics import PrefillMetrics
from services.prefill.push import Delivery
from services.prefill.spread import await_placed, can_spread

log = logging.getLogger(__name__)

CALL_S_MAX = 3600.0  # of a call without a deadline of its own


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Answers Loading until it is given its engine."""

    def __init__(self, metrics: PrefillMetrics) -> None:
        self._metrics = metrics
        self._core: Core | None = None
        self._engine: PrefillEngine | None = None
        self._condemner: Condemner | None = None
        self._keys = itertools.count(1)
        self._jobs = 0
        self.draining = False

    def open(self, core: Core, engine: PrefillEngine, condemner: Condemner) -> None:
        """The model is loaded."""
        self._core, self._engine, self._condemner = core, engine, condemner

    def describe(self, instance: ledger_pb2.Instance, *, ready: bool) -> ledger_pb2.Instance:
        """Adds to an instance what others should know of it now."""
        if self._core is not None and self._engine is not None:
            allocator = self._core.allocator
            instance.model.CopyFrom(self._core.info)
            instance.load.total_blocks = allocator.total
            instance.load.free_blocks = allocator.free
            instance.load.running = self._engine.running
            instance.load.queued = self._engine.waiting
        instance.load.ready = ready
        return instance

    async def Compute(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        core, engine = self._parts()
        if self.draining:
            raise Overloaded("this prefill instance is being stopped: use another", retry_after_ms=100)
        left_s = context.time_remaining()
        deadline_s = time.monotonic() + min(CALL_S_MAX if left_s is None else left_s, CALL_S_MAX)
        job = _job(next(self._keys), request, core, deadline_s)
        loop = asyncio.get_running_loop()
        if self._condemner is not None:
            self._condemner.know(
                data_address=job.request.store_data, control_address=job.request.store_control
            )
        events: asyncio.Queue[int | First | KVCommonsError] = asyncio.Queue()
        delivery = Delivery(Deadline(deadline_s), current_traceparent())

        def listen(event: int | First | KVCommonsError) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._jobs += 1
        try:
            if job.total_blocks > core.allocator.total and can_spread(job):
                job.spread = True
                if job.push_from:
                    placed = await asyncio.to_thread(await_placed, job, delivery.traceparent)
                    job.place(min(placed, len(job.reusable())))
            engine.submit(job, delivery, listen)
            while True:
                event = await events.get()
                if isinstance(event, int):
                    yield pb.PrefillEvent(started=pb.PrefillStarted(queued_us=event))
                elif isinstance(event, First):
                    self._metrics.ended(job.tokens, event)
                    log.info("prefilled", extra=_facts(job, event))
                    yield pb.PrefillEvent(first=_first(event))
                    return
                else:
                    raise event
        finally:
            self._jobs -= 1
            engine.cancel(job.key)

    async def Inspect(
        self, request: pb.PrefillInspectRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PrefillInspectReply:
        core, _ = self._parts()
        allocator = core.allocator
        return pb.PrefillInspectReply(
            total_blocks=allocator.total,
            free_blocks=allocator.free,
            cached_blocks=allocator.cached,
            jobs=self._jobs,
        )

    def _parts(self) -> tuple[Core, PrefillEngine]:
        if self._core is None or self._engine is None:
            raise Loading("this prefill instance is still loading its model", retry_after_ms=500)
        return self._core, self._engine


def _job(key: int, asked: pb.PrefillRequest, core: Core, deadline_s: float) -> Job:
    """Raises InvalidInput, ContextLengthExceeded or ModelNotFound for what cannot be computed here."""
    request = Request.of(asked.job, core.info)
    return Job(
        key=key,
        request=request,
        targets=tuple(Target.of(placement) for placement in asked.targets),
        push_from=asked.push_from_block,
        block_tokens=core.block_tokens,
        deadline_s=deadline_s,
        submitted_s=time.monotonic(),
        ids=request.chain(core.info).ids,
    )


def _facts(job: Job, first: First) -> dict[str, str | int | float]:
    return {
        "attempt": job.request.request_id,
        "tokens": job.tokens,
        "cached_tokens": first.cached_tokens,
        "device_tokens": first.device_tokens,
        "queue_ms": first.queue_us / 1000,
        "compute_ms": first.compute_us / 1000,
        "load_wait_ms": first.load_wait_us / 1000,
    }


def _first(first: First) -> pb.PrefillFirst:
    return pb.PrefillFirst(
        token=first.token,
        cached_tokens=first.cached_tokens,
        device_tokens=first.device_tokens,
        queue_us=first.queue_us,
        compute_us=first.compute_us,
        load_wait_us=first.load_wait_us,
    )
