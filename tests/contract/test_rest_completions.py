"""All of /v1/completions, and logprobs of prompts there and in chat, as evaluation harnesses use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import Unavailable
from tests.contract.rest_stack import WINDOW, KvStore, Stack, stack
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "Once upon a time there was a caf\N{LATIN SMALL LETTER E WITH ACUTE}"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}]}


async def whole(served: Stack, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    status, answer = await served.post(path, body)
    assert status == 200, answer
    return answer


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """A choice, put together from its chunks."""
    assert chunks[-1] == "[DONE]"
    text, logprobs, reason = "", dict[str, list[Any]](), None
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            text += choice["text"]
            reason = choice["finish_reason"]
            for name, items in (choice["logprobs"] or {}).items():
                logprobs.setdefault(name, []).extend(items)
    return {"index": index, "text": text, "logprobs": logprobs or None, "finish_reason": reason}


@pytest.mark.parametrize("ids", [False, True])
async def test_the_prompt_stands_before_each_answer(served: Stack, ids: bool) -> None:
    served.says(" one", " two")
    prompts = ["Hello", PROMPT]
    given = [served.tokenizer.encode_prompt(prompt) for prompt in prompts] if ids else prompts
    body = {"prompt": given, "n": 2, "echo": True}
    answer = await whole(served, body)
    expected = ["Hello one", "Hello two", f"{PROMPT} one", f"{PROMPT} two"]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    chunks = await served.stream(COMPLETIONS, body)
    assert [joined(chunks, index)["text"] for index in range(4)] == expected
    assert not any(job.HasField("prompt_logprobs") for job in served.engines[0].prefill.jobs)


async def test_echoed_logprobs_are_openais(served: Stack) -> None:
    """Null first, then a number a token, each token's own among its alternatives; offsets are of the text as
    a whole, the answer's behind the prompt's."""
    (answer_ids,) = served.says(" in town", end=False)
    tokens = served.tokenizer.encode_prompt(PROMPT)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": len(answer_ids)}
    (choice,) = (await whole(served, body))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT + " in town", "length")
    logprobs = choice["logprobs"]
    names = [served.tokenizer.token_text(token) for token in (*tokens, *answer_ids)]
    assert logprobs["tokens"] == names
    numbers = [None, *(-position / 8 for position in range(1, len(tokens)))]
    assert logprobs["token_logprobs"][: len(tokens)] == numbers
    assert logprobs["top_logprobs"][0] is None
    for name, number, top in zip(
        names[1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert top[name] == number == max(top.values())
        assert len(top) <= 3
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[len(tokens)]) == (0, len(PROMPT))
    for name, offset in zip(names, offsets, strict=True):
        if "\N{REPLACEMENT CHARACTER}" not in name:
            assert choice["text"].startswith(name, offset)
    streamed = joined(await served.stream(COMPLETIONS, body))
    assert streamed == choice
    # Once for the answer and once for its stream; decode is told, so that it finds nothing of the prompt.
    assert [job.prompt_logprobs for job in served.engines[0].prefill.jobs] == [2, 2]
    assert [job.prompt_logprobs for job in served.engines[0].decode.jobs] == [2, 2]


async def test_a_loglikelihood_as_harnesses_ask_for_it(served: Stack) -> None:
    """Token ids, several prompts, one token more or none; what decides are the numbers behind the context."""
    served.says("x")
    prompts = [list(range(5, 25)), list(range(30, 60))]
    for max_tokens in (0, 1):
        body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
        answer = await whole(served, body)
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        assert answer["usage"]["prompt_tokens"] == 50
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            numbers = choice["logprobs"]["token_logprobs"]
            assert len(numbers) == len(prompt) + max_tokens
            assert numbers[10 : len(prompt)] == [-position / 8 for position in range(10, len(prompt))]
            assert choice["finish_reason"] == "length"


async def test_a_token_that_ends_the_answer_counts(served: Stack) -> None:
    """Harnesses ask for one token and leave its number out, whichever it is; its text is none."""
    served.says("")
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 1}
    (choice,) = (await whole(served, body))["choices"]
    eos = served.tokenizer.token_text(min(served.tokenizer.eos_ids))
    assert choice["logprobs"]["tokens"][3:] == [eos]
    assert choice["logprobs"]["text_offset"][3:] == [len(choice["text"])]
    assert (choice["text"], choice["finish_reason"]) == (served.tokenizer.decode([5, 6, 7]), "stop")
    assert joined(await served.stream(COMPLETIONS, body)) == choice
    (plain,) = (await whole(served, {"prompt": [5, 6, 7], "logprobs": 1}))["choices"]
    assert plain["logprobs"]["tokens"] == [eos]


async def test_nothing_is_generated_where_no_token_is_asked_for(served: Stack) -> None:
    """No decode has to have room for it. A prompt may fill the context window then."""
    served.says("never shown")
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "n": 2}
    answer = await whole(served, body | {"logprobs": 0})
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT, PROMPT]
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first == second
    assert served.engines[0].decode.jobs == []
    jobs = served.engines[0].prefill.jobs
    assert [job.HasField("prompt_logprobs") for job in jobs] == [True, False]
    chunks = await served.stream(COMPLETIONS, body | {"logprobs": 0})
    assert joined(chunks, 1) == answer["choices"][1]
    assert joined(await served.stream(COMPLETIONS, body))["text"] == PROMPT
    full = await whole(served, {"prompt": [7] * WINDOW, "max_tokens": 0, "prompt_logprobs": 0})
    assert len(full["choices"][0]["prompt_logprobs"]) == WINDOW
    assert served.engines[0].decode.jobs == []
    longer = {"prompt": [7] * (WINDOW + 1), "max_tokens": 0, "echo": True}
    status, refused = await served.post(COMPLETIONS, longer)
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_prompt_beyond_prefills_memory_lies_at_decode_though_nothing_follows_it(
    socket_folder: Path, rest_store: KvStore
) -> None:
    """What decode samples all the same nobody sees."""
    async with stack(socket_folder, rest_store) as served:
        served.engines[0].prefill_blocks = 3
        await served.show()
        served.says("never shown")
        for stream in (False, True):
            body = {"prompt": [7] * 60, "max_tokens": 0, "echo": True, "logprobs": 0}
            if stream:
                choice = joined(await served.stream(COMPLETIONS, body))
            else:
                answer = await whole(served, body)
                assert answer["usage"]["completion_tokens"] == 0
                (choice,) = answer["choices"]
            assert choice["text"] == served.tokenizer.decode([7] * 60)
            assert len(choice["logprobs"]["tokens"]) == 60
            assert choice["finish_reason"] == "length"
        assert [job.max_position for job in served.engines[0].decode.jobs] == [61, 61]
        await whole(served, {"prompt": [7] * 48, "max_tokens": 0, "echo": True})
        assert len(served.engines[0].decode.jobs) == 2
        await eventually(lambda: not served.calls)


async def test_behind_a_truncation_a_prompt_is_not_read(served: Stack) -> None:
    """Its KV was computed with more in sight than there is now."""
    served.says("hello")
    for more, status in (({}, 200), ({"prompt_logprobs": 1}, 400), ({}, 200)):
        asked = {"messages": [{"role": "user", "content": "word " * 1200}], "session_id": "long"}
        got, answer = await served.post(CHAT, asked | {"truncation": "auto", "max_tokens": 9} | more)
        assert got == status, answer
        if status == 400:
            assert answer["error"]["param"] == "prompt_logprobs"
            assert "truncation" in answer["error"]["message"]
    assert answer["truncation"]["dropped_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (COMPLETIONS, {"prompt": "a", "echo": False}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1}),
        (CHAT, HI),
        (CHAT, HI | {"prompt_logprobs": 1}),
    ],
)
async def test_no_token_is_refused_where_it_would_say_nothing(
    served: Stack, path: str, body: dict[str, Any]
) -> None:
    status, answer = await served.post(path, body | {"max_tokens": 0})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert served.engines[0].prefill.jobs == []


async def test_an_answer_has_16_tokens_unless_more_are_asked_for(served: Stack) -> None:
    served.says("so it goes", end=False)
    assert (await whole(served, {"prompt": "a"}))["usage"]["completion_tokens"] == 16
    near = await whole(served, {"prompt": [7] * (WINDOW - 5)})
    assert near["usage"]["completion_tokens"] == 5
    assert (await whole(served, {"prompt": "a", "max_tokens": 20}))["usage"]["completion_tokens"] == 20


async def test_what_is_not_built_says_why(served: Stack) -> None:
    served.says("x")
    await whole(served, {"prompt": "a", "best_of": 1, "suffix": ""})
    for fields, says in (({"best_of": 2}, "use n"), ({"suffix": "b"}, "leave it out")):
        status, answer = await served.post(COMPLETIONS, {"prompt": "a"} | fields)
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert answer["error"]["param"] in fields
        assert says in answer["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prompt_logprobs_are_vllms(served: Stack, path: str) -> None:
    served.says("hello")
    body = HI if path == CHAT else {"prompt": "hi there"}
    answer = await whole(served, body | {"prompt_logprobs": 2}, path)
    (job,) = served.engines[0].prefill.jobs
    holder = answer if path == CHAT else answer["choices"][0]
    listed = holder["prompt_logprobs"]
    assert listed[0] is None
    assert len(listed) == len(job.tokens) == answer["usage"]["prompt_tokens"]
    for position, one in list(enumerate(listed))[1:]:
        token = job.tokens[position]
        following = (token + 1) % 1024
        assert list(one) == [str(token), str(following)]
        name = served.tokenizer.token_text
        assert one[str(token)] == {
            "logprob": -position / 8, "rank": 1, "decoded_token": name(token),
        }  # fmt: skip
        assert one[str(following)]["rank"] == 2
    alone = await whole(served, body | {"prompt_logprobs": 0}, path)
    listed = (alone if path == CHAT else alone["choices"][0])["prompt_logprobs"]
    assert [len(one) for one in listed[1:]] == [1] * (len(listed) - 1)
    assert listed[2][str(job.tokens[2])]["rank"] == 3
    assert "prompt_logprobs" not in await whole(served, body, path)
    status, refused = await served.post(path, body | {"prompt_logprobs": 1, "stream": True})
    assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")


async def test_a_sessions_prompt_is_all_that_was_said(served: Stack) -> None:
    served.says("hello")
    session = HI | {"session_id": "read", "prompt_logprobs": 0}
    await whole(served, session, CHAT)
    second = await whole(served, session, CHAT)
    tokens = served.engines[0].prefill.jobs[-1].tokens
    assert len(second["prompt_logprobs"]) == len(tokens) == second["usage"]["prompt_tokens"]
    _, stored = await served.get("/v1/sessions/read")
    assert len(stored["messages"]) == 4


async def test_a_prefill_that_dies_in_the_middle_is_asked_again(pair: Stack) -> None:
    (answer_ids,) = pair.says(" in town", end=False)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": len(answer_ids)}
    undisturbed = (await whole(pair, body))["choices"]
    pair.script.prefill_fails = [Unavailable("killed"), Unavailable("killed")]
    assert (await whole(pair, body))["choices"] == undisturbed
    pair.script.prefill_fails = [Unavailable("killed")]
    assert joined(await pair.stream(COMPLETIONS, body)) == undisturbed[0]
    pair.script.prefill_fails = [Unavailable("killed")]
    unanswered = await whole(pair, body | {"max_tokens": 0})
    assert unanswered["choices"][0]["text"] == PROMPT


async def test_what_was_read_is_not_asked_for_again_after_a_failure(pair: Stack) -> None:
    (answer_ids,) = pair.says(" in town tomorrow", end=False)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": len(answer_ids)}
    pair.script.stall_at = 1  # prefill has said all by the time that decode is given up
    (choice,) = (await whole(pair, body))["choices"]
    assert choice["text"] == PROMPT + " in town tomorrow"
    asked = [job.HasField("prompt_logprobs") for engine in pair.engines for job in engine.prefill.jobs]
    assert sorted(asked) == [False, True]
