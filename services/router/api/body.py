"""From an HTTP request to its validated body and the session that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from aiohttp import web

from kvcommons.errors import DeadlineExceeded, InvalidInput, UnsupportedParameter
from services.router.api.schemas.body import Body
from services.router.api.schemas.requests import SESSION_ID_CHARS_MAX, check_session_id
from services.router.api.schemas.validation import parse_json, validate, validate_known
from services.router.http.middleware import IDEMPOTENCY, IGNORED, SERVING
from services.router.sessions.naming import NamedSession, agents_session
from services.router.turn.idempotency import HEADER

B = TypeVar("B", bound=Body)

# The form of another site's page can send a body of other types without asking first (a preflight).
_CONTENT_TYPE = "application/json"
_SHOWN_CHARS_MAX = 80
SESSION_HEADERS = ("X-Session-ID", "session-id", "x-claude-code-session-id")
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")


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


def session_of(request: web.Request, in_body: str | None) -> NamedSession | None:
    """The one session of a request. An id in its body is taken as it is; one in a header is joined with that
    of an agent, where another header has it. Raises InvalidInput where several ids differ."""
    in_headers = _header_id(request, SESSION_HEADERS)
    if in_body is not None:
        if in_headers not in (None, in_body):
            raise _several("session_id")
        return NamedSession(id=in_body)
    if in_headers is None:
        return None
    named = agents_session(in_headers, _header_id(request, AGENT_HEADERS))
    if len(named.id) > SESSION_ID_CHARS_MAX:
        raise InvalidInput(
            f"the ids of session and agent have {len(named.id)} characters together, as {named.id[:40]!r}…, "
            f"and {SESSION_ID_CHARS_MAX} are the limit: send shorter ones",
            param="session_id",
        )
    return named


def _header_id(request: web.Request, headers: Sequence[str]) -> str | None:
    """The one id that is in any of the headers. Raises InvalidInput."""
    found: set[str] = set()
    for header in headers:
        for value in request.headers.getall(header, ()):
            try:
                found.add(check_session_id(value))
            except ValueError as error:
                raise InvalidInput(f"{header}: {error}", param=header) from None
    if len(found) > 1:
        raise _several("session_id" if headers is SESSION_HEADERS else headers[0])
    return found.pop() if found else None


def _several(param: str) -> InvalidInput:
    what = "sessions, in its body or in headers" if param == "session_id" else "agents in headers"
    return InvalidInput(f"the request names several {what}: send one id", param=param)
