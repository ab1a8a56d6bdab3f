"""The events of Anthropic's Messages API, their order and their fields, as its documentation gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvcommons.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Internal,
    InvalidInput,
    KVCommonsError,
    Loading,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
)
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.answer.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.router.api.messages.answers import MessagesAnswer, MessagesError, MessagesEvent
from services.router.api.messages.shape import MessagesShape, error_body, status_of
from services.router.turn import events as ev
from services.router.turn.choice import Choice
from services.router.turn.turn import TokenUsage
from tests.unit.router.choices import choice_of, demo_tokenizer

Json = dict[str, Any]

OPENING = TokenUsage(prompt_tokens=50, completion_tokens=1, cached_tokens=0, reasoning_tokens=0)
OPENING_BODY = {
    "input_tokens": 50, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 1,
}  # fmt: skip
USAGE = TokenUsage(prompt_tokens=50, completion_tokens=7, cached_tokens=32, reasoning_tokens=0)
USAGE_BODY = {
    "input_tokens": 18, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 32, "output_tokens": 7,
}  # fmt: skip
THINKING: list[Part] = [Reasoning("hm"), Reasoning(" so")]
TEXT: list[Part] = [Content("Hel"), Content("lo")]
CALLS: list[Part] = [
    CallBegun(0, "call_1", "weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, ' "Bonn"}'),
    CallBegun(1, "call_2", "time"),
    CallArguments(1, "{}"),
]


def shape() -> MessagesShape:
    return MessagesShape(id="abc", model=ModelInfo(name="demo"), request_id="req-1")


def ended(parts: Sequence[Part], finish_reason: str, stop: str | None = None) -> Choice:
    choice = choice_of(demo_tokenizer())
    choice.answer.parts.add(parts)
    choice.answer.matched_stop = stop
    choice.finish_reason = finish_reason
    return choice


def events_of(data: bytes) -> list[Json]:
    """Each has a line with its name and one with its data."""
    found: list[Json] = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        MessagesEvent.model_validate(event)
        found.append(event)
    return found


def streamed(parts: Sequence[Part], finish_reason: str, stop: str | None = None) -> list[Json]:
    one = shape()
    data = one.opening(OPENING)
    for part in parts:
        data += one.delta(ev.Delta(choice=0, attempt=1, parts=(part,), tokens=()))
    return events_of(data + one.ending([ended(parts, finish_reason, stop)], USAGE, {}))


def block(index: int, opened: Json, *deltas: Json) -> list[Json]:
    return [
        {"type": "content_block_start", "index": index, "content_block": opened},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


TEXT_BLOCK = (
    {"type": "text", "text": ""},
    {"type": "text_delta", "text": "Hel"},
    {"type": "text_delta", "text": "lo"},
)
THINKING_BLOCK = (
    {"type": "thinking", "thinking": "", "signature": ""},
    {"type": "thinking_delta", "thinking": "hm"},
    {"type": "thinking_delta", "thinking": " so"},
    {"type": "signature_delta", "signature": ""},
)
CALL_BLOCKS = (
    (
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"city":'},
        {"type": "input_json_delta", "partial_json": ' "Bonn"}'},
    ),
    (
        {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
        {"type": "input_json_delta", "partial_json": "{}"},
    ),
)
# Parts, how the answer ended, its blocks, and what clients are told of its end.
STREAMS: dict[str, tuple[list[Part], str, str | None, list[Json], str]] = {
    "text": (TEXT, "stop", None, block(0, *TEXT_BLOCK), "end_turn"),
    "nothing": ([], "stop", None, [], "end_turn"),
    "a stop string": (TEXT, "stop", "END", block(0, *TEXT_BLOCK), "stop_sequence"),
    "a cut": (TEXT, "length", None, block(0, *TEXT_BLOCK), "max_tokens"),
    "thinking": (
        [*THINKING, *TEXT], "stop", None, block(0, *THINKING_BLOCK) + block(1, *TEXT_BLOCK), "end_turn",
    ),
    "calls": (
        [*TEXT, *CALLS], "tool_calls", None,
        block(0, *TEXT_BLOCK) + block(1, *CALL_BLOCKS[0]) + block(2, *CALL_BLOCKS[1]), "tool_use",
    ),
    "a named call": (CALLS[:3], "stop", None, block(0, *CALL_BLOCKS[0]), "tool_use"),
    "a call that is cut": (CALLS[:2], "length", None, block(0, *CALL_BLOCKS[0][:2]), "max_tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "ending", "stop", "blocks", "reason"), STREAMS.values(), ids=STREAMS)
def test_streams(parts: list[Part], ending: str, stop: str | None, blocks: list[Json], reason: str) -> None:
    first, ping, *between, last, end = streamed(parts, ending, stop)
    assert first["message"] == {
        "id": "msg_abc", "type": "message", "role": "assistant", "model": "demo", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": OPENING_BODY,
    }  # fmt: skip
    assert (first["type"], ping) == ("message_start", {"type": "ping"})
    assert between == blocks
    delta = {"stop_reason": reason, "stop_sequence": stop}
    assert last == {"type": "message_delta", "delta": delta, "usage": USAGE_BODY}
    assert end == {"type": "message_stop"}


def test_a_whole_message() -> None:
    choice = ended([*THINKING, *TEXT, *CALLS], "tool_calls")
    message = shape().answer([choice], [()], USAGE)
    MessagesAnswer.model_validate(message)
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm so", "signature": ""},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Bonn"}},
        {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
    ]
    assert (message["stop_reason"], message["usage"]) == ("tool_use", USAGE_BODY)


# What was sent before a stream fails. The block that goes on then stays open: the error is the last event.
BROKEN: dict[str, tuple[list[Part], list[Json]]] = {
    "nothing": ([], []),
    "thinking": (THINKING, block(0, *THINKING_BLOCK)[:-2]),  # neither signed nor closed
    "text": (TEXT, block(0, *TEXT_BLOCK)[:-1]),
    "text behind thinking": ([*THINKING, *TEXT], block(0, *THINKING_BLOCK) + block(1, *TEXT_BLOCK)[:-1]),
    "a call": (CALLS[:2], block(0, *CALL_BLOCKS[0])[:-2]),
    "a second call": (CALLS, block(0, *CALL_BLOCKS[0]) + block(1, *CALL_BLOCKS[1])[:-1]),
}


@pytest.mark.parametrize(("parts", "blocks"), BROKEN.values(), ids=BROKEN)
def test_a_stream_that_fails_ends_with_an_error(parts: list[Part], blocks: list[Json]) -> None:
    one = shape()
    data = one.opening(OPENING)
    for part in parts:
        data += one.delta(ev.Delta(choice=0, attempt=1, parts=(part,), tokens=()))
    first, ping, *between, last = events_of(data + one.failure(Overloaded("decode has no room")))
    assert (first["type"], ping["type"]) == ("message_start", "ping")
    assert between == blocks
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "decode has no room"},
        "request_id": "req-1",
    }


ERRORS: list[tuple[KVCommonsError, int, str, str]] = [
    (
        InvalidInput("a number is needed", param="max_tokens"),
        400,
        "invalid_request_error",
        "max_tokens: a num",
    ),
    (
        ContextLengthExceeded("the prompt has 9 tokens"),
        400,
        "invalid_request_error",
        "prompt is too long: the",
    ),
    (Unauthenticated("no key"), 401, "authentication_error", "no key"),
    (PermissionDenied("an operator's"), 403, "permission_error", "an operator's"),
    (ModelNotFound("no such model"), 404, "not_found_error", "no such model"),
    (TooLarge("9 bytes"), 413, "request_too_large", "9 bytes"),
    (QuotaExceeded("9 a minute"), 429, "rate_limit_error", "9 a minute"),
    (Internal("unexpected"), 500, "api_error", "unexpected"),
    (Overloaded("full"), 529, "overloaded_error", "full"),
    (Loading("not ready"), 529, "overloaded_error", "not ready"),
    (DeadlineExceeded("too late"), 504, "timeout_error", "too late"),
]


@pytest.mark.parametrize(("error", "status", "kind", "message"), ERRORS, ids=[e.code for e, *_ in ERRORS])
def test_errors(error: KVCommonsError, status: int, kind: str, message: str) -> None:
    body = error_body(error, "req-1")
    MessagesError.model_validate(body)
    assert status_of(error) == status
    assert body["error"]["type"] == kind
    assert body["error"]["message"].startswith(message)
