"""Anthropic's requests as the chat requests that they are served as."""

from __future__ import annotations

from typing import Any

import pytest

from kvcommons.errors import InvalidInput, KVCommonsError, UnsupportedParameter
from services.router.api.messages.requests import MessagesRequest
from services.router.api.messages.translation import chat_body
from services.router.api.schemas.validation import validate

Json = dict[str, Any]

HELLO: Json = {"role": "user", "content": "hello"}
CALL: Json = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}
TOOL: Json = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}


def translated(**fields: Any) -> Json:
    body: Json = {"model": "m", "max_tokens": 10, "messages": [HELLO]} | fields
    return chat_body(validate(MessagesRequest, body))


def test_a_plain_request() -> None:
    assert translated() == {"model": "m", "messages": [HELLO], "max_completion_tokens": 10}


def test_what_is_sampled() -> None:
    chat = translated(
        temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], stream=True, service_tier="standard_only"
    )
    del chat["model"], chat["messages"], chat["max_completion_tokens"]
    assert chat == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ["END"], "stream": True, "service_tier": "auto",
    }  # fmt: skip


@pytest.mark.parametrize("system", ["be brief", [{"type": "text", "text": "be brief"}]])
def test_a_system_prompt_stands_first(system: Any) -> None:
    assert translated(system=system)["messages"] == [{"role": "system", "content": "be brief"}, HELLO]


def test_blocks_of_text_stand_on_lines_of_their_own() -> None:
    blocks = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "two"},
    ]
    chat = translated(messages=[{"role": "user", "content": blocks}])
    assert chat["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_calls_and_their_results_and_what_is_said_to_them() -> None:
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": "xyz"},
        {"type": "redacted_thinking", "data": "…"},
        {"type": "text", "text": "I look."},
        CALL,
    ]
    said = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "text", "text": "And?"},
    ]
    chat = translated(
        messages=[HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    )
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert chat["messages"] == [
        HELLO,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]


def test_a_result_that_is_an_error_says_so() -> None:
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True}
    answer = {"role": "assistant", "content": [CALL]}
    chat = translated(messages=[HELLO, answer, {"role": "user", "content": [failed]}])
    assert chat["messages"][-1] == {
        "role": "tool", "tool_call_id": "toolu_1", "content": "Error: no such city",
    }  # fmt: skip


CHOICES: list[tuple[Json, Any]] = [
    ({"type": "auto"}, "auto"),
    ({"type": "any"}, "required"),
    ({"type": "none"}, "none"),
    ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES, ids=[choice["type"] for choice, _ in CHOICES])
def test_tools_and_which_may_be_called(choice: Json, expected: Any) -> None:
    chat = translated(tools=[TOOL], tool_choice=choice | {"disable_parallel_tool_use": True})
    assert chat["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "weather", "parameters": {"type": "object"}, "description": "of a city",
            },
        }
    ]  # fmt: skip
    assert chat["tool_choice"] == expected
    assert chat["parallel_tool_calls"] is False


def test_a_schema_of_the_answer() -> None:
    schema = {"type": "object"}
    chat = translated(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert chat["response_format"]["json_schema"]["schema"] == schema


REFUSED: list[tuple[Json, str | None, type[KVCommonsError]]] = [
    ({"messages": [HELLO, {"role": "assistant", "content": "The answer is ("}]}, "messages[1]", InvalidInput),
    ({"max_tokens": 0}, "max_tokens", InvalidInput),
    ({"messages": []}, "messages", InvalidInput),
    ({"tool_choice": {"type": "tool"}}, "tool_choice", InvalidInput),
    ({"mcp_servers": [{"url": "https://example.org"}]}, "mcp_servers", UnsupportedParameter),
    ({"max_token": 3}, "max_token", InvalidInput),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
        InvalidInput,
    ),
]


@pytest.mark.parametrize(("fields", "param", "error"), REFUSED, ids=[str(param) for _, param, _ in REFUSED])
def test_what_is_refused_names_its_field(
    fields: Json, param: str | None, error: type[KVCommonsError]
) -> None:
    with pytest.raises(error) as refused:
        translated(**fields)
    assert refused.value.param == param
