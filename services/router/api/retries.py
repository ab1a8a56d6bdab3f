"""POSTs that make a turn, when they come again with one Idempotency-Key."""

from __future__ import annotations

from functools import wraps

from aiohttp import web

from services.router.api.body import AGENT_HEADERS, SESSION_HEADERS, read_bytes
from services.router.http.middleware import IDEMPOTENCY, KEPT_ANSWER, SERVING, TENANT, Handler
from services.router.turn.idempotency import HEADER, REPLAYED_HEADER, KeptAnswer, RequestKey


def idempotent(handler: Handler) -> Handler:
    """The handler, which is not asked for an answer that this router has kept, or that is under way here;
    what is in a session it finds itself. A failure is not kept."""

    @wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        given = request.headers.getall(HEADER, ())
        if not given:
            return await handler(request)
        serving = request.app[SERVING]
        names = (*SESSION_HEADERS, *AGENT_HEADERS)
        sessions = [f"{name}:{value}" for name in names for value in request.headers.getall(name, ())]
        parts = [request.method, request.path, *sessions]
        key = RequestKey.of(
            request[TENANT].name,
            given,
            [*(part.encode(errors="surrogateescape") for part in parts), await read_bytes(request)],
        )
        kept = serving.answers.begin(key, serving.clock())
        if kept is not None and kept.body is not None:
            headers = {"Content-Type": kept.content_type, REPLAYED_HEADER: "true"}
            return web.Response(body=kept.body, headers=headers)
        request[IDEMPOTENCY] = key
        try:
            return await handler(request)
        finally:
            serving.answers.end(key, request.get(KEPT_ANSWER), serving.clock())

    return handle


def keep(request: web.Request, answer: KeptAnswer) -> None:
    """It is given again where the request comes again."""
    if IDEMPOTENCY in request:
        request[KEPT_ANSWER] = answer
