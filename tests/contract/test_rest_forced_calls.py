"""Calls that a grammar holds, over REST, with scripted models: what is asked of prefill and decode, and what
each API answers. Whether the grammars hold is shown with real models elsewhere."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.contract.rest_stack import Stack
from tests.contract.test_rest_tools import ASKED, CHAT, OSLO, ROME, SCHEMA, TIME, WEATHER

pytest_plugins = ("tests.contract.rest_fixtures",)
pytestmark = pytest.mark.parametrize("rest_store", ["embedded"], indirect=True)

NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
REMOTE = {"type": "object", "properties": {"x": {"$ref": "http://localhost/schema"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    ("fields", "said", "reason"),
    [
        ({"tool_choice": "required"}, ROME, "tool_calls"),
        ({"tool_choice": NAMED}, ROME, "stop"),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, f"I look it up.\n{ROME}", "tool_calls"),
        ({"tools": [STRICT]}, f"I look it up.\n{ROME}", "tool_calls"),
        ({"response_format": {"type": "json_object"}}, ROME, "tool_calls"),
    ],
    ids=["required", "named", "one", "strict", "json"],
)
async def test_calls_come_piece_by_piece(
    served: Stack, fields: dict[str, Any], said: str, reason: str
) -> None:
    served.says(said)
    body = {"messages": ASKED, "tools": [WEATHER, TIME], **fields}
    status, reply = await served.post(CHAT, body)
    assert status == 200, reply
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert choice["finish_reason"] == reason
    grammar = json.loads(served.engines[0].decode.jobs[-1].sampling.grammar)
    assert "weather" in grammar["grammars"][0]["lark_grammar"]
    # Id and name first, then nothing but pieces of arguments.
    events = await served.stream(CHAT, body)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert sorted(calls[0]) == ["function", "id", "index", "type"]
    assert len(calls) > 2
    assert {(*call,) for call in calls[1:]} == {("index", "function")}
    assert {(*call["function"],) for call in calls[1:]} == {("arguments",)}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'
    assert events[-2]["choices"][0]["finish_reason"] == reason


async def test_several_calls_have_indexes(served: Stack) -> None:
    served.says(f"{ROME}\n{OSLO}")
    body = {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required"}
    events = await served.stream(CHAT, body)
    arguments = ["", ""]
    for event in events[:-1]:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
    assert [json.loads(one) for one in arguments] == [{"city": "Rome"}, {"city": "Oslo"}]


async def test_a_forced_call_that_is_cut_ends_with_length(served: Stack) -> None:
    served.says(ROME)
    tokens = len(served.tokenizer.encode_text(ROME[: ROME.index('me"}')]))
    for choice in ("required", NAMED):
        _, reply = await served.post(
            CHAT, {"messages": ASKED, "tools": [WEATHER], "tool_choice": choice, "max_tokens": tokens}
        )
        (given,) = reply["choices"]
        assert given["finish_reason"] == "length"
        assert '{"city": "Rome"}'.startswith(given["message"]["tool_calls"][0]["function"]["arguments"])


async def test_a_session_is_asked_to_call_what_it_keeps(served: Stack) -> None:
    session = f"s-{uuid.uuid4().hex[:8]}"
    served.says("Hello.")
    await served.post(CHAT, {"messages": ASKED, "tools": [WEATHER], "session_id": session})
    served.says(ROME)
    status, reply = await served.post(
        CHAT, {"messages": ASKED, "tool_choice": "required", "session_id": session}
    )
    assert status == 200, reply
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    # A refusal leaves the session as it was.
    refused = {"messages": ASKED, "tool_choice": function("time"), "session_id": session}
    status, reply = await served.post(CHAT, refused)
    assert (status, reply["error"]["param"]) == (400, "tool_choice.function.name")
    result = {
        "role": "tool",
        "content": "31 degrees",
        "tool_call_id": (await served.get(f"/v1/sessions/{session}"))[1]["messages"][-1]["tool_calls"][0][
            "id"
        ],
    }
    served.says("Hot.")
    status, reply = await served.post(CHAT, {"messages": [result], "session_id": session})
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hot.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": function("unknown")}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type"),
        ({"tool_choice": "required", "stop": "x"}, "stop"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"parallel_tool_calls": False, "stop": ["x"]}, "stop"),
        (
            {"tools": [function("f", parameters=REMOTE)], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [WEATHER, function("f", parameters=REMOTE, strict=True)]},
            "tools[1].function.parameters",
        ),
        (
            {"tools": [function("f", parameters={"type": "string"})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [function("f", parameters={"not": {}})], "tool_choice": function("f")},
            "tools",
        ),
    ],
)
async def test_what_is_refused_names_the_field(served: Stack, fields: dict[str, Any], param: str) -> None:
    status, reply = await served.post(CHAT, {"messages": ASKED, "tools": [WEATHER], **fields})
    assert (status, reply["error"]["param"]) == (400, param), reply
    assert not served.engines[0].decode.jobs


async def test_a_schema_that_nothing_holds_is_not_looked_at(served: Stack) -> None:
    served.says("Hello.")
    tools = [function("f", parameters=REMOTE)]
    for fields in ({}, {"tool_choice": "none", "parallel_tool_calls": False}):
        status, reply = await served.post(CHAT, {"messages": ASKED, "tools": tools, **fields})
        assert status == 200, reply
        assert served.engines[0].decode.jobs[-1].sampling.grammar == ""


RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
CUSTOM = {
    "type": "custom",
    "name": "code",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"},
}
CODE = '<tool_call>\n{"name": "code", "arguments": {"input": "run"}}\n</tool_call>'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_responses_with_forced_calls(served: Stack, choice: Any) -> None:
    served.says(ROME)
    body = {"input": "Rome?", "tools": [RESPONSES_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    status, reply = await served.post("/v1/responses", body)
    assert status == 200, reply
    (item,) = reply["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')
    assert (reply["status"], reply["tool_choice"]) == ("completed", choice)
    assert reply["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "custom", "name": "code"}], ids=["auto", "required", "custom"]
)
async def test_a_custom_tools_pattern_holds_its_input(served: Stack, choice: Any) -> None:
    served.says(CODE)
    body = {"input": "Code?", "tools": [CUSTOM, RESPONSES_TOOL], "tool_choice": choice}
    status, reply = await served.post("/v1/responses", body)
    assert status == 200, reply
    (item,) = reply["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "code", "run")
    assert "[a-z]+" in served.engines[0].decode.jobs[-1].sampling.grammar


LARK = 'start: LINE+\nLINE: /[^\\n]*/ "\\n"'
PATCH = CUSTOM | {"name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "custom", "name": "patch"}], ids=["auto", "required", "custom"]
)
async def test_a_custom_tools_lark_grammar_holds_its_input(served: Stack, choice: Any) -> None:
    given = '+ print("a\\n")\n+}}\n</tool_call>\n'
    served.says(f'<tool_call>\n{{"name": "patch"}}\n{given}')
    body = {"input": "Code?", "tools": [RESPONSES_TOOL, PATCH], "tool_choice": choice}
    status, reply = await served.post("/v1/responses", body)
    assert status == 200, reply
    (item,) = reply["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", given)
    assert "LINE: " in served.engines[0].decode.jobs[-1].sampling.grammar
    events = await served.stream("/v1/responses", body)
    done = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert [event["input"] for event in done] == [given]
    # The response that goes on with it sends what came of the call.
    served.says("Done.")
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    again = {"input": [result], "previous_response_id": reply["id"]}
    status, reply = await served.post("/v1/responses", again)
    assert (status, reply["output"][0]["content"][0]["text"]) == (200, "Done.")


@pytest.mark.parametrize(
    ("form", "param", "says"),
    [
        (
            {"syntax": "lark", "definition": "start: nothing"},
            ".definition",
            'at 1(8): unknown name: "nothing"',
        ),
        ({"syntax": "lark", "definition": "start: %json {}"}, ".definition", "%json"),
        ({"syntax": "regex", "definition": "a("}, ".definition", "unclosed group"),
        ({"syntax": "lark"}, "", "needs a syntax"),
        ({"syntax": "peg", "definition": "a"}, ".syntax", "has to be 'lark' or 'regex'"),
    ],
)
async def test_a_bad_grammar_of_a_custom_tool_is_told_by_its_field(
    served: Stack, form: dict[str, str], param: str, says: str
) -> None:
    tools = [RESPONSES_TOOL, CUSTOM | {"format": {"type": "grammar", **form}}]
    status, reply = await served.post("/v1/responses", {"input": "Code?", "tools": tools})
    assert (status, reply["error"]["param"]) == (400, f"tools[1].format{param}"), reply
    assert says in reply["error"]["message"]
    assert not served.engines[0].decode.jobs


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "any"},
        {"type": "tool", "name": "weather"},
        {"type": "auto", "disable_parallel_tool_use": True},
    ],
    ids=["any", "tool", "auto"],
)
async def test_messages_with_held_calls(served: Stack, choice: dict[str, Any]) -> None:
    served.says(ROME)
    tool = {"name": "weather", "input_schema": SCHEMA}
    body = {
        "model": "demo",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Rome?"}],
        "tools": [tool],
        "tool_choice": choice,
    }
    status, reply = await served.post("/v1/messages", body)
    assert status == 200, reply
    (block,) = reply["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert reply["stop_reason"] == "tool_use"
    assert served.engines[0].decode.jobs[-1].sampling.grammar
