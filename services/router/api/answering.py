"""What a request is answered with over HTTP: one JSON body, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from aiohttp import web

from kvcommons.errors import DeadlineExceeded, KVCommonsError
from kvcommons.telemetry.trace import (
    RESPONSE_FINISH_REASONS,
    USAGE_CACHED_TOKENS,
    USAGE_INPUT_TOKENS,
    USAGE_OUTPUT_TOKENS,
)
from services.router.api import sse
from services.router.api.retries import keep
from services.router.api.shapes import Shape, error_body
from services.router.http.middleware import (
    FAILED,
    IDEMPOTENCY,
    SERVING,
    SESSION,
    VOLATILE_LINES,
    known_error,
)
from services.router.turn import events as ev
from services.router.turn.idempotency import REPLAYED_HEADER, KeptAnswer
from services.router.turn.lifecycle import RequestLifecycle

log = logging.getLogger(__name__)

# Telling a client of a failure is a courtesy: one that does not read is not waited for.
_FAREWELL_S = 1.0
# The dispatch knows better why a deadline passed: this one is for clients that do not read.
_GRACE_S = 1.0


@asynccontextmanager
async def events_of(request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """A stream of server-sent events that follows something, from its headers to its end; an error is its
    last event. Raises CancelledError where the client goes away."""
    response = web.StreamResponse(headers=sse.HEADERS)
    await response.prepare(request)
    try:
        yield response
        await response.write_eof()
    except ConnectionResetError:
        raise asyncio.CancelledError("the client went away") from None
    except KVCommonsError as error:
        await response.write(sse.event(error_body(error)))
        await response.write_eof()


async def answer(
    request: web.Request, lifecycle: RequestLifecycle, shape: Shape, *, stream: bool
) -> web.StreamResponse:
    """Bounded by the request's deadline, slow clients included. One span, and one line in the log."""
    if lifecycle.plan.session_id:
        request[SESSION] = lifecycle.plan.session_id
    if lifecycle.plan.volatile.header is not None:
        request[VOLATILE_LINES] = lifecycle.plan.volatile.header
    serving = request.app[SERVING]
    deadline_s = serving.config.request_deadline_s + _GRACE_S
    name = f"{lifecycle.operation} {shape.model.name}"
    with serving.tracer.span(name, attributes=lifecycle.attributes(), kind="client") as span:
        if stream:
            response = await _Stream(request, lifecycle, shape).run(deadline_s)
        else:
            response = await _whole(request, lifecycle, shape, deadline_s)
        usage = lifecycle.plan.turn.usage
        span.set(USAGE_INPUT_TOKENS, usage.prompt_tokens)
        span.set(USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        span.set(USAGE_CACHED_TOKENS, usage.cached_tokens)
        reasons = [choice.finish_reason or "error" for choice in lifecycle.plan.turn.choices]
        span.set(RESPONSE_FINISH_REASONS, reasons)
        if FAILED in request:
            span.fail(request[FAILED].code, request[FAILED].message)
        replayed = lifecycle.plan.replayed is not None
        facts = {
            "finish_reasons": reasons,
            "stream": stream,
            "replayed": replayed,
            **asdict(usage),
            **lifecycle.timings(),
        }
        log.info("answered", extra=facts)
        return response


async def _whole(
    request: web.Request, lifecycle: RequestLifecycle, shape: Shape, deadline_s: float
) -> web.Response:
    async with asyncio.timeout(deadline_s):
        async with aclosing(lifecycle.deltas()) as deltas:
            async for _ in deltas:
                pass
    turn = lifecycle.plan.turn

    def written() -> str:
        return json.dumps(shape.answer(turn.choices, lifecycle.plan.shown, turn.usage))

    # What is said of thousands of a prompt's tokens would hold up everybody's streams.
    body = await asyncio.to_thread(written) if lifecycle.plan.reads_prompt else written()
    headers = {"Server-Timing": _server_timing(lifecycle.timings())} | _replayed_header(lifecycle)
    response = web.json_response(text=body, headers=headers)
    keep(request, _kept(lifecycle, response.headers["Content-Type"], body.encode()))
    return response


def _replayed_header(lifecycle: RequestLifecycle) -> dict[str, str]:
    return {} if lifecycle.plan.replayed is None else {REPLAYED_HEADER: "true"}


def _kept(lifecycle: RequestLifecycle, content_type: str, body: bytes) -> KeptAnswer:
    """For when the request comes again: a session has its own."""
    return KeptAnswer() if lifecycle.plan.in_session else KeptAnswer(content_type=content_type, body=body)


class _Stream:
    """Headers go out with the first token, so that what fails before it has a status of its own."""

    def __init__(self, request: web.Request, lifecycle: RequestLifecycle, shape: Shape) -> None:
        self._request = request
        self._lifecycle = lifecycle
        self._shape = shape
        self._response = web.StreamResponse(headers=sse.HEADERS | _replayed_header(lifecycle))
        self._opened = False
        self._written_so_far: list[bytes] = []  # where it is kept

    async def run(self, deadline_s: float) -> web.StreamResponse:
        try:
            async with asyncio.timeout(deadline_s):
                async with aclosing(self._lifecycle.deltas()) as batches:
                    async for batch in batches:
                        await self._send(await self._written(partial(_joined, self._shape, batch)))
                turn, timings = self._lifecycle.plan.turn, self._lifecycle.timings()
                ending = partial(self._shape.ending, turn.choices, turn.usage, timings)
                last = await self._written(ending)
                # Whoever goes away now has its answer when it comes again.
                self._keep(last)
                await self._send(last)
                await self._response.write_eof()
            return self._response
        except ConnectionResetError:
            raise asyncio.CancelledError("the client went away") from None
        except Exception as error:
            if not self._response.prepared:
                raise
            return await self._fail(error)

    async def _written(self, events: Callable[[], bytes]) -> bytes:
        """As `_whole`: on a thread where it is much. The turn waits meanwhile."""
        opening = self._open()
        return opening + (await asyncio.to_thread(events) if self._lifecycle.plan.reads_prompt else events())

    def _keep(self, last: bytes) -> None:
        whole = b"".join([*self._written_so_far, last])
        keep(self._request, _kept(self._lifecycle, sse.HEADERS["Content-Type"], whole))

    def _open(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        return self._shape.opening(self._lifecycle.plan.turn.usage)

    async def _send(self, data: bytes) -> None:
        if not data:
            return
        if IDEMPOTENCY in self._request and not self._lifecycle.plan.in_session:
            self._written_so_far.append(data)
        if not self._response.prepared:
            await self._response.prepare(self._request)
        stall_s = self._request.app[SERVING].config.client_stall_s
        try:
            async with asyncio.timeout(stall_s):
                await self._response.write(data)
        except TimeoutError:  # it holds blocks, a place in the batch, and its session
            raise DeadlineExceeded(f"the client read nothing of its stream for {stall_s:g} s") from None

    async def _fail(self, error: Exception) -> web.StreamResponse:
        """The stream began: its last event tells what is wrong."""
        known = known_error(error)
        self._request[FAILED] = known
        self._request.app[SERVING].metrics.errors.labels(known.code).inc()
        log.warning("a stream failed: %s", known.message, extra={"code": known.code})
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._response.write(self._shape.failure(known))
                await self._response.write_eof()
        except (TimeoutError, ConnectionResetError):
            if self._request.transport is not None:
                self._request.transport.abort()
        return self._response


def _joined(shape: Shape, batch: list[ev.Delta]) -> bytes:
    return b"".join(map(shape.delta, batch))


def _server_timing(timings: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.removesuffix('_ms')};dur={value:g}" for name, value in timings.items() if name.endswith("_ms")
    )
