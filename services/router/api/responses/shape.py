"""What a Responses request is answered with: one response, or the events of its life. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from kvcommons.errors import KVCommonsError
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.answer.parts import Content, parts_of
from services.router.answer.text import Shown
from services.router.api import sse
from services.router.api.responses.ids import StoredResponse, items_id
from services.router.api.responses.items import output_of
from services.router.api.responses.output import Output
from services.router.api.responses.requests import ResponsesRequest
from services.router.api.shapes import logprob_body
from services.router.sessions.conversation import Message
from services.router.turn import events as ev
from services.router.turn.choice import Choice
from services.router.turn.turn import TokenUsage

Json = dict[str, Any]

_CUT = {"reason": "max_output_tokens"}


@dataclass(slots=True, kw_only=True)
class ResponsesShape:
    """Of one request. `session_id`: under which the response is stored, where it is."""

    id: str
    created_s: int
    model: ModelInfo
    request: ResponsesRequest
    service_tier: str
    session_id: str | None
    custom_tools: frozenset[str]
    tokenizer: Tokenizer
    logprobs: bool
    _output: Output = field(init=False)
    _sent: int = 0  # events

    def __post_init__(self) -> None:
        self._output = Output(items_id(self.id), custom_tools=self.custom_tools)

    def answer(self, choices: Sequence[Choice], shown: Sequence[Sequence[Shown]], usage: TokenUsage) -> Json:
        (choice,), (tokens,) = choices, shown
        logprobs = self._logprobs(tokens)
        for part in parts_of(choice.answer.parts.message()):
            self._output.add(part, logprobs if isinstance(part, Content) else ())
        return self._ended(choice, usage)

    def opening(self, usage: TokenUsage) -> bytes:
        begun = self._response("in_progress")
        return self._events(
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        )

    def delta(self, delta: ev.Delta) -> bytes:
        logprobs = self._logprobs(delta.tokens)
        events: list[Json] = []
        for part in delta.parts:
            events += self._output.add(part, logprobs if isinstance(part, Content) else ())
            if isinstance(part, Content):
                logprobs = []  # they are of the first text
        return self._events(*events)

    def ending(self, choices: Sequence[Choice], usage: TokenUsage, timings: Json) -> bytes:
        (choice,) = choices
        last = self._output.end(_status(choice))
        response = self._ended(choice, usage)
        return self._events(*last, {"type": f"response.{response['status']}", "response": response})

    def failure(self, error: KVCommonsError) -> bytes:
        """The stream began, so what is wrong is told by its last event."""
        ended = self._output.end("incomplete")
        failed = self._response("failed")
        failed["error"] = {"code": _code(error), "message": error.message}
        return self._events(*ended, {"type": "response.failed", "response": failed})

    def _ended(self, choice: Choice, usage: TokenUsage) -> Json:
        status = _status(choice)
        self._output.end(status)
        response = self._response(status)
        response["incomplete_details"] = _CUT if status == "incomplete" else None
        response["usage"] = usage_body(usage)
        return response

    def _response(self, status: str) -> Json:
        return _body(
            self.request,
            id=self.id,
            created_s=self.created_s,
            model=self.model.name,
            status=status,
            output=self._output.items,
            session_id=self.session_id,
        ) | {"service_tier": self.service_tier}

    def _logprobs(self, tokens: Sequence[Shown]) -> list[Json]:
        return [logprob_body(self.tokenizer, token) for _, token in tokens] if self.logprobs else []

    def _events(self, *events: Json) -> bytes:
        written: list[bytes] = []
        for event in events:
            written.append(sse.event(event | {"sequence_number": self._sent}, name=event["type"]))
            self._sent += 1
        return b"".join(written)


def usage_body(usage: TokenUsage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _code(error: KVCommonsError) -> str:
    """Of the few that OpenAI's clients know."""
    return "rate_limit_exceeded" if error.http_status == 429 else "server_error"


def stored_body(stored: StoredResponse, record: pb.SessionRecord) -> Json:
    """A response as it is read again, from the record of its session. What the request asked for is not kept:
    those fields are as if it had asked for nothing."""
    message = Message.of(record.messages[stored.messages - 1])
    output = output_of(items_id(stored.id), message)
    output.end("completed")
    return _body(
        ResponsesRequest.model_validate({}),
        id=stored.id,
        created_s=record.last_used_ms // 1000,
        model=record.model_name,
        status="completed",
        output=output.items,
        session_id=stored.session_id,
    )


def _body(
    request: ResponsesRequest,
    *,
    id: str,
    created_s: int,
    model: str,
    status: str,
    output: list[Json],
    session_id: str | None,
) -> Json:
    text: Json = {"format": {"type": "text"}, "verbosity": "medium"}
    if request.text is not None:
        text |= request.text.model_dump(exclude_none=True, by_alias=True)
    choice = request.tool_choice
    return {
        "id": id,
        "object": "response",
        "created_at": created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": output,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "conversation": {"id": request.conversation_id} if request.conversation_id else None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": request.reasoning or {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier or "auto",
        "session_id": session_id,
        "store": session_id is not None,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else _dumped(choice) if choice else "auto",
        "tools": [_dumped(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        **({} if request.user is None else {"user": request.user}),
        "metadata": request.metadata or {},
    }


def _dumped(value: BaseModel) -> Json:
    return value.model_dump(exclude_none=True, by_alias=True)
