"""POST /v1/chat/completions"""

from __future__ import annotations

from aiohttp import web

from kvcommons.telemetry import logs
from services.router.api.answering import answer
from services.router.api.body import read_body, session_of
from services.router.api.retries import idempotent
from services.router.api.schemas.requests import ChatRequest, StreamOptions
from services.router.api.shapes import ChatShape
from services.router.http.middleware import IDEMPOTENCY, SERVING, TENANT
from services.router.turn.lifecycle import RequestLifecycle
from services.router.turn.sampling import logprobs_of


@idempotent
async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, ChatRequest)
    named = session_of(request, body.session_id)
    options = body.stream_options or StreamOptions.model_validate({})
    serving = request.app[SERVING]
    with logs.bound(session_id=named.id if named else ""):
        key = request.get(IDEMPOTENCY)
        async with RequestLifecycle(serving, tenant=request[TENANT], key=key) as lifecycle:
            await lifecycle.plan.chat(body, named, branches=True)
            shape = ChatShape(
                id=lifecycle.plan.turn_id,
                created_s=lifecycle.plan.created_s,
                model=lifecycle.plan.model,
                tokenizer=serving.text.tokenizer,
                logprobs=logprobs_of(body)[0],
                service_tier=lifecycle.plan.service.name,
                include_usage=bool(options.include_usage),
                include_stop=bool(body.include_stop_str_in_output),
                usage_so_far=(lambda: lifecycle.plan.turn.usage) if options.continuous_usage_stats else None,
                session_id=named.id if named and lifecycle.plan.session_id else None,
                branch=lifecycle.plan.branch,
                context=lifecycle.plan.answered_context,
                prompt_logprobs=body.prompt_logprobs,
            )
            return await answer(request, lifecycle, shape, stream=bool(body.stream))
