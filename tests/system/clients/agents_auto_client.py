"""OpenAI's agents SDK with a model that calls a tool where it wants to: `script ADDRESS MODEL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

URL, MODEL = sys.argv[1], sys.argv[2]
INSTRUCTIONS = "You get the weather of cities by a function. Write its call and nothing else."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city, now."""
    return f"It rains in {city}."


def conversation(city: str) -> Any:
    """So small a model has to see how it is done."""
    said: list[dict[str, str]] = []
    for example in ("Rome", "Berlin", "Lima"):
        said.append({"role": "user", "content": f"What is the weather in {example}?"})
        said.append({"role": "assistant", "content": CALL % example})
    return [*said, {"role": "user", "content": f"What is the weather in {city}?"}]


async def main() -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for kind, model in (
        ("chat completions", OpenAIChatCompletionsModel(MODEL, client)),
        ("responses", OpenAIResponsesModel(MODEL, client)),
    ):
        agent = Agent(
            name="Weather",
            instructions=INSTRUCTIONS,
            model=model,
            model_settings=ModelSettings(temperature=0, max_tokens=60),
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
        )
        for city in ("Oslo", "Madrid"):
            result = await Runner.run(agent, conversation(city), max_turns=1)
            print(f"{kind}: {result.final_output}", flush=True)
            streamed = Runner.run_streamed(agent, conversation(city), max_turns=1)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == result.final_output, streamed.final_output


asyncio.run(main())
