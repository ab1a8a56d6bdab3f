"""OpenAI's Responses and Anthropic's Messages with their own SDKs, nothing but the base URL changed."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from anthropic.types import MessageParam, TextBlock

from tests.machine import scaled
from tests.system.examples import examples, run_python
from tests.system.stack import Stack

BLOCK_TOKENS = 16
GREEDY = {"temperature": 0}  # Anthropic's SDK has no argument for it any more


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=stack.v1, api_key="none", max_retries=0, timeout=scaled(60)) as client:
        yield client


@pytest.fixture
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=scaled(60)) as client:
        yield client


@pytest.fixture
def model(sdk: openai.OpenAI) -> str:
    return sdk.models.list().data[0].id


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def test_responses_go_on_from_each_other(sdk: openai.OpenAI, model: str) -> None:
    reported = sdk.responses.create(model=model, input="My duck is called Quax.", temperature=0)
    asked = sdk.responses.create(
        model=model, input="What is my duck called?", previous_response_id=reported.id, temperature=0
    )
    assert "Quax" in asked.output_text
    assert asked.usage is not None
    assert asked.usage.input_tokens_details.cached_tokens >= BLOCK_TOKENS
    branch = sdk.responses.create(
        model=model, input="What is my duck called?", previous_response_id=reported.id, temperature=0
    )
    assert branch.output_text == asked.output_text
    assert sdk.responses.retrieve(asked.id).output == asked.output


def test_a_streamed_response_is_what_its_last_event_says(sdk: openai.OpenAI, model: str) -> None:
    with sdk.responses.stream(
        model=model, input="My goose is called Gerda. What is my goose called?", temperature=0
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert "Gerda" in text
    assert (final.output_text, final.status) == (text, "completed")


def test_a_conversation_remembers(sdk: openai.OpenAI, model: str) -> None:
    conversation = sdk.conversations.create()
    for text in ("My swan is called Sanna.", "What is my swan called?"):
        answer = sdk.responses.create(model=model, input=text, conversation=conversation.id, temperature=0)
    assert "Sanna" in answer.output_text
    assert len(list(sdk.conversations.items.list(conversation.id))) == 4
    assert sdk.conversations.delete(conversation.id).deleted


def test_messages_with_the_whole_history(claude: anthropic.Anthropic, model: str) -> None:
    messages: list[MessageParam] = [{"role": "user", "content": "My hen is called Henna."}]
    first = claude.messages.create(model=model, max_tokens=40, messages=messages, extra_body=GREEDY)
    assert first.stop_reason == "end_turn"
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "What is my hen called?"}]},
    ]
    counted = claude.messages.count_tokens(model=model, messages=messages)
    second = claude.messages.create(model=model, max_tokens=40, messages=messages, extra_body=GREEDY)
    assert "Henna" in text_of(second)
    read = second.usage.cache_read_input_tokens
    assert read is not None
    assert read >= BLOCK_TOKENS
    assert second.usage.input_tokens + read == counted.input_tokens


def test_a_streamed_message_is_what_it_accumulates_to(claude: anthropic.Anthropic, model: str) -> None:
    with claude.messages.stream(
        model=model,
        max_tokens=40,
        system="Answer in a sentence.",
        messages=[{"role": "user", "content": "My crow is called Kira. What is my crow called?"}],
        extra_body=GREEDY,
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Kira" in text
    assert (text_of(final), final.stop_reason) == (text, "end_turn")


def test_errors_are_the_sdks_own(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="none", max_tokens=4, messages=[{"role": "user", "content": "hi"}])
    assert missing.value.request_id
    assert claude.models.list().data


@pytest.mark.parametrize("example", examples("docs/apis.md", "python"))
def test_the_examples_of_the_document(stack: Stack, example: str) -> None:
    said, *counts = run_python(example, stack).strip().splitlines()
    assert "Zuzu" in said
    assert all("came from cache" in line or "predicted tokens" in line for line in counts)
