"""Bodies of Anthropic's answers and events, as /openapi.json describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.router.api.schemas.answers import AnswerBody


class MessagesUsage(AnswerBody):
    input_tokens: int = Field(description="Of the prompt: computed. Those of the cache are not among them.")
    cache_creation_input_tokens: int = Field(description="0: nothing extra is paid for what is kept.")
    cache_read_input_tokens: int = Field(description="Of the prompt: their KV was found and not computed.")
    output_tokens: int
    service_tier: Literal["standard"] | None = None


class MessagesText(AnswerBody):
    type: Literal["text"]
    text: str
    citations: None = None


class MessagesThinking(AnswerBody):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Empty: nothing is signed.")


class MessagesToolUse(AnswerBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesAnswer(AnswerBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessagesText | MessagesThinking | MessagesToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesEvent(AnswerBody):
    """One event of a stream; which fields it has beside `type` depends on that."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessagesAnswer | None = None
    index: int | None = None
    content_block: MessagesText | MessagesThinking | MessagesToolUse | None = None
    delta: dict[str, Any] | None = None
    usage: MessagesUsage | None = None
    error: dict[str, Any] | None = None
    request_id: str | None = None


class TokenCount(AnswerBody):
    input_tokens: int


class MessagesErrorBody(AnswerBody):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    ]
    message: str
    details: dict[str, Any] | None = None


class MessagesError(AnswerBody):
    type: Literal["error"]
    error: MessagesErrorBody
    request_id: str
