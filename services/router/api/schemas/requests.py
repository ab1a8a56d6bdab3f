"""Bodies of requests, in OpenAI's shapes. Strict: a string is no number, an unknown field is an error.

The first error in a list ends its validation (`fail_fast`), and a mapping that is too large is refused before
its entries are read: to explain 100,000 errors would hold up the event loop for seconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from kvcommons.errors import InvalidInput
from services.router.admission.classes import TIER_CHARS_MAX
from services.router.api.schemas.body import Body, Elsewhere, JsonObject, NotBuilt
from services.router.api.schemas.messages import MESSAGES_MAX, ChatMessage
from services.router.api.schemas.prediction import Prediction
from services.router.api.schemas.tools import ToolChoice, Tools

SEED_MIN = -(1 << 63)
SEED_MAX = (1 << 64) - 1
TOP_LOGPROBS_MAX = 20
COMPLETION_LOGPROBS_MAX = 5
COMPLETION_TOKENS = 16  # of an answer of which nobody says how long it may be, as OpenAI has it
STOPS_MAX = 16
BIAS_MAX = 100
ENTRIES_MAX = 1024  # of logit_bias and metadata; OpenAI takes 300 and 16
PENALTY_MAX = 10.0
TOKENS_MAX = (1 << 32) - 1
CHOICES_MAX = 128  # OpenAI's; the setting max_choices may be lower
TTL_S_MAX = 10 * 365 * 24 * 3600
SESSION_ID_CHARS_MAX = 128

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


# Slashes, and characters that cannot be seen: controls, spaces but " ", marks of direction and of order,
# surrogates, private ones. Ranges of the class of a pattern, as the characters themselves: every dialect of
# patterns reads those.
_UNSEEN = (
    (0x00, 0x1F), (0x7F, 0xA0), (0xAD, 0xAD), (0x61C, 0x61C), (0x1680, 0x1680), (0x180E, 0x180E),
    (0x2000, 0x200F), (0x2028, 0x202F), (0x205F, 0x206F), (0x3000, 0x3000), (0xE000, 0xF8FF),
    (0xFEFF, 0xFEFF), (0xFFF0, 0xFFFB), (0xE0000, 0x10FFFF),
)  # fmt: skip
_EXCLUDED = "/\\\\" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _UNSEEN)
SESSION_ID_PATTERN = rf"^(?!\.{{1,2}}$)[^ {_EXCLUDED}]([^{_EXCLUDED}]*[^ {_EXCLUDED}])?$"
_SESSION_ID = re.compile(SESSION_ID_PATTERN)
_SURROGATE = re.compile("[\ud800-\udfff]")
SESSION_ID_SCHEMA: dict[str, Any] = {
    "type": "string", "minLength": 1, "maxLength": SESSION_ID_CHARS_MAX, "pattern": SESSION_ID_PATTERN,
}  # fmt: skip


def check_session_id(value: str) -> str:
    """The id as it is. Raises ValueError where it cannot stand in a path, a header and a log line."""
    if not value:
        raise ValueError("a session id is not empty")
    if len(value) > SESSION_ID_CHARS_MAX:
        raise ValueError(f"a session id has at most {SESSION_ID_CHARS_MAX} characters")
    if value != value.strip(" ") or value in (".", ".."):
        raise ValueError("a session id does not begin or end with a space, and is not '.' or '..'")
    # The bytes of a header that are no text are surrogates, which no JSON has and no pattern names.
    if not _SESSION_ID.fullmatch(value) or _SURROGATE.search(value):
        raise ValueError("a session id has printable characters only, and no slash")
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


SessionId = Annotated[str, AfterValidator(check_session_id), WithJsonSchema(SESSION_ID_SCHEMA)]
Metadata = Annotated[dict[str, str], BeforeValidator(_check_entries)]
ShortText = Annotated[str, Field(max_length=64)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
# Empty ones, and ids that no model has, are refused with the prompt; here they are described only.
PromptText = Annotated[str, Field(json_schema_extra={"minLength": 1})]
PromptTexts = Annotated[list[PromptText], Field(fail_fast=True, json_schema_extra={"minItems": 1})]
TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, json_schema_extra={"minItems": 1})]
TokenLists = Annotated[list[TokenIds], Field(fail_fast=True, json_schema_extra={"minItems": 1})]


class StreamOptions(Body):
    include_usage: bool | None = Field(
        None, description="Send the usage in a chunk of its own before [DONE]."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; no padding is sent.")
    continuous_usage_stats: bool | None = Field(
        None, description="Send the usage so far in each chunk; needs include_usage."
    )

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage: true")
        return self


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
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('json_schema is missing: {"name": …, "schema": …}')
        if self.type != "json_schema" and self.json_schema is not None:
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


# As vLLM called them; what they ask for would be missing from the answer if they were left out.
GUIDED: NotBuilt = {
    f"guided_{old}": f'vLLM\'s former name: send structured_outputs: {{"{new}": …}}'
    for old, new in (("json", "json"), ("regex", "regex"), ("choice", "choice"), ("grammar", "grammar"))
}


def check_streamed(stream: bool | None, options: Body | None) -> None:
    """Raises InvalidInput for options of a stream that nobody asked for."""
    if options is not None and not stream:
        raise InvalidInput(
            "stream_options are of a stream: send stream: true, or leave stream_options out",
            param="stream_options",
        )


class GenerationBody(Body):
    """What chat and completions have in common."""

    model: str | None = Field(
        None, description="As GET /v1/models shows it; the one that is served by default."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with stream: true.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Default: the room left in the context window, or in memory where that is less.",
    )
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
    repetition_penalty: float | None = Field(
        None,
        gt=0,
        le=PENALTY_MAX,
        description="Of tokens that the prompt or the answer has: above 1 they come less often; default 1.",
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        le=TOKENS_MAX,
        description="The answer has as many before an end-of-turn token or a stop string ends it.",
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="The stop string that ended the answer stands at its end. A session keeps none."
    )
    ignore_eos: bool | None = Field(None, description="Go on after an end-of-turn token.")
    response_format: ResponseFormat | None = Field(
        None, description="What the answer is: text, any JSON object, or JSON that keeps to a schema."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="What the answer keeps to, in vLLM's words; not together with a response_format."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=TOP_LOGPROBS_MAX,
        description="As in vLLM: how likely the prompt's own tokens are, with so many alternatives each. "
        "All of the prompt is computed for it. Not together with stream.",
    )
    reuse: bool | None = Field(
        None,
        description="false: compute the whole prompt though its KV is stored (to compare and to measure).",
    )
    user: str | None = Field(None, description="Accepted, no effect.")
    metadata: Metadata | None = Field(None, description="Accepted, no effect.")
    service_tier: str | None = Field(
        None,
        min_length=1,
        max_length=TIER_CHARS_MAX,
        description="A class of service of this server, or auto (default): the one that the key has. "
        "Of OpenAI's names, those that no class here has are served as default. The answer repeats what was "
        "used.",
    )
    store: bool | None = Field(
        None, description="Accepted, no effect: a conversation is kept where it has a session_id."
    )
    skip_special_tokens: Literal[True] | None = Field(
        None, description="Accepted: control tokens are never shown."
    )
    spaces_between_special_tokens: bool | None = Field(None, description="Accepted, no effect.")
    safety_identifier: str | None = Field(None, description="Accepted, no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted: prefixes are found by content.")
    prompt_cache_retention: str | None = Field(None, description="Accepted, no effect.")

    def check_together(self) -> None:
        check_streamed(self.stream, self.stream_options)


class ChatRequest(GenerationBody):
    """POST /v1/chat/completions"""

    CHAT_MESSAGES: ClassVar[bool] = True
    NOT_BUILT: ClassVar[NotBuilt] = {
        "functions": "deprecated by OpenAI: send them as tools",
        "function_call": "deprecated by OpenAI: send it as tool_choice",
        "store_partial": "not built yet: a turn that is broken off is not committed",
        "modalities": 'only ["text"] is built',
        "audio": "only text is built",
        "web_search_options": "not built; leave it out",
        "chat_template": "templates come from the model's folder only",
        **GUIDED,
    }
    ELSEWHERE: ClassVar[Elsewhere] = {
        "prompt": "use messages here, or /v1/completions",
        "input": "use messages here, or /v1/responses",
        "echo": "it is of /v1/completions",
        "suffix": "it is of /v1/completions",
        "best_of": "it is of /v1/completions: use n",
        "system": "it is of /v1/messages: send a message of the role system",
        "instructions": "it is of /v1/responses: send a message of the role system",
        "stop_sequences": "it is of /v1/messages: use stop",
        "max_output_tokens": "it is of /v1/responses: use max_completion_tokens",
        "text": "it is of /v1/responses: use response_format",
        "output_config": "it is of /v1/messages: use response_format",
        "reasoning": "it is of /v1/responses: use reasoning_effort, or chat_template_kwargs",
        "thinking": "it is of /v1/messages: use chat_template_kwargs",
        "previous_response_id": "it is of /v1/responses: use session_id",
        "conversation": "it is of /v1/responses: use session_id",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]
    session_id: SessionId | None = Field(
        None,
        description="The conversation: messages holds only what is new. An unused id begins one. "
        "Also as header X-Session-ID, session-id or x-claude-code-session-id, joined with an agent's id in "
        "x-claude-code-agent-id or thread-id; then turns that come at once branch.",
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="The newer name of max_tokens; one of them."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description='"auto": where the session and this turn do not fit the context window, the oldest part '
        "of the session behind its system prompt goes, and the KV that is left stays in use. "
        '"disabled" (default): that is an error, context_length_exceeded.',
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS_MAX)
    tools: Tools | None = Field(
        None,
        description="Functions that the model may call. A session keeps those of its first turn: send the "
        "same ones, or none, later.",
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="none: no call is looked for in the answer. required: it is calls. A function: it is one "
        "call of it. Default: auto.",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: the answer has at most one call.")
    chat_template_kwargs: Annotated[JsonObject, BeforeValidator(_check_entries)] | None = Field(
        None, description="Variables of the model's chat template, as enable_thinking, by name."
    )
    reasoning_effort: ShortText | None = Field(
        None, description="For the chat template, where it reads it; else no effect."
    )
    verbosity: ShortText | None = Field(None, description="Accepted, no effect.")
    prediction: Prediction | None = Field(
        None,
        description="What much of the answer may be, as the file that it gives back: where it is right and "
        "decode verifies drafts (max_draft_tokens), the answer comes sooner. No token depends on it. At most "
        "as many tokens as the context window.",
    )

    def check_together(self) -> None:
        GenerationBody.check_together(self)
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidInput(
                f"max_tokens is {old} and max_completion_tokens is {new}, and both say how long the answer "
                "may be: send one of them",
                param="max_tokens",
            )


class CompletionRequest(GenerationBody):
    """POST /v1/completions"""

    NOT_BUILT: ClassVar[NotBuilt] = {
        "suffix": "inserting before a suffix is not built; leave it out",
        "best_of": "answers are not ranked here, so all that were asked for are given: use n, or best_of 1",
        "session_id": "sessions are conversations: use /v1/chat/completions",
        "truncation": "sessions are truncated: use /v1/chat/completions with a session_id",
        **GUIDED,
    }
    ELSEWHERE: ClassVar[Elsewhere] = {
        "messages": "use prompt here, or /v1/chat/completions",
        "input": "use prompt here, or /v1/responses",
        "system": "use prompt here, or /v1/messages",
        "instructions": "use prompt here, or /v1/responses",
        "tools": "use /v1/chat/completions",
        "tool_choice": "use /v1/chat/completions",
        "parallel_tool_calls": "use /v1/chat/completions",
        "chat_template_kwargs": "use /v1/chat/completions",
        "prediction": "use /v1/chat/completions",
        "reasoning_effort": "use /v1/chat/completions",
        "top_logprobs": "it is of /v1/chat/completions: logprobs says here how many",
        "max_completion_tokens": "it is of /v1/chat/completions: use max_tokens",
        "max_output_tokens": "it is of /v1/responses: use max_tokens",
        "stop_sequences": "it is of /v1/messages: use stop",
        "text": "it is of /v1/responses: use response_format",
        "output_config": "it is of /v1/messages: use response_format",
    }

    prompt: PromptText | TokenIds | PromptTexts | TokenLists = Field(
        description="Text, token ids, or a list of either; each gets n choices."
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        description=f"Default: {COMPLETION_TOKENS}, or the room left where that is "
        "less. 0, with echo or prompt_logprobs: nothing is generated.",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=COMPLETION_LOGPROBS_MAX,
        description="Of each token of the answer, with so many alternatives; with echo of the prompt's, too.",
    )
    echo: bool | None = Field(
        None,
        description="The prompt stands before the answer. With logprobs all of it is computed.",
    )


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
    messages: int | None = Field(
        None,
        ge=0,
        le=TOKENS_MAX,
        description="The first ones, to the end of an answer, are what the new session begins with; all "
        "where absent. Without an id it is a branch: its id is the session's with a number, and it goes with "
        "that.",
    )


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
