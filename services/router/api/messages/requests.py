"""Bodies of POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes.

What its clients send beside a conversation (hints for caches, betas, billing) is taken and has no effect.
Media, server-side tools and what else would change the answer are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.router.api.schemas.body import Body, Elsewhere, JsonObject, NotBuilt
from services.router.api.schemas.messages import MESSAGES_MAX
from services.router.api.schemas.requests import STOPS_MAX, StopString

_NO_EFFECT = "Accepted, no effect."
_PREFIXES = "Accepted: prefixes are found by content, and kept as long as there is room."


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: JsonObject | None = Field(None, description=_PREFIXES)
    citations: list[Any] | None = Field(None, description=_NO_EFFECT)


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description=_NO_EFFECT)


class RedactedThinkingBlock(Body):
    """Of another server's answer, which nobody here can read: left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: JsonObject
    cache_control: JsonObject | None = Field(None, description=_PREFIXES)
    caller: JsonObject | None = Field(None, description=_NO_EFFECT)


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: JsonObject | None = Field(None, description=_PREFIXES)

    @property
    def text(self) -> str:
        said = text_of(self.content or "")
        return f"Error: {said}" if self.is_error else said


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Content = str | Annotated[list[Block], Field(fail_fast=True)]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class InputTool(Body):
    """A tool that the client has. Tools that Anthropic's servers would run have another `type`."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: JsonObject = Field(description="A JSON Schema of the tool's input.")
    strict: bool | None = Field(None, description="true: calls keep to input_schema.")
    cache_control: JsonObject | None = Field(None, description=_PREFIXES)
    defer_loading: bool | None = Field(None, description=_NO_EFFECT)
    eager_input_streaming: bool | None = Field(None, description=_NO_EFFECT)
    input_examples: list[Any] | None = Field(None, description=_NO_EFFECT)
    allowed_callers: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description=_NO_EFFECT)


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description='The tool, with type "tool".')
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError('name belongs to type "tool", and to no other')
        return self


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description=_NO_EFFECT)
    display: str | None = Field(None, description=_NO_EFFECT)


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema", description="A JSON Schema of the answer's text.")


class OutputConfig(Body):
    effort: str | None = Field(None, description=_NO_EFFECT)
    format: OutputFormat | None = None


class TokenCountRequest(Body):
    """POST /v1/messages/count_tokens"""

    NOT_BUILT: ClassVar[NotBuilt] = {
        "mcp_servers": "tools of MCP servers are not called from here: connect to them in the client",
        "container": "there are no containers here: leave it out",
        "fallbacks": "one model is served: leave it out",
        "thread": "threads are not built: send the whole conversation, which a session keeps that the header "
        "x-claude-code-session-id names",
    }
    ELSEWHERE: ClassVar[Elsewhere] = {
        "prompt": "use messages here, or /v1/completions",
        "input": "use messages here, or /v1/responses",
        "instructions": "it is of /v1/responses: use system",
        "stop": "it is of the other APIs: use stop_sequences",
        "max_completion_tokens": "it is of /v1/chat/completions: use max_tokens",
        "max_output_tokens": "it is of /v1/responses: use max_tokens",
        "response_format": "it is of /v1/chat/completions: use output_config.format",
        "text": "it is of /v1/responses: use output_config.format",
        "structured_outputs": "use output_config.format here, or /v1/chat/completions",
        "guided_json": "vLLM's: use output_config.format here",
        "guided_regex": "vLLM's: use structured_outputs of /v1/chat/completions",
        "guided_choice": "vLLM's: use structured_outputs of /v1/chat/completions",
        "guided_grammar": "vLLM's: use structured_outputs of /v1/chat/completions",
        "prediction": "use /v1/chat/completions",
        "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
        "session_id": "the header x-claude-code-session-id names a session here",
        "seed": "use /v1/chat/completions",
        "n": "use /v1/chat/completions",
        "logprobs": "use /v1/chat/completions",
    }

    model: str = Field(description="As GET /v1/models shows it.")
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[InputTool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = Field(None, description="Models that think do so by their template.")
    output_config: OutputConfig | None = None
    cache_control: JsonObject | None = Field(None, description=_PREFIXES)
    context_management: JsonObject | None = Field(None, description=_NO_EFFECT)
    diagnostics: JsonObject | None = Field(None, description=_NO_EFFECT)
    speed: str | None = Field(None, description=_NO_EFFECT)
    betas: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description=_NO_EFFECT)


class MessagesRequest(TokenCountRequest):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=STOPS_MAX, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=(1 << 31) - 1)
    metadata: JsonObject | None = Field(None, description=_NO_EFFECT)
    service_tier: str | None = Field(
        None, min_length=1, description="As in chat; standard_only is served as auto."
    )
    inference_geo: str | None = Field(None, description=_NO_EFFECT)
    user_profile_id: str | None = Field(None, description=_NO_EFFECT)
    workspace_id: str | None = Field(None, description=_NO_EFFECT)


def text_of(content: str | list[TextBlock]) -> str:
    """Of text blocks, each on lines of its own."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
