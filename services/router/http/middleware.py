"""The middleware that all paths pass: request id, authentication, and every failure in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvcommons.errors import (
    DeadlineExceeded,
    Internal,
    InvalidInput,
    KVCommonsError,
    NotFound,
    TooLarge,
    Unauthenticated,
)
from kvcommons.telemetry import logs
from services.router.api.shapes import error_body
from services.router.http.tenants import Tenant
from services.router.serving import Serving

log = logging.getLogger(__name__)

SERVING = web.AppKey("serving", Serving)
TENANT = web.RequestKey("tenant", Tenant)
REQUEST_ID = web.RequestKey("request_id", str)
FAILED = web.RequestKey("failed", KVCommonsError)  # of a stream that had begun, as a 200

# Load balancers ask for health without a key, and it tells nothing but that.
_OPEN_PATHS = frozenset({"/health"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_METHOD_NOT_ALLOWED = 405
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
            if request.path not in _OPEN_PATHS:
                request[TENANT] = serving.tenants.authenticate(request.headers.get("Authorization"))
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
            log.info("refused: %s", known.message, extra={"code": known.code, "path": request.path})
            response = error_response(known)
            if known.http_status >= _SERVER_ERRORS:  # the client's mistakes are no failure of this server
                span.fail(known.code, known.message)
        if FAILED in request:
            span.fail(request[FAILED].code, request[FAILED].message)
        span.set("http.response.status_code", response.status)
        return response


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: streams too."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


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


def error_response(error: KVCommonsError) -> web.Response:
    headers = {}
    if error.retry_after_ms:
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error_body(error), status=error.http_status, headers=headers)


def _refused(request: web.Request, error: web.HTTPException) -> web.Response:
    """What aiohttp itself says no to: unknown paths, wrong methods, bodies too large."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        wrong = InvalidInput(f"{request.method} is not allowed for {request.path}; allowed: {allowed}")
        body = error_body(wrong)
        body["error"]["code"] = "method_not_allowed"
        return web.json_response(body, status=_METHOD_NOT_ALLOWED, headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return error_response(NotFound(f"there is no path {request.path[:200]!r}; see /openapi.json"))
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.app[SERVING].config.max_body_bytes
        return error_response(TooLarge(f"the body has more than {limit} bytes, which is the limit here"))
    return error_response(InvalidInput(error.reason))
