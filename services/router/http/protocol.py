"""A connection to the router: its deadlines, and what is answered to bytes that are no HTTP request.

A client needs no key to open a connection, to send a part of a request, or to leave an answer unread. Each of
these has a bound here, so that it costs others nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from kvcommons.errors import InvalidInput, KVCommonsError, Overloaded
from services.router.api.shapes import error_body
from services.router.http.connections import client_address
from services.router.http.middleware import SERVING, error_response, known_error, request_id_of
from services.router.http.tls import TlsDoor
from services.router.serving import Serving

log = logging.getLogger(__name__)

_KEEPALIVE_S = 75.0
_LINGER_S_MAX = 10.0  # for the rest of a body, when its request was answered before it was there
# Of the request line, and of a header: enough that what is merely too long (a session id, a path) comes as
# far as the middleware, which says what it is; beyond it the parser breaks off.
_LINE_BYTES_MAX = 64 * 1024
_HEAD_BYTES_MAX = 4 * _LINE_BYTES_MAX  # of all headers
_HEADERS_TOO_LARGE = 431
_REASON_CHARS_MAX = 200


class Runner(web.AppRunner):
    """Serves an application of the router."""

    async def _make_server(self) -> web.Server:
        return _Server(self.app[SERVING], await super()._make_server())


class _Server(web.Server):
    def __init__(self, serving: Serving, made: web.Server) -> None:
        """`made`: what aiohttp made for the application."""

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await made.request_handler(request)
            except web.HTTPExpectationFailed:
                known = InvalidInput("of Expect there is only 100-continue", param="Expect")
                return _last(known, web.HTTPExpectationFailed.status_code)

        # A client that goes away cancels its handler, and with it the calls to prefill and decode.
        super().__init__(answer, request_factory=made.request_factory, handler_cancellation=True)
        self._serving = serving

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]
        http = _Protocol(self, self._serving)
        if self._serving.certificate is None:
            return http
        return TlsDoor(
            self._serving.certificate,
            http,
            accept=http.accept,
            leave=http.leave,
            handshake_s=self._serving.config.head_s,
        )


class _Protocol(web.RequestHandler):
    """One connection."""

    def __init__(self, server: _Server, serving: Serving) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # which turns it off
            keepalive_timeout=_KEEPALIVE_S,
            lingering_time=min(_LINGER_S_MAX, serving.config.body_s),
            max_line_size=_LINE_BYTES_MAX,
            max_field_size=_LINE_BYTES_MAX,
        )
        self._serving = serving
        self._connection: asyncio.Transport | None = None  # aiohttp's own forgets it before it is closed
        self._below: asyncio.Transport | None = None  # of TLS: what carries it
        self._head_bytes = 0  # that came without making a request yet
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._read_bytes: int | None = None  # of the answer, by the client, when the timer was last due

    def accept(self, transport: asyncio.Transport) -> bool:
        """Gives the connection a place, and the time for its first request; False where there is none."""
        host = (transport.get_extra_info("peername") or ("",))[0]
        admitted, closed = self._serving.connections.open(self, client_address(host))
        if not admitted:
            self._count("refused")
            return False
        if closed is not None:
            closed.give_up("displaced")
        self._connection = transport
        self._await_head()
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        if self._connection is not None:  # accepted before its handshake
            self._below = self._connection
            self._connection = connection
            connection.set_write_buffer_limits(high=1)  # asyncio's TLS counts from the limit, not above it
        elif self.accept(connection):
            connection.set_write_buffer_limits(high=0)  # writing is paused while anything is unsent
        else:
            connection.write(_REFUSAL)
            connection.close()
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._connection is None:  # refused
            return
        super().data_received(data)
        if self._waiter is not None and not self._waiter.done():
            self._await_head()
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES_MAX:
                self.give_up("head")
        else:
            self._head_bytes = 0
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._connection is None:
            return
        self._forget()
        super().connection_lost(exc)

    def leave(self) -> None:
        """The connection ended, which `connection_lost` says only of one that HTTP has begun on."""
        if self._connection is not None and self._below is None:
            self._forget()

    def _forget(self) -> None:
        self._connection = self._below = None
        self._serving.connections.closed(self)
        for timer in (self._head_timer, self._read_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_bytes = None
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._serving.connections.idle(self)

    def give_up(self, reason: str) -> None:
        """Closes the connection at once: what is unsent is lost."""
        if self._connection is not None:
            self._count(reason)
            self._connection.abort()

    def _await_head(self) -> None:
        if self._head_timer is None:
            deadline_s = self._serving.config.head_s
            self._head_timer = self._loop.call_later(deadline_s, self.give_up, "head")

    def _await_reading(self) -> None:
        stall_s = self._serving.config.client_stall_s
        self._read_timer = self._loop.call_later(stall_s, self._check_reading)

    def _check_reading(self) -> None:
        """Gives up a client that read nothing of its answer from one check to the next."""
        if self._connection is None:
            return
        written = self._current_request.writer.output_size if self._current_request is not None else 0
        unsent = self._connection.get_write_buffer_size()
        if self._below is not None:
            unsent += self._below.get_write_buffer_size()
        read = written - unsent
        if read == self._read_bytes:
            self.give_up("unread")
            return
        self._read_bytes = read
        self._await_reading()

    def _count(self, reason: str) -> None:
        self._serving.metrics.connections_closed.labels(reason).inc()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is said before the connection is closed. Raises ConnectionError where an answer has begun."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun: another one cannot be sent")
        if isinstance(exc, HttpProcessingError):
            known = _malformed(exc)
            log.info("refused: %s", known.message, extra={"code": known.code})
        else:
            known = known_error(exc if isinstance(exc, Exception) else TimeoutError(message))
        self._serving.metrics.errors.labels(known.code).inc()
        return _last(known, _HEADERS_TOO_LARGE if isinstance(exc, LineTooLong) else known.http_status)


def _refusal() -> bytes:
    error = Overloaded("too many connections are open; try again in a second", retry_after_ms=1000)
    body = json.dumps(error_body(error)).encode()
    head = (
        f"HTTP/1.1 {error.http_status} Too Many Connections\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_REFUSAL = _refusal()


def _malformed(error: HttpProcessingError) -> KVCommonsError:
    if isinstance(error, LineTooLong):
        return InvalidInput(
            f"the request line or a header has more than {_LINE_BYTES_MAX} bytes, which is the limit here"
        )
    # Its first line: after it come the bytes themselves, which may be a key, and this goes to the log, too.
    reason = error.message.partition("\n")[0].rstrip(": ")[:_REASON_CHARS_MAX]
    return InvalidInput(f"this is no HTTP/1.1 request: {reason}")


def _last(error: KVCommonsError, status: int) -> web.Response:
    """The last answer of a connection. It gets its request id here, for the request did not reach the
    middleware."""
    response = error_response(error)
    response.set_status(status)
    response.headers["X-Request-Id"] = request_id_of(None)
    response.force_close()
    return response
