"""Bodies of the Responses and Conversations API's answers and events, as /openapi.json describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from services.router.api.schemas.answers import (
    AnswerBody,
    OutputTokensDetails,
    PromptTokensDetails,
    TokenLogprob,
)

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(AnswerBody):
    type: Literal["reasoning_text"]
    text: str


class OutputText(AnswerBody):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[TokenLogprob]


class OutputReasoning(AnswerBody):
    id: str
    type: Literal["reasoning"]
    summary: list[Json]
    content: list[ReasoningText]
    status: Status


class OutputMessage(AnswerBody):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Status


class OutputFunctionCall(AnswerBody):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputCustomCall(AnswerBody):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    status: Status


OutputItem = OutputReasoning | OutputMessage | OutputFunctionCall | OutputCustomCall


class InputTextPart(AnswerBody):
    type: Literal["input_text"]
    text: str


class InputMessageItem(AnswerBody):
    id: str
    type: Literal["message"]
    role: str
    content: list[InputTextPart]
    status: Status


class CallOutputItem(AnswerBody):
    id: str
    type: Literal["function_call_output"]
    call_id: str
    output: str
    status: Status


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int = Field(description="0: nothing extra is paid for what is kept.")


class ResponseUsage(AnswerBody):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(AnswerBody):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(AnswerBody):
    reason: Literal["max_output_tokens"]


class ConversationName(AnswerBody):
    id: str


class Response(AnswerBody):
    """Of a stored response that is read again, what its request asked for is not kept: those fields are as if
    it had asked for nothing."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationName | None
    prompt_cache_key: str | None
    reasoning: Json
    safety_identifier: str | None
    service_tier: str = Field(description="The class of service that was used.")
    session_id: str | None = Field(description="The session that the response is stored in.")
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = Field(description="null until the response has ended, and when read again.")
    user: str | None = Field(None, description="Where the request had one.")
    metadata: dict[str, str]


class ResponseEvent(AnswerBody):
    """One event of a stream; which fields it has beside these two depends on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: Response | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[TokenLogprob] | None = None


class InputTokens(AnswerBody):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Conversation(AnswerBody):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(AnswerBody):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class ConversationItem(RootModel[OutputItem | InputMessageItem | CallOutputItem]):
    """What somebody said, a call, or its result."""


class ItemList(AnswerBody):
    object: Literal["list"]
    data: list[ConversationItem]
    first_id: str = Field(description="Of an empty list it is empty.")
    last_id: str
    has_more: bool
