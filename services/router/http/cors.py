"""Which web pages may call this server from a browser (CORS), by the setting `cors_origins`.

A browser asks before it sends a key (a preflight, which has none itself), and shows a page only answers that
name its origin. Without the setting nothing is allowed, and nothing is said.
"""

from __future__ import annotations

from aiohttp import web

from services.router.http.middleware import (
    IGNORED_HEADER,
    SERVING,
    SESSION_HEADER,
    VOLATILE_HEADER,
    Handler,
)
from services.router.turn.idempotency import REPLAYED_HEADER

_PREFLIGHT_S = 600  # how long a browser may keep the answer
_NO_CONTENT = 204
_VARY = "Origin, Access-Control-Request-Headers"
# Of answers, by a page: all that this server says of its own in headers, and Anthropic's name of the id.
_READABLE = ", ".join(
    (
        "X-Request-Id",
        "request-id",
        "Retry-After",
        "Server-Timing",
        REPLAYED_HEADER,
        SESSION_HEADER,
        VOLATILE_HEADER,
        IGNORED_HEADER,
    )
)


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers preflights of origins that are allowed; before the key is asked for."""
    asked = request.headers.get("Access-Control-Request-Method")
    if request.method == "OPTIONS" and asked is not None and _allowed(request):
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
            "Access-Control-Max-Age": str(_PREFLIGHT_S),
            "Vary": _VARY,
        }
        if wanted := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=_NO_CONTENT, headers=headers)
    return await handler(request)


async def add_allowed_origin(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: streams and refusals too."""
    if _allowed(request):
        response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
        response.headers["Access-Control-Expose-Headers"] = _READABLE
        response.headers.setdefault("Vary", "Origin")


def _allowed(request: web.Request) -> bool:
    origin = request.headers.get("Origin")
    return origin is not None and request.app[SERVING].origins.allows(origin)
