"""OpenAI's JSON shapes of answers and chunks. Pure: dicts out; schemas/answers.py describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcommons.errors import KVCommonsError
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb.common_pb2 import ModelInfo, SampledToken
from services.router.sessions.truncation import Context
from services.router.turn.answer_text import Shown
from services.router.turn.choice import Choice
from services.router.turn.turn import TokenUsage

Json = dict[str, Any]

# JSON has no infinity; OpenAI writes this for a token that cannot come.
_LOGPROB_MIN = -9999.0


def error_body(error: KVCommonsError) -> Json:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def usage_body(usage: TokenUsage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """The chat answers of one request. `session_id` stands in each of them where the call had one."""

    id: str
    created_s: int
    model: ModelInfo
    tokenizer: Tokenizer
    logprobs: bool
    include_usage: bool
    service_tier: str  # the class that it is served as
    session_id: str | None
    context: Context | None = None

    def answer(self, choices: Sequence[Choice], shown: Sequence[Sequence[Shown]], usage: TokenUsage) -> Json:
        """`shown`: the tokens of each choice whose text was released."""
        return self._body("chat.completion") | {
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.answer.text, "refusal": None},
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": choice.finish_reason,
                }
                for choice, tokens in zip(choices, shown, strict=True)
            ],
            "usage": usage_body(usage),
        }

    def begin(self, choice: int) -> Json:
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def delta(self, choice: int, text: str, tokens: Sequence[Shown]) -> Json:
        return self._chunk(choice, {"content": text}, self._logprobs(tokens), None)

    def finish(self, choice: int, reason: str) -> Json:
        return self._chunk(choice, {}, None, reason)

    def usage(self, usage: TokenUsage, timings: Json) -> Json:
        return self._body("chat.completion.chunk") | {
            "choices": [],
            "usage": usage_body(usage),
            "timings": timings,
        }

    def _chunk(self, choice: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        body = self._body("chat.completion.chunk")
        body["choices"] = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        if self.include_usage:
            body["usage"] = None
        return body

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
        if self.context is not None and self.context.truncated:
            body["truncation"] = {"dropped_tokens": self.context.dropped_tokens, "kv": self.context.kv}
        return body

    def _logprobs(self, tokens: Sequence[Shown]) -> Json | None:
        if not self.logprobs:
            return None
        return {"content": [self._token(token) for _, token in tokens], "refusal": None}

    def _token(self, token: SampledToken) -> Json:
        top = [self._named(other.token, other.logprob) for other in token.top]
        return self._named(token.token, token.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float) -> Json:
        return {
            "token": self.tokenizer.token_text(token),
            "logprob": max(logprob, _LOGPROB_MIN),
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """The answers of one /v1/completions request."""

    id: str
    created_s: int
    model: ModelInfo
    tokenizer: Tokenizer
    logprobs: bool
    include_usage: bool
    service_tier: str

    def answer(self, choices: Sequence[Choice], shown: Sequence[Sequence[Shown]], usage: TokenUsage) -> Json:
        body = self._body()
        body["choices"] = [
            self._choice(choice.index, choice.answer.text, tokens, choice.finish_reason)
            for choice, tokens in zip(choices, shown, strict=True)
        ]
        return body | {"usage": usage_body(usage)}

    def begin(self, choice: int) -> None:
        """A completion's stream has no chunk for the role."""

    def delta(self, choice: int, text: str, tokens: Sequence[Shown]) -> Json:
        return self._chunk(self._choice(choice, text, tokens, None))

    def finish(self, choice: int, reason: str) -> Json:
        return self._chunk(self._choice(choice, "", (), reason))

    def usage(self, usage: TokenUsage, timings: Json) -> Json:
        return self._body() | {"choices": [], "usage": usage_body(usage), "timings": timings}

    def _chunk(self, choice: Json) -> Json:
        body = self._body()
        body["choices"] = [choice]
        if self.include_usage:
            body["usage"] = None
        return body

    def _choice(self, index: int, text: str, tokens: Sequence[Shown], reason: str | None) -> Json:
        logprobs = self._logprobs(tokens) if self.logprobs else None
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

    def _logprobs(self, tokens: Sequence[Shown]) -> Json:
        name = self.tokenizer.token_text
        return {
            "tokens": [name(token.token) for _, token in tokens],
            "token_logprobs": [max(token.logprob, _LOGPROB_MIN) for _, token in tokens],
            "top_logprobs": [
                {name(other.token): max(other.logprob, _LOGPROB_MIN) for other in token.top}
                for _, token in tokens
            ],
            "text_offset": [start for start, _ in tokens],
        }


Shape = ChatShape | CompletionShape


def fingerprint_of(model: ModelInfo) -> str:
    """Changes with weights, config, KV dtype and block size: where answers may change though the seed is the
    same."""
    return f"kv-{model.fingerprint.hex()[:12]}"
