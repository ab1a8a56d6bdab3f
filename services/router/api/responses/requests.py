"""Bodies of POST /v1/responses and /v1/conversations, in OpenAI's shapes.

Items of `input` may have fields that are not named here: clients send back what they were answered, by this
server or by another one."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from kvcommons.errors import InvalidInput
from services.router.api.schemas.body import Body, Elsewhere, JsonObject, NotBuilt
from services.router.api.schemas.messages import MESSAGES_MAX
from services.router.api.schemas.requests import (
    TOP_LOGPROBS_MAX,
    Metadata,
    SessionId,
    check_streamed,
)

_NO_EFFECT = "Accepted, no effect."

# Calls that OpenAI's servers run by themselves, and marks of theirs: nothing in them is for this model.
HOSTED_ITEMS = frozenset(
    (
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "compaction",
        "compaction_trigger",
        "item_reference",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
    )
)


class Item(Body):
    """Of `input`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class InputText(Item):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Item):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Texts = Annotated[
    list[Annotated[InputText | RefusalPart, Field(discriminator="type")]], Field(fail_fast=True)
]


class MessageItem(Item):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Texts


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Texts


class CustomToolCallItem(Item):
    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str
    input: str


class CustomToolCallOutputItem(Item):
    type: Literal["custom_tool_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Texts


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Texts | None = None
    content: Texts | None = None


class HostedItem(Item):
    """Left out."""

    type: str


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return "hosted" if kind in HOSTED_ITEMS else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[HostedItem, Tag("hosted")],
    Discriminator(_item_kind),
]
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]


class OfferedFunction(Item):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class CustomFormat(Item):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _check(self) -> CustomFormat:
        if self.type == "grammar" and not (self.syntax and self.definition):
            raise ValueError('a grammar needs a syntax, "lark" or "regex", and its definition')
        if self.type == "text" and (self.syntax or self.definition):
            raise ValueError('syntax and definition belong to type "grammar", and to no other')
        return self


class OfferedCustomTool(Item):
    """Its input is text, which keeps to its format where that is a grammar."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class HostedTool(Item):
    """One that other servers run: tolerated, and not offered to the model."""

    type: str


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "custom") else "hosted"


Tool = Annotated[
    Annotated[OfferedFunction, Tag("function")]
    | Annotated[OfferedCustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_kind),
]


class NamedTool(Item):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(Item):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
)


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description=_NO_EFFECT)
    description: str | None = Field(None, description=_NO_EFFECT)
    schema_: JsonObject | None = Field(None, alias="schema", description="A JSON Schema of the answer.")
    strict: bool | None = Field(None, description="Accepted: answers always keep to the schema.")

    @model_validator(mode="after")
    def _check(self) -> TextFormat:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError('schema belongs to type "json_schema", and to no other')
        return self


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=_NO_EFFECT)


class ConversationRef(Body):
    id: SessionId


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is sent.")


class InputTokensRequest(Body):
    """POST /v1/responses/input_tokens"""

    NOT_BUILT: ClassVar[NotBuilt] = {
        "prompt": "prompts are not stored here: send instructions and input",
        "background": "not built: stream the answer, or wait for it",
    }
    ELSEWHERE: ClassVar[Elsewhere] = {
        "messages": "use input here, or /v1/chat/completions",
        "system": "it is of /v1/messages: use instructions",
        "max_tokens": "it is of the other APIs: use max_output_tokens",
        "max_completion_tokens": "it is of /v1/chat/completions: use max_output_tokens",
        "response_format": "it is of /v1/chat/completions: use text.format",
        "output_config": "it is of /v1/messages: use text.format",
        "structured_outputs": "use text.format here, or /v1/chat/completions",
        "guided_json": "vLLM's: use text.format here",
        "guided_regex": "vLLM's: use structured_outputs of /v1/chat/completions",
        "guided_choice": "vLLM's: use structured_outputs of /v1/chat/completions",
        "guided_grammar": "vLLM's: use structured_outputs of /v1/chat/completions",
        "reasoning_effort": "it is of /v1/chat/completions: use reasoning",
        "session_id": "use conversation here, which may be any session's id",
        "stop": "use /v1/chat/completions",
        "seed": "use /v1/chat/completions",
        "n": "use /v1/chat/completions",
        "prediction": "use /v1/chat/completions",
        "logprobs": "use top_logprobs",
        "functions": "use tools",
        "function_call": "use tool_choice",
    }

    model: str | None = Field(None, description="As GET /v1/models shows it; the default one where absent.")
    input: str | Items | None = None
    instructions: str | None = Field(
        None, description="What stands before the conversation; of this request only."
    )
    previous_response_id: str | None = Field(
        None, description="A stored response, of which this one goes on. An older one branches."
    )
    conversation: SessionId | ConversationRef | None = Field(
        None, description="A conversation, or a session by its id: it goes on with this response."
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: JsonObject | None = Field(
        None, description="Its effort is for the chat template, where it reads reasoning_effort."
    )

    def check_together(self) -> None:
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidInput(
                "conversation and previous_response_id both name what came before: send one",
                param="previous_response_id",
            )

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class ResponsesRequest(InputTokensRequest):
    """POST /v1/responses"""

    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = Field(None, description="Only with stream: true.")
    store: bool | None = Field(
        None, description="true (default): the response can be gone on with, by its id. It is a session."
    )
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="message.output_text.logprobs is given; others are accepted, no effect."
    )
    metadata: Metadata | None = Field(None, description="Repeated in the answer.")
    max_tool_calls: int | None = Field(None, description="Of tools that servers run: no effect.")
    service_tier: str | None = Field(None, min_length=1, description="As in chat.")
    user: str | None = Field(None, description=_NO_EFFECT)
    safety_identifier: str | None = Field(None, description=_NO_EFFECT)
    prompt_cache_key: str | None = Field(None, description="Accepted: prefixes are found by content.")
    prompt_cache_retention: str | None = Field(None, description=_NO_EFFECT)
    prompt_cache_options: JsonObject | None = Field(None, description=_NO_EFFECT)
    client_metadata: JsonObject | None = Field(None, description=_NO_EFFECT)
    context_management: Any = Field(None, description=_NO_EFFECT)

    def check_together(self) -> None:
        InputTokensRequest.check_together(self)
        check_streamed(self.stream, self.stream_options)


class ConversationCreate(Body):
    """POST /v1/conversations"""

    NOT_BUILT: ClassVar[NotBuilt] = {
        "items": "a conversation begins empty: send its first items as the input of its first response",
    }

    metadata: Metadata | None = Field(None, description=_NO_EFFECT)
