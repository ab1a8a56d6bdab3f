"""Bodies of requests, in OpenAI's shapes. Strict: a string is no number, an unknown field is an error.

The first error in a list ends its validation (`fail_fast`), and a mapping that is too large is refused before
its entries are read: to explain 100,000 errors would hold up the event loop for seconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from services.router.admission.classes import TIER_CHARS_MAX

SEED_MIN = -(1 << 63)
SEED_MAX = (1 << 64) - 1
TOP_LOGPROBS_MAX = 20
COMPLETION_LOGPROBS_MAX = 5
STOPS_MAX = 16
MESSAGES_MAX = 5_000
BIAS_MAX = 100
ENTRIES_MAX = 1024  # of logit_bias and metadata; OpenAI takes 300 and 16
CHOICES_MAX = 128  # OpenAI's; the setting max_choices may be lower
TTL_S_MAX = 10 * 365 * 24 * 3600
SESSION_ID_CHARS_MAX = 128

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def check_session_id(value: str) -> str:
    """The id as it is. Raises ValueError where it cannot stand in a path, a header and a log line."""
    if not value:
        raise ValueError("a session id is not empty")
    if len(value) > SESSION_ID_CHARS_MAX:
        raise ValueError(f"a session id has at most {SESSION_ID_CHARS_MAX} characters")
    if not value.isprintable() or "/" in value or "\\" in value:
        raise ValueError("a session id has printable characters only, and no slash")
    if value != value.strip() or value in (".", ".."):
        raise ValueError("a session id does not begin or end with a space, and is not '.' or '..'")
    return value


def _check_bias(value: dict[str, float]) -> dict[str, float]:
    for key, bias in value.items():
        # As people and programs write them: what is longer or begins with 0 is no id of any model.
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"keys are token ids, and {key[:40]!r} is none")
        if abs(bias) > BIAS_MAX:
            raise ValueError(f"a bias lies between -{BIAS_MAX} and {BIAS_MAX}")
    return value


def _check_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > ENTRIES_MAX:
        raise ValueError(f"{len(value)} entries, and {ENTRIES_MAX} are the limit")
    return value


SessionId = Annotated[str, AfterValidator(check_session_id)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True)]
NotBuilt = dict[str, str]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    # Fields of OpenAI's API that are not built: a value other than one of NOT_BUILT_DEFAULTS is refused by
    # name, with this advice.
    NOT_BUILT: ClassVar[NotBuilt] = {}


class StreamOptions(Body):
    include_usage: bool | None = Field(
        None, description="Send the usage in a chunk of its own before [DONE]."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is sent.")


class JsonSchema(Body):
    name: str = Field(
        pattern=r"^[A-Za-z0-9_-]{1,64}$", description="For whoever reads the request; no effect."
    )
    description: str | None = Field(None, description="Accepted, no effect.")
    schema_: dict[str, Any] | bool = Field(
        alias="schema", description="A JSON Schema. No $ref leads out of it."
    )
    strict: bool | None = Field(None, description="Accepted: answers always keep to the schema.")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('json_schema belongs to type "json_schema", and to no other')
        return self


class StructuredOutputs(Body):
    """Exactly one of them."""

    json_: dict[str, Any] | bool | str | None = Field(
        None, alias="json", description="A JSON Schema, or its text."
    )
    regex: str | None = Field(None, description="That the whole answer matches.")
    choice: Annotated[list[str], Field(min_length=1, max_length=ENTRIES_MAX, fail_fast=True)] | None = Field(
        None, description="One of these texts is the answer."
    )
    grammar: str | None = Field(None, description="In Lark's syntax, as llguidance reads it.")

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar)
        if sum(one is not None for one in given) != 1:
            raise ValueError("exactly one of json, regex, choice and grammar is needed")
        return self


class GenerationBody(Body):
    """What chat and completions have in common."""

    model: str | None = Field(
        None, description="As GET /v1/models shows it; the one that is served by default."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, description="Default: the room left in the context window.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=(1 << 31) - 1, description="0 or -1 keeps all.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=SEED_MIN, le=SEED_MAX, description="Drawn by the server where absent.")
    stop: StopString | Annotated[list[StopString], Field(max_length=STOPS_MAX, fail_fast=True)] | None = None
    n: int | None = Field(None, ge=1, le=CHOICES_MAX)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[dict[str, float], BeforeValidator(_check_entries), AfterValidator(_check_bias)] | None
    ) = None
    ignore_eos: bool | None = Field(None, description="Go on after an end-of-turn token.")
    response_format: ResponseFormat | None = Field(
        None, description="What the answer is: text, any JSON object, or JSON that keeps to a schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the answer keeps to, in vLLM's words; not together with a response_format."
    )
    reuse: bool | None = Field(
        None,
        description="false: compute the whole prompt though its KV is stored (to compare and to measure).",
    )
    user: str | None = Field(None, description="Accepted, no effect.")
    metadata: Annotated[dict[str, str], BeforeValidator(_check_entries)] | None = Field(
        None, description="Accepted, no effect."
    )
    service_tier: str | None = Field(
        None,
        min_length=1,
        max_length=TIER_CHARS_MAX,
        description="A class of service of this server, or auto (default): the one that the key has. "
        "Of OpenAI's names, those that no class here has are served as default. The answer repeats what was "
        "used.",
    )
    safety_identifier: str | None = Field(None, description="Accepted, no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted: prefixes are found by content.")
    prompt_cache_retention: str | None = Field(None, description="Accepted, no effect.")


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    name: str | None = Field(None, max_length=256)

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions"""

    NOT_BUILT: ClassVar[NotBuilt] = {
        "tools": "tools are not built yet; leave it out",
        "tool_choice": "tools are not built yet; leave it out",
        "functions": "tools are not built yet; leave it out",
        "function_call": "tools are not built yet; leave it out",
        "store_partial": "not built yet: a turn that is broken off is not committed",
        "store": "not built: use session_id to keep a conversation",
        "modalities": 'only ["text"] is built',
        "audio": "only text is built",
        "prediction": "not built; leave it out",
        "reasoning_effort": "not built; leave it out",
        "verbosity": "not built; leave it out",
        "web_search_options": "not built; leave it out",
        "chat_template": "templates come from the model's folder only",
        "chat_template_kwargs": "not built; leave it out",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    session_id: SessionId | None = Field(
        None,
        description="The conversation: messages holds only what is new. An unused id begins one. "
        "Also as header X-Session-ID, session-id or x-claude-code-session-id.",
    )
    max_completion_tokens: int | None = Field(None, ge=1)
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description='"auto": where the session and this turn do not fit the context window, the oldest part '
        "of the session behind its system prompt goes, and the KV that is left stays in use. "
        '"disabled" (default): that is an error, context_length_exceeded.',
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    parallel_tool_calls: bool | None = Field(None, description="Accepted, no effect.")


class CompletionRequest(GenerationBody):
    """POST /v1/completions"""

    NOT_BUILT: ClassVar[NotBuilt] = {
        "suffix": "inserting before a suffix is not built; leave it out",
        "echo": "not built: the prompt is not repeated; leave it out",
        "best_of": "not built; use n",
        "session_id": "sessions are conversations: use /v1/chat/completions",
        "truncation": "sessions are truncated: use /v1/chat/completions with a session_id",
        "store": "not built; leave it out",
    }

    prompt: str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | TokenLists = Field(
        description="Text, token ids, or a list of either; each gets n choices."
    )
    logprobs: int | None = Field(None, ge=0, le=COMPLETION_LOGPROBS_MAX)


class SessionCreate(Body):
    """POST /v1/sessions"""

    NOT_BUILT: ClassVar[NotBuilt] = {
        "truncation": "it is asked for with each turn, in /v1/chat/completions",
    }

    id: SessionId | None = Field(None, description="Made by the server where absent.")
    ttl_s: int | None = Field(None, ge=1, le=TTL_S_MAX, description="How long the session is kept unused.")


class SessionFork(Body):
    """POST /v1/sessions/{id}/fork"""

    id: SessionId | None = Field(None, description="Of the new session; made by the server where absent.")


class SessionPrefill(Body):
    """POST /v1/sessions/{id}/prefill"""

    content: str = Field(min_length=1, description="The document: text.")
    role: Literal["system", "user"] | None = Field(
        None,
        description='"system": a message that nobody answers; "user": one with an empty answer. Default: '
        '"system" where the session begins with the document and the chat template takes it, else "user".',
    )
    model: str | None = Field(
        None, description="As GET /v1/models shows it; the one that is served by default."
    )
    stream: bool | None = Field(
        None, description="Send the progress as events. The document goes on where they are not read."
    )
