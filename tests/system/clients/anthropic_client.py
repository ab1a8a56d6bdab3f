"""Anthropic's SDK, against the server at the address that is the first argument."""

from __future__ import annotations

import sys
from typing import Any, Literal

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1], "kvcommons-demo"
ASKED: list[Any] = [{"role": "user", "content": "My cat is called Zuzu."}]
GREEDY = {"temperature": 0}  # the SDK has no argument for it
TOOL: Any = {
    "name": "remember_pet",
    "input_schema": {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}},
        "required": ["kind"],
        "additionalProperties": False,
    },
}
called: list[str] = []


class Pet(BaseModel):
    """An animal that somebody has."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]


@beta_tool
def remember_pet(kind: Literal["cat", "dog"]) -> str:
    """Remembers that somebody has such a pet."""
    called.append(kind)
    return f"A {kind} is remembered."


def chat(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "My cat is called Zuzu. What is my cat called?"}],
        extra_body=GREEDY,
    )
    assert "Zuzu" in answer.content[0].text, answer


def stream(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "My dog is called Rexo. What is my dog called?"}]
    with client.messages.stream(model=MODEL, max_tokens=60, messages=asked, extra_body=GREEDY) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert "Rexo" in text, text
    assert final.content[0].text == text


def session(client: anthropic.Anthropic) -> None:
    """The whole history each time, kept by a header."""
    headers = {"x-claude-code-session-id": "anthropic-sdk"}
    messages: list[Any] = [
        {"role": "user", "content": "My hamster is called Fipsi, and lives with my sister."}
    ]
    for answer_wanted in ("", "Fipsi"):
        reply = client.messages.with_raw_response.create(
            model=MODEL, max_tokens=60, messages=messages, extra_headers=headers, extra_body=GREEDY
        )
        answer = reply.parse()
        assert reply.headers["X-Session-ID"].startswith("anthropic-sdk"), reply.headers
        assert answer_wanted in answer.content[0].text, answer
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "What is my hamster called?"},
        ]
    assert answer.usage.cache_read_input_tokens > 0, answer.usage


def tools(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(
        model=MODEL, max_tokens=200, tools=[TOOL], tool_choice=choice, messages=ASKED, extra_body=GREEDY
    )
    (call,) = answer.content
    assert call.input["kind"] in ("cat", "dog"), call
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "It is remembered."}]
    after = client.messages.create(
        model=MODEL,
        max_tokens=60,
        tools=[TOOL],
        messages=[
            *ASKED,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ],
        extra_body=GREEDY,
    )
    assert after.content, after
    called.clear()
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        tools=[remember_pet],
        tool_choice={"type": "tool", "name": "remember_pet"},
        messages=ASKED,
        max_iterations=1,
        extra_body=GREEDY,
    )
    runner.until_done()
    assert called in (["cat"], ["dog"]), called


def structured(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(
        model=MODEL, max_tokens=200, messages=ASKED, output_format=Pet, extra_body=GREEDY
    )
    assert isinstance(answer.parsed_output, Pet), answer


def error(client: anthropic.Anthropic) -> None:
    refused = None
    try:
        client.messages.create(model=MODEL, max_tokens=20_000, messages=ASKED)
    except anthropic.BadRequestError as error:
        refused = error
    assert refused is not None
    assert "prompt is too long" in str(refused), refused
    assert refused.request_id


def main() -> None:
    client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    for check in (chat, stream, session, tools, structured, error):
        check(client)
        print(check.__name__, flush=True)


main()
