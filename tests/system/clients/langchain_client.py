"""LangChain's chat model, against the server at the address that is the first argument."""

from __future__ import annotations

import sys
from typing import Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, MODEL = sys.argv[1], "kvcommons-demo"
GREEDY = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}


class Pet(BaseModel):
    """An animal that somebody has."""

    name: str = Field(max_length=12)
    kind: Literal["cat", "dog"]


@tool
def remember_pet(kind: Literal["cat", "dog"]) -> str:
    """Remembers that somebody has such a pet."""
    return f"A {kind} is remembered."


def chat(model: ChatOpenAI) -> None:
    answer = model.invoke("My cat is called Zuzu. What is my cat called?")
    assert "Zuzu" in answer.text, answer
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def history(model: ChatOpenAI) -> None:
    said = [HumanMessage("My hamster is called Fipsi, and it lives with my sister.")]
    said.append(model.invoke(said))
    answer = model.invoke([*said, HumanMessage("What is my hamster called?")])
    assert "Fipsi" in answer.text, answer
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0, answer.usage_metadata


def session(model: ChatOpenAI) -> None:
    """Of chat completions by a header; of responses by the one before, behind which what is new is sent."""
    reported, asked = HumanMessage("My goose is called Gerda."), HumanMessage("What is my goose called?")
    if model.use_responses_api:
        kept = ChatOpenAI(**GREEDY, use_responses_api=True, use_previous_response_id=True)
        answer = kept.invoke([reported, kept.invoke([reported]), asked])
    else:
        kept = ChatOpenAI(**GREEDY, default_headers={"X-Session-ID": "langchain-client"})
        kept.invoke([reported])
        answer = kept.invoke([asked])
    assert "Gerda" in answer.text, answer


def stream(model: ChatOpenAI) -> None:
    chunks = list(model.stream("My dog is called Rexo. What is my dog called?"))
    assert len(chunks) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert "Rexo" in whole.text, whole
    assert whole.usage_metadata is not None, "the usage comes at the end of a stream"


def tools(model: ChatOpenAI) -> None:
    asked = HumanMessage("My cat is called Zuzu.")
    bound = model.bind_tools([remember_pet], tool_choice="required", parallel_tool_calls=False, strict=True)
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "remember_pet", call
    result = remember_pet.invoke(call)
    assert isinstance(result, ToolMessage)
    after = model.bind_tools([remember_pet]).invoke([asked, answer, result])
    assert isinstance(after, AIMessage)
    assert after.text or after.tool_calls, after
    streamed = list(bound.stream([asked]))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == call["args"], whole


def structured(model: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        pet = model.with_structured_output(Pet, method=method, strict=True).invoke("My cat is called Zuzu.")
        assert isinstance(pet, Pet), pet


def error(model: ChatOpenAI) -> None:
    refused = None
    try:
        model.bind(max_tokens=100_000).invoke("hello")
    except openai.BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.code == "context_length_exceeded", refused


def main() -> None:
    for kind, model in (
        ("chat completions", ChatOpenAI(**GREEDY, stream_usage=True)),
        ("responses", ChatOpenAI(**GREEDY, use_responses_api=True)),
    ):
        for check in (chat, history, session, stream, tools, structured, error):
            check(model)
            print(f"{kind}: {check.__name__}", flush=True)


main()
