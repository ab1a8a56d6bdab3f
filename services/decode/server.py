"""Decode's gRPC face: requests to sequences, what becomes of them to events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio

from kvcommons.engine.core import Core
from kvcommons.engine.history import Condemner
from kvcommons.engine.request import Request
from kvcommons.errors import (
    ContextLengthExceeded,
    InvalidInput,
    KVCommonsError,
    Loading,
    Overloaded,
)
from kvcommons.pb import decode_pb2 as pb
from kvcommons.pb import decode_pb2_grpc
from services.decode.arrival.arrivals import Arrivals
from services.decode.batching.listeners import TokenListeners
from services.decode.batching.stream import EventStream

log = logging.getLogger(__name__)

START_WAIT_S_MAX = 600.0


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Answers Loading until it is opened."""

    def __init__(self, *, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._core: Core | None = None
        self._arrivals: Arrivals | None = None
        self._condemner: Condemner | None = None
        self._listeners = TokenListeners()
        self._draining = False

    def open(self, core: Core, arrivals: Arrivals, condemner: Condemner) -> None:
        """The model is loaded."""
        self._core, self._arrivals, self._condemner = core, arrivals, condemner

    def drain(self) -> None:
        """No sequence comes any more."""
        self._draining = True
        self._end_listeners()

    def _end_listeners(self) -> None:
        """They would keep the server from ending."""
        if self._draining and not self._arrivals:
            self._listeners.end()

    async def Listen(
        self, request: pb.ListenRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.IterationTokens]:
        with self._listeners.listening(request.listener) as listener:
            async for message in listener.messages():
                yield message

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        if self._core is None or self._arrivals is None or self._condemner is None:
            raise Loading("this decode instance is still loading its model", retry_after_ms=500)
        if self._draining:
            raise Overloaded("this decode instance is being stopped: use another", retry_after_ms=100)
        if len(self._arrivals) >= self._max_sequences:
            raise Overloaded(
                f"this decode instance holds {len(self._arrivals)} sequences, the most it takes: retry later",
                retry_after_ms=500,
            )
        asked = _request(self._core, request)
        await self._core.check_grammar(asked)
        self._condemner.know(data_address=asked.store_data, control_address=asked.store_control)
        arrival = await self._arrivals.open(
            asked,
            request.job,
            EventStream(asked.request_id, partial(self._listeners.find, request.listener)),
            start_wait_s=min(request.start_wait_ms / 1000, START_WAIT_S_MAX),
        )
        outcome = "cancelled"
        try:
            yield pb.GenerateEvent(
                reserved=pb.Reserved(
                    placements=arrival.placements,
                    push_from_block=arrival.push_from_block,
                    computes=arrival.computes,
                    change=arrival.change,
                )
            )
            async for event in arrival.stream.events():
                if event.HasField("finished"):
                    outcome = event.finished.reason
                    event.finished.change = self._arrivals.ended(arrival)
                yield event
        except KVCommonsError as error:
            outcome = error.code
            raise
        finally:
            self._arrivals.leave(arrival)
            self._end_listeners()
            facts = {"attempt": asked.request_id, "prompt_tokens": len(asked.tokens)}
            log.info("generated", extra={**facts, "tokens": arrival.stream.sent, "outcome": outcome})


def _request(core: Core, asked: pb.GenerateRequest) -> Request:
    """Raises InvalidInput, ContextLengthExceeded or ModelNotFound for what cannot be generated here."""
    request, window = Request.of(asked.job, core.info), core.info.context_window
    if not len(request.tokens) < request.max_position <= window:
        raise ContextLengthExceeded(
            f"max_position = {request.max_position} must be above the {len(request.tokens)} tokens that are "
            f"there and within the context window of {window}",
            param="max_position",
        )
    if not asked.start_wait_ms:
        raise InvalidInput("start_wait_ms must be set: no wait is unbounded", param="start_wait_ms")
    return request
