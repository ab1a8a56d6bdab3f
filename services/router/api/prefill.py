"""/v1/sessions/{id}/prefill: a document becomes a session's context in the background"""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvcommons.errors import Conflict, KVCommonsError, NotFound
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.telemetry import logs
from services.router.api import sse
from services.router.api.answering import events_of
from services.router.api.body import read_body
from services.router.api.query import wants_stream
from services.router.api.schemas.requests import SessionPrefill
from services.router.api.sessions import session_id_in_path
from services.router.api.shapes import Json, error_body
from services.router.documents.beginning import begin_document
from services.router.documents.document import Document, DocumentStatus
from services.router.documents.documents import Key
from services.router.documents.progress import percent_of
from services.router.http.middleware import SERVING, TENANT
from services.router.serving import Serving

_ACCEPTED = 202
_PATIENCE_S = 5.0  # with a store that restarts
_EVENT_S = 5.0  # what is not new is told again so often: a connection that says nothing may be a dead one
_LOOK_S = 1.0  # at a document of another router


async def begin_prefill(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, SessionPrefill)
    session_id = session_id_in_path(request)
    serving = request.app[SERVING]
    with logs.bound(session_id=session_id):
        document = await begin_document(
            serving,
            request[TENANT],
            session_id,
            content=body.content,
            role=body.role,
            model_name=body.model,
        )
        if body.stream:
            return await _events(request, (request[TENANT].name, session_id))
        return web.json_response(_of_document(document), status=_ACCEPTED)


async def get_prefill(request: web.Request) -> web.StreamResponse:
    key = request[TENANT].name, session_id_in_path(request)
    streams = wants_stream(request)
    state = await _state(request.app[SERVING], key)
    return await _events(request, key) if streams else web.json_response(state)


async def cancel_prefill(request: web.Request) -> web.Response:
    """What was computed of it stays in the store, as that of any prompt."""
    key = request[TENANT].name, session_id_in_path(request)
    serving = request.app[SERVING]
    document = serving.documents.running(key)
    if document is not None:
        await serving.documents.cancel(key)
        return web.json_response(_of_document(document))
    for one in await serving.store.documents(*key, patience_s=_PATIENCE_S):
        await serving.store.abandon_document(one, patience_s=_PATIENCE_S)
        return web.json_response(_shown(one.turn_id, key[1], one.state, DocumentStatus.CANCELLED))
    raise _none_there(key)


async def _state(serving: Serving, key: Key) -> Json:
    """As whoever knows best says: this router, if the document is its own, or its record. Raises NotFound."""
    document = serving.documents.running(key)
    if document is not None:
        return _of_document(document)
    for one in await serving.store.documents(*key, patience_s=_PATIENCE_S):
        return _shown(one.turn_id, key[1], one.state, DocumentStatus.RUNNING)
    document = serving.documents.ended(key)
    if document is None:
        raise _none_there(key)
    return _of_document(document)


async def _events(request: web.Request, key: Key) -> web.StreamResponse:
    """The document's state whenever it is new, to its end. It goes on though the client goes away; for how
    long one that reads nothing is waited for, its connection says."""
    serving = request.app[SERVING]
    state: Json = {}
    async with events_of(request) as response:
        while True:
            state = await _next_state(serving, key, state)
            status = state["status"]
            last = sse.DONE if status == DocumentStatus.COMPLETED.value else b""
            await response.write(sse.event(state) + last)
            if status != DocumentStatus.RUNNING.value:
                break
            document = serving.documents.running(key)
            if document is not None:
                await document.changed(_EVENT_S)
            else:
                await asyncio.sleep(_LOOK_S)
    return response


async def _next_state(serving: Serving, key: Key, before: Json) -> Json:
    """After `before`. A document that another router has brought to its end is found in its session."""
    try:
        return await _state(serving, key)
    except NotFound:
        if not before:
            raise
    record = await serving.store.get(*key, patience_s=_PATIENCE_S)
    if f"prefill-{record.last_turn_id}" != before["id"]:
        raise Conflict("the document came to its end at another router: see what the session has")
    tokens = before["tokens"]
    done = {"computed_tokens": tokens, "percent": 100.0, "seconds_left": None, "waits_for": None}
    return before | done | {"status": DocumentStatus.COMPLETED.value}


def _of_document(document: Document) -> Json:
    error = document.error
    return _shown(document.turn_id, document.session_id, document.state, document.status, error)


def _shown(
    turn_id: str,
    session_id: str,
    state: pb.DocumentState,
    status: DocumentStatus,
    error: KVCommonsError | None = None,
) -> Json:
    # For whoever asks, one that this router leaves goes on.
    running = status in (DocumentStatus.RUNNING, DocumentStatus.LEFT)
    return {
        "id": f"prefill-{turn_id}",
        "object": "session.prefill",
        "created": state.begun_ms // 1000,
        "session_id": session_id,
        "model": state.model_name,
        "role": state.role,
        "status": DocumentStatus.RUNNING.value if running else status.value,
        "tokens": state.tokens,
        "computed_tokens": state.computed_tokens,
        "percent": percent_of(state.computed_tokens, state.tokens),
        "tokens_per_s": round(state.tokens_per_s, 1) or None,
        "seconds_left": (state.left_ms / 1000 or None) if running else None,
        "waits_for": (state.waits_for or None) if running else None,
        "error": error_body(error)["error"] if error is not None else None,
    }


def _none_there(key: Key) -> NotFound:
    return NotFound(f"no document is on its way into the session {key[1]!r}", param="id")
