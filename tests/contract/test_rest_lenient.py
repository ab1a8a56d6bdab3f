"""Fields that clients of other servers send: built, accepted without effect, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcommons.model.synthetic_tokenizer import CHAT_TEMPLATE
from tests.contract.rest_stack import MODEL_FOLDER, KvStore, Stack, stack

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}]}
PROMPT: dict[str, Any] = {"prompt": "hi there"}
OTHERS: dict[str, dict[str, Any]] = {
    COMPLETIONS: PROMPT,
    "/v1/responses": {"input": "hi there"},
    "/v1/messages": HI | {"max_tokens": 9, "model": "demo"},
}


async def test_penalty_and_least_length_reach_the_engines(served: Stack) -> None:
    served.says("one two")
    status, _ = await served.post(CHAT, HI | {"repetition_penalty": 1.3, "min_tokens": 2})
    assert status == 200
    (asked,) = served.engines[0].prefill.jobs
    assert (asked.sampling.repetition_penalty, asked.sampling.min_tokens) == (1.3, 2)


async def test_a_stop_string_in_the_first_tokens_ends_nothing(served: Stack) -> None:
    (answer,) = served.says("one, two, three")
    stop = served.tokenizer.decode([answer[0]])
    _, stopped = await served.post(CHAT, HI | {"stop": stop})
    assert stopped["choices"][0]["message"]["content"] == ""
    _, whole = await served.post(CHAT, HI | {"stop": stop, "min_tokens": 1})
    assert whole["choices"][0]["message"]["content"].startswith(stop)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_stop_string_stands_at_the_end_where_that_is_asked(served: Stack, path: str) -> None:
    served.says("one, two, three")
    body = {**(HI if path == CHAT else PROMPT), "stop": " thr", "include_stop_str_in_output": True}
    _, whole = await served.post(path, body)
    choice = whole["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert text == "one, two, thr"
    chunks = [chunk for chunk in await served.stream(path, body) if chunk != "[DONE]"]
    choices = [chunk["choices"][0] for chunk in chunks]
    pieces = [one["delta"].get("content") or "" if path == CHAT else one["text"] for one in choices]
    assert "".join(pieces) == text
    assert choices[-1]["finish_reason"] == "stop"


async def test_a_session_keeps_no_stop_string(served: Stack) -> None:
    served.says("one, two, three")
    body = HI | {"stop": " thr", "include_stop_str_in_output": True, "session_id": "stopped"}
    await served.post(CHAT, body)
    _, session = await served.get("/v1/sessions/stopped")
    assert session["messages"][-1]["content"] == "one, two,"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_so_far_is_in_each_chunk_where_that_is_asked(served: Stack, path: str) -> None:
    (answer,) = served.says("one two three four", end=False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = (HI if path == CHAT else PROMPT) | {"stream_options": options, "max_tokens": len(answer)}
    chunks = [chunk for chunk in await served.stream(path, body) if chunk != "[DONE]"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(answer)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto"},
        {"reasoning_effort": "medium", "verbosity": "low"},
        {"skip_special_tokens": True, "spaces_between_special_tokens": True, "repetition_penalty": 1},
        {"chat_template_kwargs": {}},
    ],
)
async def test_neutral_fields_change_nothing(served: Stack, fields: dict[str, Any]) -> None:
    served.says("hello")
    _, plain = await served.post(CHAT, HI)
    status, body = await served.post(CHAT, HI | fields)
    assert (status, body["choices"], body["usage"]) == (200, plain["choices"], plain["usage"])
    first, second = (job.tokens for job in served.engines[0].prefill.jobs)
    assert first == second


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "no_such"])
async def test_reserved_names_of_the_template_stay_as_they_are(served: Stack, name: str) -> None:
    status, body = await served.post(CHAT, HI | {"chat_template_kwargs": {name: "x"}})
    assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")
    assert name in body["error"]["message"]
    assert served.engines[0].prefill.jobs == []


async def test_what_the_template_reads_reaches_the_prompt(
    socket_folder: Path, rest_store: KvStore, tmp_path: Path
) -> None:
    """The demo model's own template reads nothing of requests: here it does."""
    for file in MODEL_FOLDER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    reads = "{%- if reasoning_effort %}Effort {{ reasoning_effort }}{%- endif %}"
    reads += "{%- if enable_thinking is false %}Do not think{%- endif %}"
    (tmp_path / "chat_template.jinja").write_text(reads + CHAT_TEMPLATE)
    async with stack(socket_folder, rest_store, model=tmp_path) as it:
        await it.show()
        it.says("hello")
        for effort, options, begins in (
            (None, {}, ""),
            ("high", None, "Effort high"),
            ("high", {"reasoning_effort": "low"}, "Effort low"),
            ("high", {"enable_thinking": False}, "Effort highDo not think"),
        ):
            fields = {"reasoning_effort": effort, "chat_template_kwargs": options}
            status, body = await it.post(CHAT, HI | fields)
            assert status == 200, body
            prompt = it.tokenizer.decode(it.engines[0].decode.jobs[-1].tokens)
            assert prompt.removesuffix("user\nhi there\nassistant\n") == begins
        for effort, begins in ((None, ""), ("low", "Effort low")):
            status, body = await it.post(
                "/v1/responses", {"input": "hi there", "reasoning": {"effort": effort}}
            )
            assert status == 200, body
            prompt = it.tokenizer.decode(it.engines[0].decode.jobs[-1].tokens)
            assert prompt.removesuffix("user\nhi there\nassistant\n") == begins
        status, body = await it.post("/v1/responses", {"input": "hi", "reasoning": {"effort": 5}})
        assert (status, body["error"]["param"]) == (400, "reasoning.effort")
        for name in ("messages", "thinking"):
            status, body = await it.post(CHAT, HI | {"chat_template_kwargs": {name: True}})
            assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")
            assert "it reads enable_thinking, reasoning_effort" in body["error"]["message"]


async def test_a_least_length_beyond_the_answers_end_is_refused(served: Stack) -> None:
    status, body = await served.post(CHAT, HI | {"min_tokens": 9, "max_tokens": 8})
    assert (status, body["error"]["param"]) == (400, "min_tokens")
    schema = {"type": "json_object"}
    status, body = await served.post(CHAT, HI | {"min_tokens": 9, "response_format": schema})
    assert (status, body["error"]["param"]) == (400, "min_tokens")


async def test_context_errors_begin_as_openais_do(served: Stack) -> None:
    maximum = "This model's maximum context length is 2048 tokens. However, "
    _, body = await served.post(CHAT, HI | {"max_tokens": 5000})
    assert body["error"]["message"].startswith(f"{maximum}you requested ")
    long = " ".join(["word"] * 3000)
    _, body = await served.post(CHAT, {"messages": [{"role": "user", "content": long}]})
    assert body["error"]["message"].startswith(f"{maximum}your messages resulted in ")
    _, body = await served.post(COMPLETIONS, {"prompt": long})
    assert body["error"]["message"].startswith(f"{maximum}your prompt resulted in ")
    _, body = await served.post(COMPLETIONS, {"prompt": long * 10})
    assert body["error"]["message"].startswith(maximum)


async def test_unknown_fields_are_ignored_and_named_where_the_setting_says_so(
    served: Stack, socket_folder: Path, rest_store: KvStore
) -> None:
    status, body = await served.post(CHAT, HI | {"guided_json": {}})
    assert (status, body["error"]["param"]) == (400, "guided_json")
    for path, asked in OTHERS.items():
        status, body = await served.post(path, asked | {"mirostat": {}})
        assert (status, "mirostat" in body["error"]["message"]) == (400, True), path
    async with stack(socket_folder / "b", rest_store, settings={"unknown_fields": "ignore"}) as it:
        await it.show()
        it.says("hello")
        for more in ({}, {"stream": True}):
            body = HI | {"mirostat": {}, "x\r\ny": 1} | more
            async with it.http.post(CHAT, json=body) as response:
                assert response.status == 200
                assert response.headers["X-Ignored-Fields"] == "mirostat,x%0D%0Ay"
                await response.read()
        async with it.http.post(CHAT, json=HI) as response:
            assert "X-Ignored-Fields" not in response.headers
        for path, asked in OTHERS.items():
            async with it.http.post(path, json=asked | {"mirostat": {}}) as response:
                assert (response.status, response.headers.get("X-Ignored-Fields")) == (200, "mirostat"), path
