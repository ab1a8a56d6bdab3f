"""POST /tokenize and /detokenize, in vLLM's shapes: what a prompt comes to before it is sent."""

from __future__ import annotations

import asyncio
from typing import Annotated, ClassVar

from aiohttp import web
from pydantic import Field

from kvcommons.errors import ContextLengthExceeded, InvalidInput
from services.router.api.body import read_body
from services.router.api.schemas.answers import AnswerBody
from services.router.api.schemas.body import Body
from services.router.api.schemas.messages import MESSAGES_MAX, ChatMessage
from services.router.api.schemas.requests import ChatRequest
from services.router.http.middleware import SERVING
from services.router.serving import Serving
from services.router.turn.plan import messages_of
from services.router.turn.volatile import VolatileLines

_Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]


class TokenizeRequest(Body):
    """POST /tokenize: of a `prompt`, or of `messages` as a chat without a session would render them."""

    CHAT_MESSAGES: ClassVar[bool] = True

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="What the tokenizer puts around a prompt. Default: true. Not with messages.",
    )
    return_token_strs: bool | None = Field(None, description="The text of each token as well.")


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class Tokenized(AnswerBody):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(AnswerBody):
    prompt: str = Field(description="Control tokens are left out.")


async def tokenize(request: web.Request) -> web.Response:
    body = await read_body(request, TokenizeRequest)
    serving = request.app[SERVING]
    model = serving.fleet.model(body.model)
    tokens = await _tokens(serving, body, model.context_window)
    tokenizer = serving.text.tokenizer
    return web.json_response(
        {
            "count": len(tokens),
            "max_model_len": model.context_window,
            "tokens": tokens,
            "token_strs": [tokenizer.token_text(one) for one in tokens] if body.return_token_strs else None,
        }
    )


async def _tokens(serving: Serving, body: TokenizeRequest, window: int) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("send prompt or messages, one of them", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise InvalidInput(
                "add_special_tokens is for prompt: messages have what the template gives them; leave it out",
                param="add_special_tokens",
            )
        new = messages_of(ChatRequest.model_validate({"messages": body.messages}))
        served = VolatileLines.of(new, serving.config.volatile_lines).messages
        return await serving.text.chat([], [], served, window=window)
    prompt = body.prompt or ""
    tokens = await serving.text.completion(prompt, window=window)
    if body.add_special_tokens is False:  # its length is checked now
        return await asyncio.to_thread(serving.text.tokenizer.encode_text, prompt)
    return tokens


async def detokenize(request: web.Request) -> web.Response:
    body = await read_body(request, DetokenizeRequest)
    serving = request.app[SERVING]
    model = serving.fleet.model(body.model)
    if len(body.tokens) > model.context_window:
        raise ContextLengthExceeded(
            f"{len(body.tokens)} tokens, and the context window has {model.context_window}", param="tokens"
        )
    for token in body.tokens:
        if not 0 <= token < model.vocab_size:
            raise InvalidInput(f"tokens: the model has no token {token}", param="tokens")
    text = await asyncio.to_thread(serving.text.tokenizer.decode, body.tokens)
    return web.json_response({"prompt": text})
