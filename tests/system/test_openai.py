"""The `openai` SDK with nothing but `base_url` changed."""

from __future__ import annotations

import json
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


@pytest.fixture
def model(sdk: openai.OpenAI) -> str:
    return sdk.models.list().data[0].id


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_streams_with_usage_at_its_end(sdk: openai.OpenAI, model: str) -> None:
    stream = sdk.chat.completions.create(
        model=model,
        messages=ask("My dog is called Rexo. What is my dog called?"),
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Rexo" in text
    *_, finish, usage = chunks
    assert finish.choices[0].finish_reason in ("stop", "length")
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.total_tokens == usage.usage.prompt_tokens + usage.usage.completion_tokens


def test_the_same_prompt_again_comes_from_cache_and_says_the_same(sdk: openai.OpenAI, model: str) -> None:
    messages = ask("My parrot is called Mimosa. My house is green. What is my parrot called?")
    first, second = (
        sdk.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=30)
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    expected = (second.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.usage.prompt_tokens_details.cached_tokens == expected > 0


def test_an_answer_can_be_sent_back_as_the_sdk_dumps_it(sdk: openai.OpenAI, model: str) -> None:
    messages: list[Any] = ask("My cow is called Rosa.")
    first = sdk.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=30)
    messages += [first.choices[0].message.model_dump(), *ask("What is my cow called?")]
    second = sdk.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=30)
    assert "Rosa" in (second.choices[0].message.content or "")


def test_an_answer_of_one_token_says_what_came_from_cache(stack: Stack) -> None:
    """Decode's stream of it is over about when prefill gives its account, over another connection."""
    history = 0
    for turn in range(8):
        answer = stack.client.say(
            f"This is number {turn} of some remarks on cats.", "terse", max_tokens=1, ignore_eos=True
        )
        assert (answer.completion_tokens, answer.finish_reason) == (1, "length")
        # Of a history of n tokens the last has no KV yet.
        assert answer.cached_tokens == max(0, history - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        history = stack.client.session("terse")["tokens"]
    assert answer.cached_tokens >= 8 * BLOCK_TOKENS


def test_a_seed_decides_and_choices_differ(sdk: openai.OpenAI, model: str) -> None:
    def sample(seed: int) -> list[str]:
        # No chat: what the demo model says in one is too certain to differ.
        answer = sdk.completions.create(
            model=model,
            prompt="Names: ",
            temperature=2.0,
            seed=seed,
            n=2,
            max_tokens=32,
            extra_body={"ignore_eos": True},
        )
        return [choice.text for choice in answer.choices]

    first, again, other = sample(11), sample(11), sample(12)
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_logprobs_are_of_the_tokens_sent(sdk: openai.OpenAI, model: str) -> None:
    answer = sdk.chat.completions.create(
        model=model, messages=ask("Hello!"), temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    for token in choice.logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-6)  # greedy
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("header", ["X-Session-ID", "session-id", "x-claude-code-session-id"])
def test_a_session_by_header_keeps_the_conversation(sdk: openai.OpenAI, model: str, header: str) -> None:
    headers = {header: f"by-{header}"}

    def say(text: str) -> str:
        answer = sdk.chat.completions.create(
            model=model, messages=ask(text), temperature=0, max_tokens=40, extra_headers=headers
        )
        assert answer.model_extra is not None
        assert answer.model_extra["session_id"] == f"by-{header}"
        return answer.choices[0].message.content or ""

    say("My horse is called Tulpo.")
    assert "Tulpo" in say("What is my horse called?")


def test_completions(sdk: openai.OpenAI, model: str) -> None:
    whole = sdk.completions.create(model=model, prompt="The weather is", temperature=0, max_tokens=12)
    stream = sdk.completions.create(
        model=model, prompt="The weather is", temperature=0, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
    assert whole.choices[0].text


def test_what_was_generated_is_as_likely_when_it_is_read(
    stack: Stack, sdk: openai.OpenAI, model: str
) -> None:
    """Logprobs of an answer's tokens, as they were generated, and as prefill finds them in a prompt that ends
    with them: with no token and with one more, streamed, and as vLLM says them."""
    reported = sdk.chat.completions.create(
        model=model,
        messages=ask("My owl is called Bubo. What is my owl called?"),
        temperature=0,
        logprobs=True,
        extra_body={"session_id": "likely"},
    )
    assert reported.usage is not None
    assert reported.choices[0].logprobs is not None
    expected = [one.logprob for one in reported.choices[0].logprobs.content or ()]
    assert len(expected) > 4
    first = reported.usage.prompt_tokens
    ids = stack.client.session("likely")["token_ids"]
    of_answer = slice(first, first + len(expected))
    for max_tokens, stream in ((0, False), (1, False), (0, True)):
        asked: dict[str, Any] = {"prompt": ids, "max_tokens": max_tokens, "logprobs": 2, "temperature": 0}
        answer = sdk.completions.create(model=model, echo=True, stream=stream, **asked)
        chunks = list(answer) if stream else [answer]
        parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        numbers = [number for part in parts for number in part.token_logprobs or ()]
        assert numbers[0] is None
        assert len(numbers) == len(ids) + max_tokens
        assert numbers[of_answer] == pytest.approx(expected, abs=1e-3)
        assert "Bubo" in "".join(choice.text for chunk in chunks for choice in chunk.choices)
    read = stack.client.post("/v1/completions", {"prompt": ids, "max_tokens": 0, "prompt_logprobs": 1})
    found = list(zip(ids, read["choices"][0]["prompt_logprobs"], strict=True))[of_answer]
    assert [one[str(token)]["logprob"] for token, one in found] == pytest.approx(expected, abs=1e-3)
    assert [one[str(token)]["rank"] for token, one in found] == [1] * len(found)
    assert read["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_stop_strings_are_not_sent(sdk: openai.OpenAI, model: str) -> None:
    free = sdk.chat.completions.create(
        model=model,
        messages=ask("My cat is called Zuzu. What is my cat called?"),
        temperature=0,
        max_tokens=40,
    )
    text = free.choices[0].message.content or ""
    assert "Zuzu" in text
    cut = sdk.chat.completions.create(
        model=model,
        messages=ask("My cat is called Zuzu. What is my cat called?"),
        temperature=0,
        max_tokens=40,
        stop=["Zuzu"],
    )
    assert cut.choices[0].message.content == text.partition("Zuzu")[0]
    assert cut.choices[0].finish_reason == "stop"


def test_a_class_of_service_is_used_and_said(sdk: openai.OpenAI, model: str) -> None:
    messages: Any = ask("My goat is called Pepe. What is my goat called?")
    plain = sdk.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=30)
    assert plain.service_tier == "default"
    stream = sdk.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=30, stream=True, service_tier="priority"
    )
    chunks = list(stream)
    assert {chunk.service_tier for chunk in chunks} == {"priority"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == plain.choices[0].message.content
    flex = sdk.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=30, service_tier="flex"
    )
    assert flex.service_tier == "default", "no class here is called so"
    with pytest.raises(openai.BadRequestError) as unknown:
        sdk.chat.completions.create(model=model, messages=messages, extra_body={"service_tier": "prioritee"})
    assert unknown.value.param == "service_tier"


def test_what_prompts_cost_is_known_from_the_start(stack: Stack) -> None:
    """Each engine has measured it, and keeps it in the data folder."""
    for name in ("prefill", "decode"):
        kept = json.loads((stack.data / "predictors" / f"{name}.json").read_text())
        assert kept["learnt"]["costs"]["pairs"] >= 0
        assert kept["learnt"]["observed"] > 0


def test_errors_are_the_sdks_own_classes(sdk: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="no-such-model", messages=ask("Hi"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as negative:
        sdk.chat.completions.create(model=model, messages=ask("Hi"), temperature=-1)
    assert negative.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.chat.completions.create(model=model, messages=ask("word " * 5000))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unbuilt:
        sdk.chat.completions.create(model=model, messages=ask("Hi"), modalities=["audio"])
    assert unbuilt.value.param == "modalities"
