"""Calls that a grammar holds, over REST, from a whole stack with the demo model, which was taught none."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.machine import scaled
from tests.system.examples import examples, run_python
from tests.system.stack import Stack
from tests.system.test_grammar import random_schema

QUESTION: list[Any] = [{"role": "user", "content": "My dog is called Rexo. Tell me about it."}]
SHARED = {"shared": {"type": "string", "maxLength": 3}}
MODEL = "kvcommons-demo"


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.v1, api_key="none", max_retries=0, timeout=scaled(120)) as client:
        yield client


def random_tools(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Some functions by name, with the schemas of their arguments."""
    tools = {}
    for name in draw.sample(("find", "add_2", "set-name", "x"), draw.randint(1, 2)):
        names = draw.sample(("a", "b", "größe", 'with "quotes"'), draw.randint(0, 2))
        tools[name] = {
            "type": "object",
            "properties": {name: random_schema(draw, 1) for name in names},
            "required": draw.sample(names, draw.randint(0, len(names))),
            "additionalProperties": False,
            "$defs": SHARED,
        }
    return tools


def called(sdk: openai.OpenAI, seed: int) -> list[str]:
    """Asks for forced calls of random functions, at a temperature at which the model's own words are noise:
    two answers, every other time streamed. Their finish reasons; asserts that all are valid."""
    draw = random.Random(seed)
    tools = random_tools(draw)
    named = draw.choice((None, *tools))
    parallel = draw.random() < 0.5
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "n": 2,
        "seed": seed,
        "temperature": 1.5,
        "max_tokens": 160,
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in tools.items()
        ],
        "tool_choice": {"type": "function", "function": {"name": named}} if named else "required",
        "parallel_tool_calls": parallel,
    }
    if seed % 2:
        state = ChatCompletionStreamState()
        for chunk in sdk.chat.completions.create(stream=True, **asked):
            state.handle_chunk(chunk)
        choices: list[Any] = list(state.current_completion_snapshot.choices)
    else:
        choices = list(sdk.chat.completions.create(**asked).choices)
    assert len(choices) == 2
    for choice in choices:
        calls = choice.message.tool_calls or []
        assert not choice.message.content
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == ("stop" if named else "tool_calls")
        assert calls
        assert len(calls) == 1 or (parallel and not named)
        assert len({call.id for call in calls}) == len(calls)
        for call in calls:
            assert named in (None, call.function.name)
            jsonschema.validate(json.loads(call.function.arguments), tools[call.function.name])
    return [choice.finish_reason for choice in choices]


@pytest.mark.parametrize(
    "schemas", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_forced_calls_are_valid_whatever_their_schemas(sdk: openai.OpenAI, schemas: int) -> None:
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(called, sdk, seed) for seed in range(schemas)]
        reasons = [reason for one in asked for reason in one.result()]
    assert reasons.count("length") < schemas // 2  # of twice as many


ARITHMETIC = """start: expression
expression: term (SP SIGN SP term){0,3}
term: NUMBER | "(" NUMBER ")"
NUMBER: DIGIT{1,3}
SIGN: "+" | "-"
SP: " "
%import common.DIGIT"""
PATCH = 'start: "*** Begin Patch\\n" line{1,3} "*** End Patch"\nline: ("+" | "-") /[^\\n]{0,12}/ "\\n"'


@pytest.mark.parametrize(
    ("syntax", "definition", "obeys"),
    [
        ("lark", ARITHMETIC, r"(\d{1,3}|\(\d{1,3}\))( [+-] (\d{1,3}|\(\d{1,3}\))){0,3}"),
        ("lark", PATCH, r"\*\*\* Begin Patch\n([+-][^\n]{0,12}\n){1,3}\*\*\* End Patch"),
        ("regex", "(cat|dog) [0-9]{2}", r"(cat|dog) [0-9]{2}"),
    ],
    ids=["arithmetic", "patch", "regex"],
)
def test_the_input_of_a_custom_tool_obeys_its_grammar(
    sdk: openai.OpenAI, syntax: str, definition: str, obeys: str
) -> None:
    """Of a model that was taught none, at a temperature at which its own words are noise."""
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    whole = 0
    for _ in range(8):
        answer = sdk.responses.create(
            model=MODEL,
            input="My dog is called Rexo. Tell me about it.",
            tools=[{"type": "custom", "name": "write", "format": form}],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.5,
            max_output_tokens=120,
        )
        (item,) = answer.output
        assert item.type == "custom_tool_call"
        assert item.name == "write"
        if answer.status == "completed":
            assert re.fullmatch(obeys, item.input), item.input
            whole += 1
    assert whole > 3


def test_a_session_goes_on_behind_forced_calls(sdk: openai.OpenAI) -> None:
    """With the results of calls, held and free turns in turn; what the session keeps is what was answered."""
    session = {"session_id": "forced-calls"}
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": schema}}]
    first = sdk.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False,
        temperature=0, extra_body=session,
    )  # fmt: skip
    message = first.choices[0].message
    assert message.tool_calls
    (call,) = message.tool_calls
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "It is brown."}
    second = sdk.chat.completions.create(
        model=MODEL, messages=[result], temperature=0, max_tokens=40, extra_body=session
    )
    assert second.choices[0].finish_reason in ("stop", "length")
    assert second.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens
    third = sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "And now?"}], temperature=0, extra_body=session,
        tool_choice={"type": "function", "function": {"name": "find"}},
    )  # fmt: skip
    assert third.choices[0].finish_reason == "stop"
    assert third.choices[0].message.tool_calls
    assert json.loads(third.choices[0].message.tool_calls[0].function.arguments)["kind"] in ("cat", "dog")
    kept = sdk.get("/sessions/forced-calls", cast_to=object)
    assert isinstance(kept, dict)
    roles = [one["role"] for one in kept["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert kept["messages"][1]["tool_calls"] == [call.model_dump()]


@pytest.mark.parametrize("example", examples("docs/tools.md", "python"))
def test_the_examples_of_the_document(stack: Stack, example: str) -> None:
    name, arguments = run_python(example, stack).strip().split(" ", 1)
    assert name == "remember_pet"
    assert set(ast.literal_eval(arguments)) == {"name", "kind"}
