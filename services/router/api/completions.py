"""POST /v1/completions"""

from __future__ import annotations

from aiohttp import web

from kvcommons.errors import UnsupportedParameter
from services.router.api.answering import answer
from services.router.api.body import read_body, session_of
from services.router.api.schemas.requests import CompletionRequest, StreamOptions
from services.router.api.shapes import CompletionShape
from services.router.http.middleware import SERVING, TENANT
from services.router.turn.lifecycle import RequestLifecycle
from services.router.turn.sampling import logprobs_of


async def completions(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, CompletionRequest)
    if session_of(request, None) is not None:
        raise UnsupportedParameter(
            "sessions are conversations: use /v1/chat/completions, or leave the session header out",
            param="session_id",
        )
    options = body.stream_options or StreamOptions.model_validate({})
    serving = request.app[SERVING]
    async with RequestLifecycle(serving, tenant=request[TENANT]) as lifecycle:
        await lifecycle.plan_completion(body)
        shape = CompletionShape(
            id=lifecycle.turn_id,
            created_s=lifecycle.created_s,
            model=lifecycle.model,
            tokenizer=serving.text.tokenizer,
            logprobs=logprobs_of(body)[0],
            service_tier=lifecycle.service.name,
            include_usage=bool(options.include_usage),
            include_stop=bool(body.include_stop_str_in_output),
            usage_so_far=(lambda: lifecycle.turn.usage) if options.continuous_usage_stats else None,
        )
        return await answer(request, lifecycle, shape, stream=bool(body.stream))
