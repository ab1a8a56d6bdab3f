"""Decode's gRPC face: requests to sequences, what becomes of them to events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from kvcommons.engine.core import Core
from kvcommons.engine.history import Condemner
from kvcommons.engine.sequence import Generation
from kvcommons.engine.truncated import WHOLE, Truncated
from kvcommons.errors import (
    ContextLengthExceeded,
    InvalidInput,
    KVCommonsError,
    Loading,
    ModelNotFound,
    Overloaded,
)
from kvcommons.model.sampling import SamplingParams
from kvcommons.pb import decode_pb2 as pb
from kvcommons.pb import decode_pb2_grpc
from kvcommons.rblock.identity import SALT_BYTES
from services.decode.arrival import Arrivals

log = logging.getLogger(__name__)

START_WAIT_S_MAX = 600.0


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """Answers Loading until it is opened."""

    def __init__(self, *, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._core: Core | None = None
        self._arrivals: Arrivals | None = None
        self._condemner: Condemner | None = None
        self.draining = False

    def open(self, core: Core, arrivals: Arrivals, condemner: Condemner) -> None:
        """The model is loaded."""
        self._core, self._arrivals, self._condemner = core, arrivals, condemner

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateEvent]:
        if self._core is None or self._arrivals is None or self._condemner is None:
            raise Loading("this decode instance is still loading its model", retry_after_ms=500)
        if self.draining:
            raise Overloaded("this decode instance is being stopped: use another", retry_after_ms=100)
        if len(self._arrivals) >= self._max_sequences:
            raise Overloaded(
                f"this decode instance holds {len(self._arrivals)} sequences, the most it takes: retry later",
                retry_after_ms=500,
            )
        generation = _generation(self._core, request)
        self._condemner.know(data_address=generation.store_data, control_address=generation.store_control)
        arrival = await self._arrivals.open(generation)
        tokens, outcome = 0, "cancelled"
        try:
            yield pb.GenerateEvent(
                reserved=pb.Reserved(
                    placements=arrival.placements,
                    push_from_block=arrival.push_from_block,
                    change=arrival.change,
                )
            )
            async for event in arrival.stream.events():
                tokens += len(event.tokens.tokens)
                if event.HasField("finished"):
                    outcome = event.finished.reason
                    event.finished.change = self._arrivals.ended(arrival)
                yield event
        except KVCommonsError as error:
            outcome = error.code
            raise
        finally:
            self._arrivals.leave(arrival)
            facts = {"attempt": generation.request_id, "prompt_tokens": len(generation.tokens)}
            log.info("generated", extra={**facts, "tokens": tokens, "outcome": outcome})


def _generation(core: Core, request: pb.GenerateRequest) -> Generation:
    """Raises InvalidInput, ContextLengthExceeded or ModelNotFound for what cannot be generated here."""
    info, tokens = core.info, request.tokens
    if request.model != info.fingerprint:
        raise ModelNotFound("this decode instance serves another model than the one asked for", param="model")
    if len(request.salt) != SALT_BYTES:
        raise InvalidInput(f"salt must have {SALT_BYTES} bytes, not {len(request.salt)}", param="salt")
    if not tokens or max(tokens) >= info.vocab_size:
        raise InvalidInput(
            f"tokens must be of the vocabulary of {info.vocab_size}, one at least", param="tokens"
        )
    if not len(tokens) < request.max_position <= info.context_window:
        raise ContextLengthExceeded(
            f"max_position = {request.max_position} must be above the {len(tokens)} tokens that are there "
            f"and within the context window of {info.context_window}",
            param="max_position",
        )
    if request.prompt_tokens > len(tokens):
        raise InvalidInput("prompt_tokens is larger than the number of tokens", param="prompt_tokens")
    if not request.start_wait_ms:
        raise InvalidInput("start_wait_ms must be set: no wait is unbounded", param="start_wait_ms")
    truncated = WHOLE
    if request.HasField("truncated"):
        truncated = Truncated.of(request.truncated, len(tokens), info.block_tokens)
    return Generation(
        request_id=request.request_id,
        session_id=request.session_id,
        tenant=request.tenant,
        salt=request.salt,
        tokens=tuple(tokens),
        prompt_tokens=request.prompt_tokens,
        max_position=request.max_position,
        sampling=SamplingParams.of(request.sampling),
        stop_token_ids=frozenset(request.sampling.stop_token_ids),
        store_control=request.history.control_address,
        store_data=request.history.data_address,
        matched_blocks=request.history.matched_blocks,
        no_reuse=request.no_reuse,
        start_wait_s=min(request.start_wait_ms / 1000, START_WAIT_S_MAX),
        truncated=truncated,
    )
