"""What a request's query says."""

from __future__ import annotations

from aiohttp import web

from kvcommons.errors import InvalidInput

LIMIT_DEFAULT = 20
LIMIT_MAX = 100
_DIGITS_MAX = 9


def limit_of(request: web.Request) -> int:
    """How many entries of a list are wanted. Raises InvalidInput."""
    given = request.query.get("limit", str(LIMIT_DEFAULT))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:_DIGITS_MAX]) <= LIMIT_MAX:
        raise InvalidInput(f"limit is a number from 1 to {LIMIT_MAX}", param="limit")
    return int(given)


def wants_stream(request: web.Request) -> bool:
    """Of a GET. Raises InvalidInput."""
    wanted = request.query.get("stream", "false")
    if wanted not in ("true", "false"):
        raise InvalidInput('stream is "true" or "false"', param="stream")
    return wanted == "true"
