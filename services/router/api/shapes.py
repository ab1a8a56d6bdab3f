"""OpenAI's JSON shapes of answers and chunks of chat and completions. Pure; schemas/answers.py describes
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcommons.errors import KVCommonsError
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb.common_pb2 import ModelInfo, SampledToken
from services.router.answer.parts import (
    AnswerParts,
    CallArguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
)
from services.router.answer.text import Shown
from services.router.api import sse
from services.router.api.prompts import (
    LOGPROB_MIN,
    EchoedPrompt,
    prompt_logprobs_body,
    top_logprobs_body,
)
from services.router.sessions.conversation import Message, ToolCall
from services.router.sessions.truncation import Context
from services.router.turn import events as ev
from services.router.turn.choice import Choice
from services.router.turn.replayed import ReplayedContext
from services.router.turn.turn import TokenUsage

Json = dict[str, Any]


def error_body(error: KVCommonsError) -> Json:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def message_body(message: Message) -> Json:
    """A stored message."""
    body: Json = {"role": message.role, "content": message.content}
    if message.name:
        body["name"] = message.name
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [call_body(call) for call in message.tool_calls]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def usage_body(usage: TokenUsage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


class Shape(Protocol):
    """How one API writes one request's answer: as a whole, or as the events of a stream, which are `opening`,
    any number of `delta`, and `ending` or `failure`."""

    @property
    def model(self) -> ModelInfo: ...

    def answer(self, choices: Sequence[Choice], shown: Sequence[Sequence[Shown]], usage: TokenUsage) -> Json:
        """`shown`: the tokens of each choice whose text was released."""

    def opening(self, usage: TokenUsage) -> bytes:
        """`usage`: of the prompt, when its first token is there."""

    def delta(self, delta: ev.Delta) -> bytes: ...

    def ending(self, choices: Sequence[Choice], usage: TokenUsage, timings: Json) -> bytes: ...

    def failure(self, error: KVCommonsError) -> bytes:
        """The last event of a stream that began and failed."""


@dataclass(slots=True, kw_only=True)
class ChatShape:
    """The chat answers of one request. `session_id` stands in each of them where the call had one, and
    `branch` where the turn went on in one of the session's."""

    id: str
    created_s: int
    model: ModelInfo
    tokenizer: Tokenizer
    logprobs: bool
    include_usage: bool
    service_tier: str  # the class that it is served as
    include_stop: bool = False  # the stop string that ended an answer, at its end
    usage_so_far: Callable[[], TokenUsage] | None = None  # for each chunk
    session_id: str | None
    branch: str | None = None
    context: Context | ReplayedContext | None = None
    prompt_logprobs: int | None = None  # alternatives that are shown of each of the prompt's tokens
    _begun: set[int] = field(default_factory=set)  # choices whose role was sent

    def answer(self, choices: Sequence[Choice], shown: Sequence[Sequence[Shown]], usage: TokenUsage) -> Json:
        return self._body("chat.completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice.answer.parts, self._stop_of(choice)),
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": choice.finish_reason,
                }
                for choice, tokens in zip(choices, shown, strict=True)
            ],
            "usage": usage_body(usage),
            **_prompt_logprobs(self.tokenizer, choices[0], self.prompt_logprobs),
        }

    def opening(self, usage: TokenUsage) -> bytes:
        return b""  # each choice begins with its first delta

    def delta(self, delta: ev.Delta) -> bytes:
        """A chunk for each part; the first one has the log-probabilities of all."""
        parts: Sequence[Part] = delta.parts or ((Content(""),) if self.logprobs else ())
        logprobs = self._logprobs(delta.tokens)
        nothing = self._logprobs(())
        chunks = [
            self._chunk(delta.choice, _delta(part), nothing if at else logprobs, None)
            for at, part in enumerate(parts)
        ]
        return self._begin(delta.choice) + b"".join(map(sse.event, chunks))

    def ending(self, choices: Sequence[Choice], usage: TokenUsage, timings: Json) -> bytes:
        ended: list[bytes] = []
        for choice in choices:
            ended.append(self._begin(choice.index))
            if stop := self._stop_of(choice):
                ended.append(sse.event(self._chunk(choice.index, {"content": stop}, None, None)))
            ended.append(sse.event(self._chunk(choice.index, {}, None, choice.finish_reason)))
        if self.include_usage:
            last = {"choices": [], "usage": usage_body(usage), "timings": timings}
            ended.append(sse.event(self._body("chat.completion.chunk") | last))
        return b"".join(ended) + sse.DONE

    def failure(self, error: KVCommonsError) -> bytes:
        return sse.event(error_body(error))

    def _begin(self, choice: int) -> bytes:
        if choice in self._begun:
            return b""
        self._begun.add(choice)
        return sse.event(self._chunk(choice, {"role": "assistant", "content": ""}, None, None))

    def _chunk(self, choice: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        body = self._body("chat.completion.chunk")
        body["choices"] = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        if self.include_usage:
            body["usage"] = usage_body(self.usage_so_far()) if self.usage_so_far else None
        return body

    def _stop_of(self, choice: Choice) -> str:
        return choice.answer.matched_stop or "" if self.include_stop else ""

    def _body(self, kind: str) -> Json:
        body: Json = {
            "id": f"chatcmpl-{self.id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model.name,
            "service_tier": self.service_tier,
            "system_fingerprint": fingerprint_of(self.model),
        }
        if self.session_id is not None:
            body["session_id"] = self.session_id
        if self.branch is not None:
            body["branch"] = self.branch
        if self.context is not None and self.context.truncated:
            body["truncation"] = {"dropped_tokens": self.context.dropped_tokens, "kv": self.context.kv}
        return body

    def _logprobs(self, tokens: Sequence[Shown]) -> Json | None:
        if not self.logprobs:
            return None
        return {"content": [logprob_body(self.tokenizer, token) for _, token in tokens], "refusal": None}


def logprob_body(tokenizer: Tokenizer, token: SampledToken) -> Json:
    """Of a token, and of those that could have come instead."""

    def named(id: int, logprob: float) -> Json:
        return {
            "token": tokenizer.token_text(id),
            "logprob": max(logprob, LOGPROB_MIN),
            "bytes": list(tokenizer.token_bytes(id)),
        }

    top = [named(other.token, other.logprob) for other in token.top]
    return named(token.token, token.logprob) | {"top_logprobs": top}


def _message(parts: AnswerParts, stop: str = "") -> Json:
    """`content` is null where there is something else instead, and ends with `stop`."""
    reasoning, calls, content = parts.reasoning, parts.calls, parts.content + stop
    message: Json = {
        "role": "assistant",
        "content": content or (None if reasoning or calls else ""),
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [call_body(call) for call in calls]
    return message


def call_body(call: ToolCall) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(part: Part) -> Json:
    match part:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallBegun(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _prompt_logprobs(tokenizer: Tokenizer, choice: Choice, top: int | None) -> Json:
    """The field of that name, where it is asked for."""
    if top is None or choice.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs_body(tokenizer, choice.prompt, choice.prompt_logprobs, top)}


@dataclass(slots=True, kw_only=True)
class CompletionShape:
    """The answers of one /v1/completions request. `echoes`: of each choice its prompt, where that stands
    before the answer."""

    id: str
    created_s: int
    model: ModelInfo
    tokenizer: Tokenizer
    logprobs: bool
    include_usage: bool
    service_tier: str
    include_stop: bool = False  # as ChatShape
    usage_so_far: Callable[[], TokenUsage] | None = None
    echoes: Sequence[EchoedPrompt] = ()
    prompt_logprobs: int | None = None  # as ChatShape
    _begun: set[int] = field(default_factory=set)  # choices whose prompt was sent

    def answer(self, choices: Sequence[Choice], shown: Sequence[Sequence[Shown]], usage: TokenUsage) -> Json:
        return self._body() | {
            "choices": [self._whole(choice, tokens) for choice, tokens in zip(choices, shown, strict=True)],
            "usage": usage_body(usage),
        }

    def opening(self, usage: TokenUsage) -> bytes:
        return b""  # each choice begins with its first delta

    def delta(self, delta: ev.Delta) -> bytes:
        """One chunk, and before the first one those of the prompt."""
        text = "".join(part.text for part in delta.parts if isinstance(part, Content))
        chunk = self._chunk(self._choice(delta.choice, text, delta.tokens, None))
        return self._begin(delta.choice) + sse.event(chunk)

    def ending(self, choices: Sequence[Choice], usage: TokenUsage, timings: Json) -> bytes:
        ended: list[bytes] = []
        for choice in choices:
            ended.append(self._begin(choice.index))
            last = self._choice(choice.index, self._stop_of(choice), (), choice.finish_reason)
            ended.append(sse.event(self._chunk(last)))
        if self.include_usage:
            summary = {"choices": [], "usage": usage_body(usage), "timings": timings}
            ended.append(sse.event(self._body() | summary))
        return b"".join(ended) + sse.DONE

    def failure(self, error: KVCommonsError) -> bytes:
        return sse.event(error_body(error))

    def _whole(self, choice: Choice, tokens: Sequence[Shown]) -> Json:
        body = self._choice(
            choice.index, choice.answer.text + self._stop_of(choice), tokens, choice.finish_reason
        )
        if self.echoes:
            pieces = list(self.echoes[choice.index].pieces())
            body["text"] = "".join(text for text, _ in pieces) + body["text"]
            if self.logprobs:
                parts = [*(part for _, part in pieces if part is not None), body["logprobs"]]
                body["logprobs"] = {
                    name: [item for part in parts for item in part[name]] for name in body["logprobs"]
                }
        return body | _prompt_logprobs(self.tokenizer, choice, self.prompt_logprobs)

    def _begin(self, choice: int) -> bytes:
        """The prompt's own chunks, of bounded size each."""
        if choice in self._begun or not self.echoes:
            return b""
        self._begun.add(choice)
        return b"".join(
            sse.event(
                self._chunk({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None})
            )
            for text, logprobs in self.echoes[choice].pieces()
        )

    def _chunk(self, choice: Json) -> Json:
        body = self._body()
        body["choices"] = [choice]
        if self.include_usage:
            body["usage"] = usage_body(self.usage_so_far()) if self.usage_so_far else None
        return body

    def _stop_of(self, choice: Choice) -> str:
        return choice.answer.matched_stop or "" if self.include_stop else ""

    def _choice(self, index: int, text: str, tokens: Sequence[Shown], reason: str | None) -> Json:
        logprobs = self._logprobs(index, tokens) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _body(self) -> Json:
        return {
            "id": f"cmpl-{self.id}",
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model.name,
            "service_tier": self.service_tier,
            "system_fingerprint": fingerprint_of(self.model),
        }

    def _logprobs(self, index: int, tokens: Sequence[Shown]) -> Json:
        """Of the answer, which begins behind the prompt where that is repeated."""
        before = len(self.echoes[index].text) if self.echoes else 0
        return {
            "tokens": [self.tokenizer.token_text(token.token) for _, token in tokens],
            "token_logprobs": [max(token.logprob, LOGPROB_MIN) for _, token in tokens],
            "top_logprobs": [
                top_logprobs_body(
                    self.tokenizer,
                    token.token,
                    token.logprob,
                    [(other.token, other.logprob) for other in token.top],
                )
                for _, token in tokens
            ],
            "text_offset": [before + start for start, _ in tokens],
        }


def fingerprint_of(model: ModelInfo) -> str:
    """Changes with weights, config, KV dtype and block size: where answers may change though the seed is the
    same."""
    return f"kv-{model.fingerprint.hex()[:12]}"
