"""POST /v1/completions"""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvcommons.errors import UnsupportedParameter
from kvcommons.model.tokenizer import Tokenizer
from services.router.api.answering import answer
from services.router.api.body import read_body, session_of
from services.router.api.prompts import EchoedPrompt
from services.router.api.retries import idempotent
from services.router.api.schemas.requests import CompletionRequest, StreamOptions
from services.router.api.shapes import CompletionShape
from services.router.http.middleware import SERVING, TENANT
from services.router.turn.lifecycle import RequestLifecycle
from services.router.turn.plan import given_prompts
from services.router.turn.sampling import logprobs_of


@idempotent
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
        await lifecycle.plan.completion(body)
        shape = CompletionShape(
            id=lifecycle.plan.turn_id,
            created_s=lifecycle.plan.created_s,
            model=lifecycle.plan.model,
            tokenizer=serving.text.tokenizer,
            logprobs=logprobs_of(body)[0],
            service_tier=lifecycle.plan.service.name,
            include_usage=bool(options.include_usage),
            include_stop=bool(body.include_stop_str_in_output),
            usage_so_far=(lambda: lifecycle.plan.turn.usage) if options.continuous_usage_stats else None,
            echoes=await _echoes(body, lifecycle, serving.text.tokenizer),
            prompt_logprobs=body.prompt_logprobs,
        )
        return await answer(request, lifecycle, shape, stream=bool(body.stream))


async def _echoes(
    body: CompletionRequest, lifecycle: RequestLifecycle, tokenizer: Tokenizer
) -> list[EchoedPrompt]:
    """Of each choice, where they are wanted. A prompt that came as a text is repeated as that; of one that
    came as token ids, what they read."""
    if not body.echo:
        return []
    texts: list[str] = []
    for given in given_prompts(body):
        if isinstance(given, str):
            texts.append(given)
        else:
            texts.append(await asyncio.to_thread(tokenizer.decode, given))
    return [
        EchoedPrompt(
            tokenizer=tokenizer,
            tokens=choice.prompt,
            text=texts[choice.index // (body.n or 1)],
            read=choice.prompt_logprobs if body.logprobs is not None else None,
            top=body.logprobs or 0,
        )
        for choice in lifecycle.plan.turn.choices
    ]
