"""Bodies of answers, as /openapi.json describes them. The router builds them as plain dicts (shapes.py), for
speed; the REST suites hold every answer that they get against its body here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_BRANCH = (
    "The session's branch that the turn went on in, a session by this id, where a whole history departed."
)


class AnswerBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorBody(AnswerBody):
    message: str = Field(description="What is wrong and what to do.")
    type: str
    param: str | None = Field(description="The field at fault, as a path: messages[0].content")
    code: str | None


class Error(AnswerBody):
    error: ErrorBody


class PromptTokensDetails(AnswerBody):
    cached_tokens: int = Field(description="Of the prompt: their KV was found and not computed.")


class OutputTokensDetails(AnswerBody):
    reasoning_tokens: int = Field(description="Of the answer: what the model thought before it.")


class CompletionTokensDetails(OutputTokensDetails):
    accepted_prediction_tokens: int = Field(
        description="Of the answer: those that were verified as drafts, and that the prediction had."
    )
    rejected_prediction_tokens: int = Field(
        description="Drafts that the prediction had, and that did not come: not among completion_tokens."
    )


class UsageInfo(AnswerBody):
    prompt_tokens: int = Field(description="The session so far included.")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(AnswerBody):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerBody):
    content: list[TokenLogprob]
    refusal: None


class AnswerFunction(AnswerBody):
    name: str
    arguments: str = Field(description="JSON; the beginning of it where the answer was cut.")


class AnswerCall(AnswerBody):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AssistantMessage(AnswerBody):
    role: Literal["assistant"]
    content: str | None = Field(description="null where there is reasoning, or calls, and nothing else.")
    refusal: None
    reasoning_content: str | None = Field(None, description="What the model thought, where it thinks.")
    tool_calls: list[AnswerCall] | None = None


class PromptTokenLogprob(AnswerBody):
    logprob: float
    rank: int = Field(description="Among all tokens that could stand there; 1 is the likeliest.")
    decoded_token: str


# By token id; null for the first one, before which there is nothing.
PromptLogprobsBody = list[dict[str, PromptTokenLogprob] | None]


class ChatChoice(AnswerBody):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class SessionTruncation(AnswerBody):
    dropped_tokens: int = Field(description="Of the session so far: the model does not see them any more.")
    kv: Literal["kept", "replayed", "recomputed"] = Field(
        description="The KV of what is left: in use as it was; lost, and made again from all tokens; or "
        "lost, and computed anew from what is left, as for a prompt without the dropped tokens."
    )


class ChatCompletion(AnswerBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: str = Field(description="The class of service that was used.")
    choices: list[ChatChoice]
    usage: UsageInfo
    system_fingerprint: str
    session_id: str | None = Field(None, description="Where the call had one.")
    branch: str | None = Field(None, description=_BRANCH)
    truncation: SessionTruncation | None = Field(None, description="Of a session that was truncated.")
    prompt_logprobs: PromptLogprobsBody | None = Field(
        None, description="Of each token of the prompt, where they are asked for: its own, and alternatives."
    )


class FunctionDelta(AnswerBody):
    name: str | None = None
    arguments: str = Field(description="The next piece.")


class ToolCallDelta(AnswerBody):
    """The first one of a call has id, type and name, and no arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(AnswerBody):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(AnswerBody):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ServingInstances(AnswerBody):
    """Ids as in /v1/status, each once, in the order in which they joined."""

    prefill: list[str] = Field(description="Computed the prompt; a decode instance computes short ones.")
    decode: list[str] = Field(description="Sent tokens; more than one where the turn was resumed.")
    holders: list[str] = Field(description="Lent memory for KV, and computed attention over it.")


class Timings(AnswerBody):
    queue_ms: float
    ttft_ms: float = Field(description="From the request's arrival to its first token.")
    prefill_queue_ms: float
    prefill_ms: float = Field(description="Model execution for the prompt.")
    load_wait_ms: float = Field(description="Prefill waited for stored KV.")
    decode_ms: float = Field(description="From the first token to the last.")
    commit_ms: float
    total_ms: float
    device_tokens: int = Field(description="Of the cached tokens: found in prefill's own memory.")
    dram_tokens: int = Field(description="Of the cached tokens: loaded from the kvstore's DRAM.")
    disk_tokens: int = Field(description="Of the cached tokens: loaded from the kvstore's disk.")
    instances: ServingInstances
    resumptions: int = Field(description="How often the turn went on on other instances.")


class ChatCompletionChunk(AnswerBody):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: str = Field(description="The class of service that was used.")
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: UsageInfo | None = None
    timings: Timings | None = Field(None, description="In the chunk that has the usage.")
    session_id: str | None = None
    branch: str | None = Field(None, description=_BRANCH)
    truncation: SessionTruncation | None = None


class CompletionLogprobs(AnswerBody):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(
        description="null for the first token of a prompt that is repeated."
    )
    top_logprobs: list[dict[str, float] | None] = Field(description="The token's own among them.")
    text_offset: list[int]


class CompletionChoice(AnswerBody):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobsBody | None = Field(
        None, description="Of each token of the prompt, where they are asked for: its own, and alternatives."
    )


class Completion(AnswerBody):
    """Also each chunk of a stream, where `finish_reason` is null until the last one of a choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: str = Field(description="The class of service that was used.")
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: UsageInfo | None = None
    timings: Timings | None = None


class ModelCard(AnswerBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="The context window, in tokens.")


class ModelList(AnswerBody):
    object: Literal["list"]
    data: list[ModelCard]


class Session(AnswerBody):
    id: str
    object: Literal["session"]
    created_at: int
    last_used_at: int
    ttl_s: int | None
    version: int = Field(description="Committed turns.")
    model: str | None
    parent: str | None = Field(description="The session it was forked from, or whose agent's it is.")
    agent: str | None = Field(description="The agent's id, where a header named one.")
    cut: int | None = Field(description="How many of its parent's messages it began with; null: all of them.")


class SessionMessage(AnswerBody):
    role: str = Field(
        description="system, user, assistant or tool; volatile: lines from the head of the request, which "
        "the model was given at the end of the message before."
    )
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] | None = None
    tool_call_id: str | None = None


class Tiers(AnswerBody):
    dram: int
    disk: int
    absent: int


class SessionDetail(Session):
    messages: list[SessionMessage]
    tools: list[dict[str, Any]] = Field(description="That it began with.")
    tokens: int
    token_ids: list[int]
    dropped_tokens: int = Field(description="Of those: what truncations took out of the model's sight.")
    blocks: int = Field(description="Full blocks of KV that the tokens in sight make.")
    tiers: Tiers | None = Field(
        description="Of those blocks: how many lie where. null while no model is ready."
    )


class SessionList(AnswerBody):
    object: Literal["list"]
    data: list[Session]
    first_id: str | None
    last_id: str | None
    has_more: bool


class SessionPrefillState(AnswerBody):
    """Also each event of a stream, which ends with [DONE] where the document is in its session."""

    id: str
    object: Literal["session.prefill"]
    created: int
    session_id: str
    model: str
    role: Literal["system", "user"]
    status: Literal["running", "completed", "failed", "cancelled"]
    tokens: int = Field(description="Of the document.")
    computed_tokens: int
    percent: float = Field(description="Of the tokens.")
    tokens_per_s: float | None = Field(description="Where it stands now. null until measured.")
    seconds_left: float | None = Field(description="Likely. null until measured, and at the end.")
    waits_for: str | None = Field(description="Why it gets no further at the moment; it is tried again.")
    error: ErrorBody | None = Field(description="Why it failed.")


class SessionBranch(Session):
    preview: str = Field(description="Of the first message behind the cut.")


class SessionBranches(AnswerBody):
    object: Literal["list"]
    data: list[SessionBranch]


class SessionDeleted(AnswerBody):
    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]


class Component(AnswerBody):
    ready: int
    known: int


class Health(AnswerBody):
    status: Literal["ok", "degraded", "loading"]
    components: dict[str, Component]
    message: str


class RateLeft(AnswerBody):
    limit: int
    remaining: int


class Usage(AnswerBody):
    object: Literal["usage"]
    tenant: str
    since: int = Field(description="When this router started: what follows is counted from then on.")
    requests: int
    refused: int = Field(description="Requests that a quota refused.")
    prompt_tokens: int
    cached_tokens: int = Field(description="Of the prompts', those that were found and not computed.")
    completion_tokens: int
    requests_per_minute: RateLeft | None = Field(description="Null: no bound.")
    tokens_per_minute: RateLeft | None = Field(
        description="Of prompts what is computed, and what is generated. Null: no bound."
    )


class Version(AnswerBody):
    version: str


class HeadShare(AnswerBody):
    group: str
    number: int
    parts: int


class InstanceStatus(AnswerBody):
    id: str
    service: str
    host: str
    control_address: str
    data_address: str
    ready: bool
    started_at: int
    model: str | None
    total_blocks: int
    free_blocks: int
    lendable_blocks: int
    running: int
    queued: int
    debts: dict[str, int]
    records: str | None = Field(description="Of a kvstore: where its session records lie.")
    products: str | None = Field(description="Of one with a model: who multiplies with its weights.")
    heads: HeadShare | None
    unfit: str | None = Field(description="Of an attention_pool: why it can lend to no decode instance.")
    silent_s: float | None = Field(
        description="Since its last heartbeat: so old is what is said of its load. null: not known."
    )


class StoreStatus(AnswerBody):
    dram_blocks: int
    dram_capacity_blocks: int
    disk_blocks: int
    disk_capacity_blocks: int
    sessions: int
    pending_writes: int
    block_hits: int
    block_misses: int
    corrupt_blocks: int


class QueueStatus(AnswerBody):
    running: int
    waiting: int


class Status(AnswerBody):
    instances: list[InstanceStatus]
    store: StoreStatus | None
    records: str | None = Field(
        description="Where session records lie; a kvstore with others serves nothing. Null while not known."
    )
    queue: QueueStatus
    models: list[str]
