"""What a Messages request is answered with: one message, or its events. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcommons.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    KVCommonsError,
    Overloaded,
    UnsupportedParameter,
)
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.answer.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.router.answer.text import Shown
from services.router.api import sse
from services.router.turn import events as ev
from services.router.turn.choice import Choice
from services.router.turn.turn import TokenUsage

Json = dict[str, Any]

OVERLOADED = 529
TIMED_OUT = 504
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    TIMED_OUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def status_of(error: KVCommonsError) -> int:
    """Clients of Anthropic's know what to do with a server that is overloaded, and with a deadline that
    passed, by statuses of their own."""
    if isinstance(error, DeadlineExceeded):
        return TIMED_OUT
    overloaded = isinstance(error, Overloaded) or error.http_status == 503
    return OVERLOADED if overloaded else error.http_status


def error_body(error: KVCommonsError, request_id: str) -> Json:
    kind = _TYPES.get(status_of(error), "api_error")
    message = error.message
    if isinstance(error, ContextLengthExceeded):  # the words that clients look for
        message = f"prompt is too long: {message}"
    elif error.param and error.param not in message:
        message = f"{error.param}: {message}"
    body: Json = {"type": kind, "message": message}
    if isinstance(error, UnsupportedParameter) and error.param == "thread":
        # By which clients know that they can go on without.
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body, "request_id": request_id}


@dataclass(slots=True, kw_only=True)
class MessagesShape:
    """Of one request. A message's blocks are the answer's parts: text and thinking that follow on each other
    go on in one block, each call has its own."""

    id: str
    model: ModelInfo
    request_id: str
    _kind: str = ""  # of the block that goes on
    _blocks: int = 0  # that have begun

    def answer(self, choices: Sequence[Choice], shown: Sequence[Sequence[Shown]], usage: TokenUsage) -> Json:
        (choice,) = choices
        said = choice.answer.parts.message()
        content: list[Json] = []
        if said.reasoning:
            content.append(_thinking(said.reasoning))
        if said.content:
            content.append(_text(said.content))
        content += [_tool_use(call.id, call.name, _input(call.arguments)) for call in said.tool_calls]
        return self._message(content, usage) | _stop(choice)

    def opening(self, usage: TokenUsage) -> bytes:
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def delta(self, delta: ev.Delta) -> bytes:
        return b"".join(_event(event) for part in delta.parts for event in self._part(part))

    def ending(self, choices: Sequence[Choice], usage: TokenUsage, timings: Json) -> bytes:
        (choice,) = choices
        last = {"type": "message_delta", "delta": _stop(choice), "usage": _usage(usage)}
        return b"".join(map(_event, [*self._close(), last, {"type": "message_stop"}]))

    def failure(self, error: KVCommonsError) -> bytes:
        return _event(error_body(error, self.request_id))

    def _message(self, content: list[Json], usage: TokenUsage) -> Json:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": content,
            "usage": _usage(usage),
        }

    def _part(self, part: Part) -> list[Json]:
        match part:
            case Content(text):
                opened = self._open("text", _text(""))
                return [*opened, self._delta({"type": "text_delta", "text": text})]
            case Reasoning(text):
                opened = self._open("thinking", _thinking(""))
                return [*opened, self._delta({"type": "thinking_delta", "thinking": text})]
            case CallBegun():
                return self._open(f"call {part.index}", _tool_use(part.id, part.name, {}))
            case CallArguments(text=text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def _open(self, kind: str, block: Json) -> list[Json]:
        if kind == self._kind:
            return []
        events = self._close()
        self._kind = kind
        self._blocks += 1
        start = {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}
        return [*events, start]

    def _close(self) -> list[Json]:
        if not self._kind:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": ""})] * (self._kind == "thinking")
        self._kind = ""
        return [*signed, {"type": "content_block_stop", "index": self._blocks - 1}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}


def _event(value: Json) -> bytes:
    return sse.event(value, name=value["type"])


def _usage(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(choice: Choice) -> Json:
    matched = choice.answer.matched_stop
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif choice.answer.parts.calls:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if matched is not None else "end_turn"
    return {"stop_reason": reason, "stop_sequence": matched}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _thinking(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(id: str, name: str, given: Json) -> Json:
    return {"type": "tool_use", "id": id, "name": name, "input": given}


def _input(arguments: str) -> Json:
    """As an object. Of a call that was cut there is none: clients see by the stop reason that it was."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}
