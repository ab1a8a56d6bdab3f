"""From an HTTP request to its validated body and its session id."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from aiohttp import web

from kvcommons.errors import DeadlineExceeded, InvalidInput, UnsupportedParameter
from services.router.api.schemas.body import Body
from services.router.api.schemas.requests import check_session_id
from services.router.api.schemas.validation import parse_json, validate, validate_known
from services.router.http.middleware import IDEMPOTENCY, IGNORED, SERVING
from services.router.turn.idempotency import HEADER

B = TypeVar("B", bound=Body)

# The form of another site's page can send a body of other types without asking first (a preflight).
_CONTENT_TYPE = "application/json"
_SHOWN_CHARS_MAX = 80
SESSION_HEADERS = ("X-Session-ID", "session-id", "x-claude-code-session-id")


async def read_body(request: web.Request, schema: type[B], *, may_be_empty: bool = False) -> B:
    """Raises InvalidInput, HTTPRequestEntityTooLarge, and DeadlineExceeded when it does not come in
    time."""
    if HEADER in request.headers and IDEMPOTENCY not in request:
        raise UnsupportedParameter(
            f"{HEADER} is of requests that make a turn, and {request.path[:_SHOWN_CHARS_MAX]} makes none: "
            "leave it out",
            param=HEADER,
        )
    config = request.app[SERVING].config
    body = await read_bytes(request)
    if may_be_empty and not body:
        return validate(schema, {})
    if body and request.content_type != _CONTENT_TYPE:
        raise InvalidInput(
            f"the body has to be {_CONTENT_TYPE}, and the header Content-Type says "
            f"{request.headers.get('Content-Type', 'nothing')[:_SHOWN_CHARS_MAX]!r}: send "
            f"'Content-Type: {_CONTENT_TYPE}'",
            param="Content-Type",
        )
    value = parse_json(body)
    if config.unknown_fields == "refuse":
        return validate(schema, value)
    known, request[IGNORED] = validate_known(schema, value)
    return known


async def read_bytes(request: web.Request) -> bytes:
    """The body as it came; a second time at once. Raises as `read_body` does."""
    config = request.app[SERVING].config
    limit = config.max_body_bytes
    announced = request.content_length or 0
    if announced > limit:  # no need to wait for it
        raise web.HTTPRequestEntityTooLarge(limit, announced)
    try:
        async with asyncio.timeout(config.body_s):
            return await request.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not come within {config.body_s:g} s") from None
    except web.RequestPayloadError:
        raise InvalidInput(
            "the body cannot be read: it is not what Content-Encoding says, or its chunks are broken"
        ) from None


def session_id_of(request: web.Request, in_body: str | None) -> str | None:
    """The one session id of a request, from its body or a header. Raises InvalidInput where several
    differ."""
    found = {in_body} if in_body is not None else set()
    for header in SESSION_HEADERS:
        for value in request.headers.getall(header, ()):
            try:
                found.add(check_session_id(value))
            except ValueError as error:
                raise InvalidInput(f"{header}: {error}", param=header) from None
    if len(found) > 1:
        raise InvalidInput(
            "the request names several sessions, in its body or in headers: send one id", param="session_id"
        )
    return found.pop() if found else None
