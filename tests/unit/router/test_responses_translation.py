"""OpenAI's Responses requests as the chat requests that they are served as."""

from __future__ import annotations

from typing import Any

import pytest

from kvcommons.errors import InvalidInput, UnsupportedParameter
from services.router.api.responses.requests import ResponsesRequest
from services.router.api.responses.translation import chat_body, custom_tools
from services.router.api.schemas.validation import validate

Json = dict[str, Any]

WEATHER: Json = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def translated(**fields: Any) -> Json:
    return chat_body(validate(ResponsesRequest, {"input": "hello"} | fields))


def test_a_plain_request() -> None:
    plain = {"messages": [{"role": "user", "content": "hello"}]}
    assert translated() == plain
    taken = {
        "client_metadata": {"turn": {"id": 1}},
        "reasoning": {"effort": None, "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }
    assert translated(**taken) == plain, "these change nothing"
    assert translated(reasoning={"effort": "low"}) == plain | {"reasoning_effort": "low"}


def test_items_of_one_answer_make_one_message() -> None:
    items: list[Json] = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "say", "input": 'a "b"'},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "ok"}],
        },
        {"type": "message", "role": "developer", "content": "be brief"},
    ]
    assert translated(input=items)["messages"] == [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "say", "arguments": '{"input": "a \\"b\\""}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
        {"role": "developer", "content": "be brief"},
    ]


def test_two_answers_in_a_row_stay_two() -> None:
    said = [{"role": "assistant", "content": text} for text in ("one", "two")]
    messages = translated(input=[*said, {"role": "user", "content": "and?"}])["messages"]
    assert [message["content"] for message in messages] == ["one", "two", "and?"]


def test_tools_that_run_elsewhere_are_not_offered() -> None:
    chat = translated(
        tools=[{"type": "web_search"}, WEATHER, {"type": "local_shell"}], tool_choice="required"
    )
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather"]
    assert chat["tool_choice"] == "required"
    assert "tools" not in translated(tools=[{"type": "web_search"}])


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    tool: Json = {
        "type": "custom",
        "name": "dial",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"},
    }
    body = validate(ResponsesRequest, {"input": "call", "tools": [tool]})
    assert custom_tools(body) == {"dial"}
    function = chat_body(body)["tools"][0]["function"]
    assert function["parameters"]["properties"] == {"input": {"type": "string", "pattern": "^([0-9]+)$"}}
    assert function["strict"] is True
    tool["format"] = {"type": "grammar", "syntax": "lark", "definition": "start: DIGIT"}
    function = translated(tools=[tool])["tools"][0]["function"]
    assert "start: DIGIT" in function["description"]
    assert "strict" not in function


def test_of_allowed_tools_only_those_are_offered() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
    chat = translated(tools=[WEATHER | {"name": "a"}, WEATHER | {"name": "b"}], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["b"]
    assert chat["tool_choice"] == "required"


def test_logprobs_are_asked_for_by_their_number_or_by_include() -> None:
    assert translated(top_logprobs=2)["top_logprobs"] == 2
    assert translated(include=["message.output_text.logprobs"])["logprobs"] is True
    assert "logprobs" not in translated(include=["reasoning.encrypted_content"])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True},
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        ),
    ],
    ids=["text", "json_object", "json_schema"],
)
def test_the_form_of_the_text(form: Json, expected: Json) -> None:
    assert translated(text={"format": form, "verbosity": "low"})["response_format"] == expected


REFUSED: list[tuple[Json, str | None]] = [
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(param) for _, param in REFUSED])
def test_what_is_refused_names_its_field(fields: Json, param: str | None) -> None:
    with pytest.raises((InvalidInput, UnsupportedParameter)) as refused:
        translated(**fields)
    assert refused.value.param == param


def test_one_thing_comes_before() -> None:
    with pytest.raises(InvalidInput, match="send one"):
        translated(conversation="c", previous_response_id="r")
