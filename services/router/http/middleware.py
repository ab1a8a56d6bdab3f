"""The middleware that all paths pass: request id, authentication, and every failure in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import quote

from aiohttp import web

from kvcommons.errors import (
    DeadlineExceeded,
    Internal,
    InvalidInput,
    KVCommonsError,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    Unauthenticated,
)
from kvcommons.telemetry import logs
from services.router.api.messages import shape as messages
from services.router.api.shapes import error_body
from services.router.http.tenants import Caller, Tenant
from services.router.serving import Serving
from services.router.turn.idempotency import KeptAnswer, RequestKey

log = logging.getLogger(__name__)

SERVING = web.AppKey("serving", Serving)
OPEN_PATHS = web.AppKey("open_paths", frozenset)  # that need no key
CALLER = web.RequestKey("caller", Caller)
TENANT = web.RequestKey("tenant", Tenant)
REQUEST_ID = web.RequestKey("request_id", str)
IGNORED = web.RequestKey("ignored", list)  # names of fields of its body that nobody knows
IDEMPOTENCY = web.RequestKey("idempotency", RequestKey)  # of a request that may come again
KEPT_ANSWER = web.RequestKey("kept_answer", KeptAnswer)  # that it gets then
SESSION = web.RequestKey("session", str)  # or branch, that its turn is of
VOLATILE_LINES = web.RequestKey("volatile_lines", str)  # what became of those of its head
FAILED = web.RequestKey("failed", KVCommonsError)  # of a stream that had begun, as a 200

IGNORED_HEADER = "X-Ignored-Fields"
SESSION_HEADER = "X-Session-ID"
VOLATILE_HEADER = "X-Volatile-Lines"
_IGNORED_CHARS_MAX = 2000

_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_READING_METHODS = frozenset({"GET", "HEAD"})
_MESSAGES_PATH = "/v1/messages"
_PATH_CHARS_MAX = 200  # in the log
_SERVER_ERRORS = 500

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def request_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    serving = request.app[SERVING]
    request[REQUEST_ID] = request_id_of(request.headers.get("X-Request-Id"))
    route = request.match_info.route.resource
    with (
        logs.bound(request_id=request[REQUEST_ID]),
        serving.tracer.span(
            f"{request.method} {route.canonical if route else 'unknown'}",
            parent=request.headers.get("traceparent", ""),
            attributes={"http.request.method": request.method, "url.path": request.path},
            kind="server",
        ) as span,
    ):
        try:
            if request.path not in request.app[OPEN_PATHS]:
                _check_origin(request)
                caller = caller_of(request)
                request[CALLER], request[TENANT] = caller, caller.tenant
                serving.connections.serving(request.protocol)
            response = await handler(request)
        except asyncio.CancelledError:
            serving.metrics.disconnects.inc()
            span.fail("cancelled", "the client went away")
            raise
        except web.HTTPException as error:
            response = _refused(request, error)
        except Exception as error:
            known = known_error(error)
            serving.metrics.errors.labels(known.code).inc()
            log.info(
                "refused: %s",
                known.message,
                extra={"code": known.code, "path": request.path[:_PATH_CHARS_MAX]},
            )
            response = error_response(known, request)
            if known.http_status >= _SERVER_ERRORS:  # the client's mistakes are no failure of this server
                span.fail(known.code, known.message)
        if FAILED in request:
            span.fail(request[FAILED].code, request[FAILED].message)
        span.set("http.response.status_code", response.status)
        return response


def caller_of(request: web.Request) -> Caller:
    """By its key and the keys of now: a stream without an end asks again. Raises Unauthenticated."""
    return request.app[SERVING].tenants.authenticate(_authorization(request.headers))


def _check_origin(request: web.Request) -> None:
    """Raises PermissionDenied where a browser asks for a page that may not."""
    headers, origins = request.headers, request.app[SERVING].origins
    host = headers.get("Host", "")
    origins.check_host(host)
    origins.check_page(
        host=host,
        origin=headers.get("Origin"),
        site=headers.get("Sec-Fetch-Site"),
        navigates=request.method in _READING_METHODS and headers.get("Sec-Fetch-Dest") == "document",
    )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: streams too."""
    if ignored := request.get(IGNORED):
        # As in a URL: names may be any text.
        names = ",".join(quote(name, safe=".[]_-$") for name in ignored)
        response.headers[IGNORED_HEADER] = names[:_IGNORED_CHARS_MAX]
    if SESSION in request:
        response.headers[SESSION_HEADER] = request[SESSION]
    if VOLATILE_LINES in request:
        response.headers[VOLATILE_HEADER] = request[VOLATILE_LINES]
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
        if is_messages(request):
            response.headers["request-id"] = request[REQUEST_ID]


def request_id_of(given: str | None) -> str:
    """The client's id where it can stand in a header and a log line, else one of our own."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(12)}"


def known_error(error: Exception) -> KVCommonsError:
    """What the client is told. The unexpected is logged, and not told."""
    if isinstance(error, KVCommonsError):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("the request's deadline passed")
    log.error("a request failed unexpectedly", exc_info=error)
    return Internal("the request failed unexpectedly; the router's log says why, under its request id")


def error_response(error: KVCommonsError, request: web.Request | None = None) -> web.Response:
    """In the shape of the API that the request is of; in OpenAI's where nobody knows."""
    headers = {}
    if error.retry_after_ms:
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    body, status = error_body(error), error.http_status
    if request is not None and is_messages(request):
        body, status = messages.error_body(error, request[REQUEST_ID]), messages.status_of(error)
    return web.json_response(body, status=status, headers=headers)


def is_messages(request: web.Request) -> bool:
    """Whether it is of Anthropic's API: by its path, or by the header that its clients send to paths which
    OpenAI's API has, too."""
    return request.path.startswith(_MESSAGES_PATH) or "anthropic-version" in request.headers


def _authorization(headers: Mapping[str, str]) -> str | None:
    """The header Authorization, or what it would say for a key as clients of Anthropic's send it."""
    key = headers.get("x-api-key")
    return headers.get("Authorization") or (f"Bearer {key}" if key else None)


def _refused(request: web.Request, error: web.HTTPException) -> web.Response:
    """What aiohttp itself says no to: unknown paths, wrong methods, bodies too large."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(
            MethodNotAllowed(f"{request.method} is not allowed for {request.path}; allowed: {allowed}"),
            request,
        )
        response.headers["Allow"] = allowed
        return response
    if isinstance(error, web.HTTPNotFound):
        return error_response(
            NotFound(f"there is no path {request.path[:200]!r}; see /openapi.json"), request
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[SERVING].config.max_body_bytes
        return error_response(
            TooLarge(f"the body has more than {limit} bytes, which is the limit here"), request
        )
    return error_response(InvalidInput(error.reason), request)
