"""Prefill's gRPC face: requests to jobs, results to events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio

from kvcommons.engine.prompt import FirstToken, Prompt
from kvcommons.errors import Loading, Overloaded
from kvcommons.pb import common_pb2, ledger_pb2, prefill_pb2_grpc
from kvcommons.pb import prefill_pb2 as pb
from kvcommons.prefill.handover import PromptEvent
from kvcommons.prefill.intake import Intake
from kvcommons.prefill.metrics import PrefillMetrics

log = logging.getLogger(__name__)

CALL_S_MAX = 3600.0  # of a call without a deadline of its own


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Answers Loading until it is given its engine."""

    def __init__(self, metrics: PrefillMetrics) -> None:
        self._metrics = metrics
        self._intake: Intake | None = None
        self._jobs = 0
        self.draining = False

    def open(self, intake: Intake) -> None:
        """The model is loaded."""
        self._intake = intake

    def describe(self, instance: ledger_pb2.Instance, *, ready: bool) -> ledger_pb2.Instance:
        """Adds to an instance what others should know of it now."""
        if self._intake is not None:
            core, engine = self._intake.core, self._intake.engine
            instance.model.CopyFrom(core.info)
            instance.products = core.backend.operators.multiplies
            instance.load.total_blocks = core.allocator.total
            instance.load.free_blocks = core.allocator.free
            instance.load.running = engine.computing
            instance.load.queued = engine.waiting
            instance.load.costs.update(engine.predictor.costs.by_name)
            instance.load.chunk_tokens = self._intake.chunk_tokens
        instance.load.ready = ready
        return instance

    async def Compute(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillEvent]:
        intake = self._opened()
        if self.draining:
            raise Overloaded("this prefill instance is being stopped: use another", retry_after_ms=100)
        left_s = context.time_remaining()
        deadline_s = time.monotonic() + min(CALL_S_MAX if left_s is None else left_s, CALL_S_MAX)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[PromptEvent] = asyncio.Queue()

        def listen(event: PromptEvent) -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._jobs += 1
        key = 0
        try:
            prompt = await intake.prompt(request, deadline_s, listen)
            key = prompt.key
            intake.engine.submit(prompt)
            while True:
                event = await events.get()
                if isinstance(event, int):
                    yield pb.PrefillEvent(started=pb.PrefillStarted(queued_us=event))
                elif isinstance(event, common_pb2.PromptLogprobs):
                    yield pb.PrefillEvent(logprobs=event)
                elif isinstance(event, FirstToken):
                    self._metrics.ended(prompt.tokens, event)
                    log.info("prefilled", extra=_facts(prompt, event))
                    yield pb.PrefillEvent(first=event.message())
                    return
                else:
                    raise event
        finally:
            self._jobs -= 1
            intake.engine.cancel(key)

    async def Inspect(
        self, request: pb.PrefillInspectRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PrefillInspectReply:
        allocator = self._opened().core.allocator
        return pb.PrefillInspectReply(
            total_blocks=allocator.total,
            free_blocks=allocator.free,
            cached_blocks=allocator.cached,
            jobs=self._jobs,
        )

    def _opened(self) -> Intake:
        if self._intake is None:
            raise Loading("this prefill instance is still loading its model", retry_after_ms=500)
        return self._intake


def _facts(prompt: Prompt, first: FirstToken) -> dict[str, str | int | float]:
    return {
        "attempt": prompt.request.request_id,
        "tokens": prompt.tokens,
        "cached_tokens": first.cached_tokens,
        "device_tokens": first.device_tokens,
        "queue_ms": first.queue_us / 1000,
        "compute_ms": first.compute_us / 1000,
        "load_wait_ms": first.load_wait_us / 1000,
    }
