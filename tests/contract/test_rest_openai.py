"""The `openai` SDK against the router, with nothing but its base URL changed."""

from __future__ import annotations

import openai
import pytest

from tests.contract.rest_stack import Stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

HI = [{"role": "user", "content": "hi there"}]


async def test_chat(served: Stack) -> None:
    (answer,) = served.says("hello, my friend")
    served.script.cached_tokens = 5
    reply = await served.client.chat.completions.create(model="demo", messages=HI)
    choice = reply.choices[0]
    assert choice.message.content == "hello, my friend"
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(answer)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 5
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + len(answer)
    (asked,) = served.engines[0].decode.jobs
    assert reply.usage.prompt_tokens == len(asked.tokens) == asked.prompt_tokens
    assert asked.max_position == 2048


@pytest.mark.parametrize("max_tokens", [1, 4])
async def test_what_was_cached_is_reported_though_prefills_result_comes_last(
    served: Stack, max_tokens: int
) -> None:
    served.says("one two three four five six")
    served.script.cached_tokens = 5
    served.script.tells = "last"
    reply = await served.client.chat.completions.create(model="demo", messages=HI, max_tokens=max_tokens)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == max_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 5


async def test_stream_has_role_deltas_finish_usage_and_done(served: Stack) -> None:
    served.says("hello, my friend")
    stream = await served.client.chat.completions.create(
        model="demo", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello, my friend"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["timings"]["ttft_ms"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_two_choices_share_a_prompt(served: Stack) -> None:
    served.says("the first", "the second")
    reply = await served.client.chat.completions.create(model="demo", messages=HI, n=2, seed=7)
    assert [choice.message.content for choice in reply.choices] == ["the first", "the second"]
    asked = served.engines[0].prefill.jobs
    assert [request.sampling.choice for request in asked] == [0, 1]
    assert {request.sampling.seed for request in asked} == {7}


async def test_streamed_choices_are_told_apart(served: Stack) -> None:
    served.says("the first", "the second")
    stream = await served.client.chat.completions.create(model="demo", messages=HI, n=2, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "the first", 1: "the second"}


async def test_logprobs(served: Stack) -> None:
    (answer,) = served.says("hello")
    reply = await served.client.chat.completions.create(
        model="demo", messages=HI, logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content) == b"hello"
    assert len(logprobs.content) == len(answer) - 1
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)


async def test_streamed_logprobs_are_those_of_the_text(served: Stack) -> None:
    served.says("hello, you 🙂 there")
    stream = await served.client.chat.completions.create(
        model="demo", messages=HI, logprobs=True, stream=True, stop=["there"]
    )
    text, spelled = "", b""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs is not None:
            for token in chunk.choices[0].logprobs.content or []:
                spelled += bytes(token.bytes or [])
    assert text == "hello, you 🙂 "
    assert text.encode().startswith(spelled)
    assert "🙂" in spelled.decode()


async def test_a_stop_string_ends_the_answer_and_decode(served: Stack) -> None:
    served.says("one two three four", end=False)
    served.script.delay_s = 0.01
    reply = await served.client.chat.completions.create(model="demo", messages=HI, stop=[" three", "zzz"])
    assert reply.choices[0].message.content == "one two"
    assert reply.choices[0].finish_reason == "stop"
    await eventually(lambda: served.calls == 0)


async def test_max_tokens_ends_with_length(served: Stack) -> None:
    served.says("one two three four", end=False)
    reply = await served.client.chat.completions.create(model="demo", messages=HI, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


async def test_a_seed_is_drawn_where_none_is_given(served: Stack) -> None:
    served.says("ok")
    for _ in range(2):
        await served.client.chat.completions.create(model="demo", messages=HI)
    seeds = {request.sampling.seed for request in served.engines[0].decode.jobs}
    assert len(seeds) == 2


async def test_reuse_can_be_switched_off(served: Stack) -> None:
    served.says("ok")
    await served.client.chat.completions.create(model="demo", messages=HI, extra_body={"reuse": False})
    assert served.engines[0].decode.jobs[0].no_reuse
    assert served.engines[0].prefill.jobs[0].no_reuse
    assert served.engines[0].decode.jobs[0].history.matched_blocks == 0


async def test_completions(served: Stack) -> None:
    served.says("and so on")
    reply = await served.client.completions.create(model="demo", prompt=["once", "twice"], logprobs=2)
    assert [choice.text for choice in reply.choices] == ["and so on", "and so on"]
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.tokens) == len(logprobs.text_offset)
    stream = await served.client.completions.create(model="demo", prompt=[5, 6, 7], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "and so on"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert list(served.engines[0].decode.jobs[-1].tokens) == [5, 6, 7]


async def test_models(served: Stack) -> None:
    models = [model.id async for model in served.client.models.list()]
    assert models == ["demo"]
    assert (await served.client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError):
        await served.client.models.retrieve("gpt")


async def test_errors_are_the_sdks_own(served: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await served.client.chat.completions.create(model="gpt", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as negative:
        await served.client.chat.completions.create(model="demo", messages=HI, temperature=-1)
    assert negative.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await served.client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "word " * 3000}]
        )
    assert long.value.code == "context_length_exceeded"
