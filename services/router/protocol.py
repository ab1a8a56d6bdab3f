"""Bytes that are no HTTP request, and what aiohttp refuses before the gate: in OpenAI's shape, too."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from kvcommons.errors import InvalidInput, KVCommonsError
from services.router.gate import SERVING, error_response, known_error, request_id_of
from services.router.serving import Serving

log = logging.getLogger(__name__)

_KEEPALIVE_S = 75.0
# Of the request line, and of a header: enough that what is merely too long (a session id, a path) comes as
# far as to the gate, which says what is; past it the parser breaks off.
_LINE_BYTES_MAX = 64 * 1024
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

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, self._serving)


class _Protocol(web.RequestHandler):
    """One connection."""

    def __init__(self, server: _Server, serving: Serving) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # which turns it off
            keepalive_timeout=_KEEPALIVE_S,
            max_line_size=_LINE_BYTES_MAX,
            max_field_size=_LINE_BYTES_MAX,
        )
        self._serving = serving

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


def _malformed(error: HttpProcessingError) -> KVCommonsError:
    if isinstance(error, LineTooLong):
        return InvalidInput(
            f"the request line or a header has more than {_LINE_BYTES_MAX} bytes, which is the limit here"
        )
    # Its first line: after it come the bytes themselves, which may be a key, and this goes to the log, too.
    reason = error.message.partition("\n")[0].rstrip(": ")[:_REASON_CHARS_MAX]
    return InvalidInput(f"this is no HTTP/1.1 request: {reason}")


def _last(error: KVCommonsError, status: int) -> web.Response:
    """The last answer of a connection, with an id: the gate was not reached, which gives ids otherwise."""
    response = error_response(error)
    response.set_status(status)
    response.headers["X-Request-Id"] = request_id_of(None)
    response.force_close()
    return response
