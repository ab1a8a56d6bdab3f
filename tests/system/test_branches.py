"""Sessions that people edit, over REST, from a whole stack with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.machine import scaled
from tests.system.stack import Stack

BLOCK_TOKENS = 16


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.v1, api_key="none", max_retries=0, timeout=scaled(60)) as client:
        yield client


def ask(sdk: openai.OpenAI, messages: list[Any], **more: Any) -> openai.types.chat.ChatCompletion:
    return sdk.chat.completions.create(
        model=sdk.models.list().data[0].id, messages=messages, temperature=0, max_tokens=40, **more
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def cached(answer: openai.types.chat.ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    return answer.usage.prompt_tokens_details.cached_tokens


def test_a_branch_says_what_the_undisturbed_conversation_would(sdk: openai.OpenAI) -> None:
    """What it shares with the session comes from cache, up to the turn at which it departs."""
    session = {"session_id": "edited"}
    messages: list[Any] = []
    for text in ("My fox is called Fenja.", "My owl is called Ulla.", "What is my owl called?"):
        messages.append(user(text))
        answer = ask(sdk, messages, extra_body=session)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    edited = [*messages[:4], user("What is my fox called?")]
    branch = ask(sdk, edited, extra_body=session)
    assert "Fenja" in (branch.choices[0].message.content or "")
    assert (branch.model_extra or {})["branch"] == "edited~2"
    assert cached(branch) >= 2 * BLOCK_TOKENS
    alone = ask(sdk, edited, extra_body={"reuse": False})
    assert branch.choices[0].message.content == alone.choices[0].message.content
    on = ask(sdk, [user("And my owl?")], extra_body={"session_id": "edited~2"})
    assert "Ulla" in (on.choices[0].message.content or "")
    again = ask(sdk, messages[:5], extra_body=session)
    assert again.choices[0].message.content == messages[5]["content"]
    assert (again.model_extra or {})["branch"] == "edited~3"


def test_another_head_takes_from_cache_no_more_than_it_shares(stack: Stack, sdk: openai.OpenAI) -> None:
    """Other instructions, from their last words on: what stands behind them is computed anew, though it was
    said in the same session."""
    shared = "You answer in one sentence. The person before you has a fox, an owl and two cats at home. " * 3
    heads = [{"role": "system", "content": f"{shared}{word}"} for word in ("Be brief.", "Be kind.")]
    session = {"session_id": "headed"}
    said = [user("My fox is called Fenja.")]
    answer = ask(sdk, [heads[0], *said], extra_body=session)
    said += [{"role": "assistant", "content": answer.choices[0].message.content or ""}, user("And now?")]
    first, other = (stack.client.post("/tokenize", {"messages": [head, *said]})["tokens"] for head in heads)
    same = next(at for at, (one, two) in enumerate(zip(first, other, strict=False)) if one != two)
    reply = ask(sdk, [heads[1], *said], extra_body=session)
    assert (reply.model_extra or {})["branch"] == "headed~2"
    assert BLOCK_TOKENS <= cached(reply) <= same // BLOCK_TOKENS * BLOCK_TOKENS
    assert len(other) - same > 2 * BLOCK_TOKENS, "there was more to be taken from cache by mistake"
