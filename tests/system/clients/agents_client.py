"""OpenAI's agents SDK, against the server at the address that is the first argument."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1], "kvcommons-demo"
GREEDY = ModelSettings(temperature=0, max_tokens=200)
FORCED = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
called: list[str] = []


class Pet(BaseModel):
    """An animal that somebody has."""

    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]


@function_tool
def remember_pet(kind: Literal["cat", "dog"]) -> str:
    """Remembers that somebody has such a pet."""
    called.append(kind)
    return f"A {kind} is remembered."


async def chat(model: Any) -> None:
    result = await Runner.run(agent(model), "My cat is called Zuzu. What is my cat called?")
    assert "Zuzu" in result.final_output, result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


async def session(model: Any) -> None:
    """The SDK's own session sends the whole history each time."""
    kept = SQLiteSession("pets")
    await Runner.run(agent(model), "My hamster is called Fipsi, and it lives with my sister.", session=kept)
    result = await Runner.run(agent(model), "What is my hamster called?", session=kept)
    assert "Fipsi" in result.final_output, result.final_output
    usage = result.context_wrapper.usage
    assert usage.input_tokens_details.cached_tokens > 0, usage


async def stream(model: Any) -> None:
    result = Runner.run_streamed(agent(model), "My dog is called Rexo. What is my dog called?")
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "Rexo" in "".join(deltas), deltas
    assert "".join(deltas) == result.final_output


async def tools(model: Any) -> None:
    """The call is held, the answer to its result is not."""
    called.clear()
    result = await Runner.run(
        agent(model, FORCED, tools=[remember_pet]), "My cat is called Zuzu.", max_turns=3
    )
    assert len(called) == 1, called
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == [f"A {called[0]} is remembered."], outputs


async def structured(model: Any) -> None:
    result = await Runner.run(agent(model, output_type=Pet), "My cat is called Zuzu.")
    assert isinstance(result.final_output, Pet), result.final_output


async def error(model: Any) -> None:
    refused = None
    try:
        await Runner.run(agent(model, ModelSettings(max_tokens=100_000)), "hello")
    except openai.BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.code == "context_length_exceeded", refused


def agent(model: Any, settings: ModelSettings = GREEDY, **more: Any) -> Agent:
    return Agent(name="Keeper", model=model, model_settings=settings, **more)


async def main() -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for kind, of in (("chat completions", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        for check in (chat, session, stream, tools, structured, error):
            await check(of(MODEL, client))
            print(f"{kind}: {check.__name__}", flush=True)


asyncio.run(main())
