"""/v1/messages"""

from __future__ import annotations

from aiohttp import web

from kvcommons.telemetry import logs
from services.router.api.answering import answer
from services.router.api.body import read_body, session_of
from services.router.api.messages.requests import MessagesRequest, TokenCountRequest
from services.router.api.messages.shape import MessagesShape
from services.router.api.messages.translation import FIELDS, chat_body
from services.router.api.renaming import fields_renamed
from services.router.api.retries import idempotent
from services.router.api.schemas.requests import ChatRequest
from services.router.api.schemas.validation import validate
from services.router.http.middleware import IDEMPOTENCY, REQUEST_ID, SERVING, TENANT
from services.router.turn.lifecycle import RequestLifecycle


@idempotent
async def create_message(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, MessagesRequest)
    named = session_of(request, None)
    with logs.bound(session_id=named.id if named else ""), fields_renamed(FIELDS):
        chat = validate(ChatRequest, chat_body(body))
        key = request.get(IDEMPOTENCY)
        async with RequestLifecycle(request.app[SERVING], tenant=request[TENANT], key=key) as lifecycle:
            await lifecycle.plan.chat(chat, named, branches=True, whole=True)
            plan = lifecycle.plan
            shape = MessagesShape(id=plan.turn_id, model=plan.model, request_id=request[REQUEST_ID])
            return await answer(request, lifecycle, shape, stream=bool(body.stream))


async def count_tokens(request: web.Request) -> web.Response:
    body = await read_body(request, TokenCountRequest)
    chat = validate(ChatRequest, chat_body(body))
    async with RequestLifecycle(request.app[SERVING], tenant=request[TENANT]) as lifecycle:
        await lifecycle.plan.chat(chat, None)
        tokens = lifecycle.plan.turn.usage.prompt_tokens
    return web.json_response({"input_tokens": tokens})
