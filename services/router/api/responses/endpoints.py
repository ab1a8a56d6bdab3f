"""/v1/responses"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from kvcommons.errors import InvalidInput, TurnInProgress, VersionConflict
from kvcommons.telemetry import logs
from services.router.api.answering import answer
from services.router.api.body import read_body, session_of
from services.router.api.renaming import fields_renamed
from services.router.api.responses import translation
from services.router.api.responses.custom_tools import checked_texts
from services.router.api.responses.history import History, history_of, new_session_id, stored_response
from services.router.api.responses.ids import StoredResponse, unstored_id
from services.router.api.responses.requests import InputTokensRequest, ResponsesRequest
from services.router.api.responses.shape import ResponsesShape, stored_body
from services.router.api.retries import idempotent
from services.router.api.schemas.requests import ChatRequest
from services.router.api.schemas.validation import validate
from services.router.http.middleware import IDEMPOTENCY, SERVING, TENANT
from services.router.sessions.naming import NamedSession
from services.router.turn.lifecycle import RequestLifecycle
from services.router.turn.planning import RequestPlan
from services.router.turn.sampling import logprobs_of


@idempotent
async def create_response(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, ResponsesRequest)
    stores = body.store is not False
    if body.conversation is not None and not stores:
        raise InvalidInput(
            "a response of a conversation is stored in it: leave store out, or send no conversation",
            param="store",
        )
    with fields_renamed(translation.FIELDS):
        return await _created(request, body, stores=stores)


async def _created(request: web.Request, body: ResponsesRequest, *, stores: bool) -> web.StreamResponse:
    serving, tenant = request.app[SERVING], request[TENANT]
    chat = validate(ChatRequest, translation.chat_body(body))
    texts = await checked_texts(body, tenant.name, serving.grammars)
    history = await history_of(serving, tenant, body)
    named = None
    if body.conversation is None and body.previous_response_id is None:
        named = session_of(request, None)
    key = request.get(IDEMPOTENCY)
    async with RequestLifecycle(serving, tenant=tenant, key=key) as lifecycle:
        session_id = await _plan(
            lifecycle.plan, chat, history, named, stores=stores, new_id=new_session_id(key), texts=texts
        )
        with logs.bound(session_id=session_id or ""):
            shape = ResponsesShape(
                id=_id(lifecycle.plan, history, session_id if stores else None),
                created_s=lifecycle.plan.created_s,
                model=lifecycle.plan.model,
                request=body,
                service_tier=lifecycle.plan.service.name,
                session_id=session_id,
                custom_tools=translation.custom_tools(body),
                tokenizer=serving.text.tokenizer,
                logprobs=logprobs_of(chat)[0],
            )
            return await answer(request, lifecycle, shape, stream=bool(body.stream))


async def count_input_tokens(request: web.Request) -> web.Response:
    body = await read_body(request, InputTokensRequest)
    serving, tenant = request.app[SERVING], request[TENANT]
    chat = validate(ChatRequest, translation.chat_body(body))
    history = await history_of(serving, tenant, body)
    async with RequestLifecycle(serving, tenant=tenant) as lifecycle:
        await lifecycle.plan.chat(chat, None, before=history.messages)
        tokens = lifecycle.plan.turn.usage.prompt_tokens
    return web.json_response({"object": "response.input_tokens", "input_tokens": tokens})


async def get_response(request: web.Request) -> web.Response:
    id = request.match_info["id"]
    if request.query.get("stream") == "true":
        raise InvalidInput("a stored response is not streamed again: leave stream out", param="stream")
    stored, record = await stored_response(request.app[SERVING], request[TENANT], id, param="id")
    return web.json_response(stored_body(stored, record))


async def _plan(
    plan: RequestPlan,
    chat: ChatRequest,
    history: History,
    named: NamedSession | None,
    *,
    stores: bool,
    new_id: str,
    texts: Mapping[str, str],
) -> str | None:
    """Plans the turn; in the session that a header names, or in the history's where that goes on as it
    stands, else in a new one. Returns the session's id, None where nothing is stored. A request that was
    answered in one of them is told that again."""
    if named is not None:  # which keeps the conversation, whether the response itself is stored or not
        await plan.chat(chat, named, before=history.messages, branches=True, whole=True, texts=texts)
        return plan.session_id or None
    if not stores:
        await plan.chat(chat, None, before=history.messages, texts=texts)
        return None
    # Where it was answered before, that may be in either, whichever it would go on in now.
    others = [one for one in (history.of_session, new_id) if one]
    if history.session_id is not None:
        before = history.messages if history.held is None else history.instructions
        of_history = NamedSession(id=history.session_id)
        try:
            await plan.chat(chat, of_history, before=before, held=history.held, texts=texts, others=others)
            return plan.session_id
        except (TurnInProgress, VersionConflict):
            if history.held is None:
                raise  # a conversation has one turn at a time
    await plan.chat(chat, NamedSession(id=new_id), before=history.messages, texts=texts, others=others)
    return plan.session_id


def _id(plan: RequestPlan, history: History, session_id: str | None) -> str:
    if session_id is None:
        return unstored_id(plan.turn_id)
    instructed = history.instructed
    return StoredResponse(session_id=session_id, messages=plan.messages_after, instructed=instructed).id
