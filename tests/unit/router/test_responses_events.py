"""The events of OpenAI's Responses API, their order and their fields, as its documentation gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvcommons.errors import KVCommonsError, NotFound, Overloaded, Unavailable
from kvcommons.pb import common_pb2 as pb
from services.router.answer.parts import CallArguments, CallBegun, Content, Part, Reasoning
from services.router.api.responses.answers import Response, ResponseEvent
from services.router.api.responses.ids import StoredResponse, unstored_id
from services.router.api.responses.requests import ResponsesRequest
from services.router.api.responses.shape import ResponsesShape
from services.router.api.schemas.validation import validate
from services.router.turn import events as ev
from services.router.turn.choice import Choice
from services.router.turn.turn import TokenUsage
from tests.unit.router.choices import choice_of, demo_tokenizer

Json = dict[str, Any]

USAGE = TokenUsage(prompt_tokens=50, completion_tokens=7, cached_tokens=32, reasoning_tokens=3)
USAGE_BODY = {
    "input_tokens": 50,
    "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 57,
}
TEXT: list[Part] = [Content("Hel"), Content("lo")]
THINKING: list[Part] = [Reasoning("hm"), Reasoning(" so")]
CALL: list[Part] = [
    CallBegun(0, "call_1", "weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, ' "Bonn"}'),
]
SECOND: list[Part] = [CallBegun(1, "call_2", "time"), CallArguments(1, "{}")]
CUSTOM: list[Part] = [
    CallBegun(0, "call_1", "say"),
    CallArguments(0, '{"input": "a \\"b'),
    CallArguments(0, '\\" c"}'),
]


def shape(*, logprobs: bool = False, **fields: Any) -> ResponsesShape:
    return ResponsesShape(
        id="resp_x",
        created_s=5,
        model=pb.ModelInfo(name="demo"),
        request=validate(ResponsesRequest, {"input": "hello"} | fields),
        service_tier="default",
        session_id="resp-1",
        custom_tools=frozenset({"say"}),
        tokenizer=demo_tokenizer(),
        logprobs=logprobs,
    )


def ended(parts: Sequence[Part], finish_reason: str) -> Choice:
    choice = choice_of(demo_tokenizer())
    choice.answer.parts.add(parts)
    choice.finish_reason = finish_reason
    return choice


def events_of(data: bytes) -> list[Json]:
    """Numbered, each with a line of its name and one of its data, and no [DONE] behind them."""
    found: list[Json] = []
    for number, block in enumerate(data.decode().removesuffix("\n\n").split("\n\n")):
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        ResponseEvent.model_validate(event)
        assert event.pop("sequence_number") == number
        found.append(event)
    return found


def delta_of(part: Part) -> ev.Delta:
    return ev.Delta(choice=0, attempt=1, parts=(part,), tokens=())


def streamed(parts: Sequence[Part], finish_reason: str) -> list[Json]:
    one = shape()
    data = one.opening(USAGE) + b"".join(one.delta(delta_of(part)) for part in parts)
    return events_of(data + one.ending([ended(parts, finish_reason)], USAGE, {}))


def event(kind: str, at: int, **fields: Any) -> Json:
    return {"type": f"response.{kind}", "output_index": at, **fields}


def texts(kind: str, at: int, status: str = "completed") -> tuple[list[Json], Json]:
    """The events of an item of text, and the item at its end."""
    if kind == "message":
        id, pieces, part_type = f"msg_x{at}", ["Hel", "lo"], "output_text"
        fields: Json = {"type": "message", "role": "assistant"}
        extra: Json = {"annotations": [], "logprobs": []}
        logprobs: Json = {"logprobs": []}
    else:
        id, pieces, part_type = f"rs_x{at}", ["hm", " so"], "reasoning_text"
        fields, extra, logprobs = {"type": "reasoning", "summary": []}, {}, {}
    place: Json = {"item_id": id, "content_index": 0}
    empty = {"type": part_type, "text": "", **extra}
    part = {"type": part_type, "text": "".join(pieces), **extra}
    opened = {"id": id, **fields, "content": [], "status": "in_progress"}
    item = {"id": id, **fields, "content": [part], "status": status}
    return [
        event("output_item.added", at, item=opened),
        event("content_part.added", at, part=empty, **place),
        *(event(f"{part_type}.delta", at, delta=piece, **place, **logprobs) for piece in pieces),
        event(f"{part_type}.done", at, text="".join(pieces), **place, **logprobs),
        event("content_part.done", at, part=part, **place),
        event("output_item.done", at, item=item),
    ], item


def call(at: int, parts: Sequence[Part] = CALL, status: str = "completed") -> tuple[list[Json], Json]:
    begun, *pieces = parts
    assert isinstance(begun, CallBegun)
    id, deltas = f"fc_x{at}", [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    fields = {"id": id, "type": "function_call", "call_id": begun.id, "name": begun.name}
    item = {**fields, "arguments": "".join(deltas), "status": status}
    return [
        event("output_item.added", at, item={**fields, "arguments": "", "status": "in_progress"}),
        *(event("function_call_arguments.delta", at, item_id=id, delta=delta) for delta in deltas),
        event("function_call_arguments.done", at, item_id=id, arguments="".join(deltas)),
        event("output_item.done", at, item=item),
    ], item


def custom_call(at: int) -> tuple[list[Json], Json]:
    id, given = f"ctc_x{at}", 'a "b" c'
    fields = {"id": id, "type": "custom_tool_call", "call_id": "call_1", "name": "say"}
    item = {**fields, "input": given, "status": "completed"}
    return [
        event("output_item.added", at, item={**fields, "input": "", "status": "in_progress"}),
        event("custom_tool_call_input.delta", at, item_id=id, delta=given),
        event("custom_tool_call_input.done", at, item_id=id, input=given),
        event("output_item.done", at, item=item),
    ], item


Item = tuple[list[Json], Json]
STREAMS: dict[str, tuple[list[Part], str, list[Item], str]] = {
    "text": (TEXT, "stop", [texts("message", 0)], "completed"),
    "nothing": ([], "stop", [], "completed"),
    "a cut": (TEXT, "length", [texts("message", 0, "incomplete")], "incomplete"),
    "thinking": (
        [*THINKING, *TEXT], "stop", [texts("reasoning", 0), texts("message", 1)], "completed",
    ),
    "a call": (CALL, "tool_calls", [call(0)], "completed"),
    "two calls": ([*CALL, *SECOND], "tool_calls", [call(0), call(1, SECOND)], "completed"),
    "a call that is cut": (CALL[:2], "length", [call(0, CALL[:2], "incomplete")], "incomplete"),
    "text and a call": ([*TEXT, *CALL], "tool_calls", [texts("message", 0), call(1)], "completed"),
    "a custom call": (CUSTOM, "tool_calls", [custom_call(0)], "completed"),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "ending", "items", "status"), STREAMS.values(), ids=STREAMS)
def test_streams(parts: list[Part], ending: str, items: list[Item], status: str) -> None:
    created, begun, *between, last = streamed(parts, ending)
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == begun["response"]
    assert created["response"]["output"] == []
    assert between == [one for events, _ in items for one in events]
    assert last["type"] == f"response.{status}"
    response = last["response"]
    Response.model_validate(response)
    assert response["output"] == [item for _, item in items]
    assert (response["status"], response["usage"]) == (status, USAGE_BODY)
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert response["incomplete_details"] == cut
    changed = ("output", "status", "usage", "incomplete_details")
    begun = {name: value for name, value in created["response"].items() if name not in changed}
    assert begun.items() <= response.items(), "the same ids and fields from the beginning"


def test_a_whole_response_is_that_of_the_stream() -> None:
    parts = [*THINKING, *TEXT, *CALL]
    whole = shape().answer([ended(parts, "tool_calls")], [()], USAGE)
    assert whole == streamed(parts, "tool_calls")[-1]["response"]


CODES: list[tuple[KVCommonsError, str]] = [
    (Unavailable("nobody is there"), "server_error"),
    (Overloaded("full"), "rate_limit_exceeded"),
]
# What was sent before a stream fails: its last item ends as it is.
BROKEN: dict[str, tuple[list[Part], list[Item]]] = {
    "nothing": ([], []),
    "thinking": (THINKING, [texts("reasoning", 0, "incomplete")]),
    "text": (TEXT, [texts("message", 0, "incomplete")]),
    "text behind thinking": (
        [*THINKING, *TEXT], [texts("reasoning", 0), texts("message", 1, "incomplete")],
    ),
    "a call": (CALL[:2], [call(0, CALL[:2], "incomplete")]),
    "a second call behind text": (
        [*TEXT, *CALL, *SECOND], [texts("message", 0), call(1), call(2, SECOND, "incomplete")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("error", "code"), CODES, ids=[code for _, code in CODES])
@pytest.mark.parametrize(("parts", "items"), BROKEN.values(), ids=BROKEN)
def test_a_stream_that_fails_ends_with_the_response(
    parts: list[Part], items: list[Item], error: KVCommonsError, code: str
) -> None:
    one = shape()
    data = one.opening(USAGE) + b"".join(one.delta(delta_of(part)) for part in parts) + one.failure(error)
    created, begun, *between, last = events_of(data)
    assert (created["type"], begun["type"]) == ("response.created", "response.in_progress")
    assert between == [one for events, _ in items for one in events]
    assert last["type"] == "response.failed"
    assert last["response"] == created["response"] | {
        "status": "failed",
        "error": {"code": code, "message": error.message},
        "output": [item for _, item in items],
    }


def test_logprobs_go_with_the_text_that_they_are_of() -> None:
    one = shape(logprobs=True, top_logprobs=1)
    token = pb.SampledToken(token=20, logprob=-0.5, top=[pb.TopLogprob(token=20, logprob=-0.5)])
    data = one.opening(USAGE)
    data += one.delta(ev.Delta(choice=0, attempt=1, parts=(Content("a"),), tokens=((0, token),)))
    data += one.ending([ended([Content("a")], "stop")], USAGE, {})
    events = {event["type"]: event for event in events_of(data)}
    (sent,) = events["response.output_text.delta"]["logprobs"]
    assert (sent["logprob"], len(sent["top_logprobs"])) == (-0.5, 1)
    assert events["response.completed"]["response"]["output"][0]["content"][0]["logprobs"] == [sent]


def test_an_id_names_a_place_in_a_session() -> None:
    for session_id in ("resp-1", "letters from home: π", "1:x"):
        stored = StoredResponse(session_id=session_id, messages=12, instructed=True)
        assert stored.id.startswith("resp_")
        assert StoredResponse.named(stored.id, param="id") == stored


@pytest.mark.parametrize("id", ["resp_", "resp_abc", "x", "resp_äö", unstored_id("0011223344556677"), ""])
def test_other_ids_are_not_found(id: str) -> None:
    with pytest.raises(NotFound):
        StoredResponse.named(id, param="id")
