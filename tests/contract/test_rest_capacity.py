"""How long an answer may be where the memory of all instances is less than the context window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.rest_stack import BLOCK_TOKENS, WINDOW, KvStore, Stack, stack

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses",
)  # fmt: skip
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BLOCKS = 6
CAPACITY = BLOCKS * BLOCK_TOKENS


async def shown(served: Stack, **fields: int) -> None:
    """What the engines say of themselves."""
    for engine in served.engines:
        for name, value in fields.items():
            setattr(engine, name, value)
    await served.show()


async def test_an_answer_of_no_given_length_ends_where_memory_does(served: Stack) -> None:
    await shown(served, decode_blocks=BLOCKS)
    served.says("word " * 400, end=False)
    status, answer = await served.post(CHAT, HI)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CAPACITY
    status, answer = await served.post(RESPONSES, {"input": "hi"})
    assert (status, answer["status"]) == (200, "incomplete")
    assert answer["usage"]["total_tokens"] == CAPACITY
    prompt = [5] * (CAPACITY - 3)
    status, answer = await served.post(COMPLETIONS, {"prompt": prompt})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert answer["usage"]["completion_tokens"] == 3
    status, answer = await served.post(CHAT, HI | {"n": 2})  # each is a sequence of its own
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    jobs = [job for engine in served.engines for job in engine.decode.jobs]
    assert {job.max_position for job in jobs} == {CAPACITY}


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, HI, "max_tokens"),
    (CHAT, HI, "max_completion_tokens"),
    (COMPLETIONS, {"prompt": "hi"}, "max_tokens"),
    (RESPONSES, {"input": "hi"}, "max_output_tokens"),
    (MESSAGES, HI | {"model": "demo"}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), REQUESTS)
async def test_a_length_that_never_fits_is_told_at_once(
    served: Stack, path: str, body: dict[str, Any], field: str
) -> None:
    await shown(served, decode_blocks=BLOCKS)
    served.says("word")
    status, answer = await served.post(path, body | {field: CAPACITY})
    assert status == 400
    error = answer["error"]
    assert f"({field}), or raise capacity_tokens" in error["message"]
    if path != MESSAGES:  # whose errors have neither
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert not served.engines[0].decode.jobs
    fits = body | {field: 30}
    assert (await served.post(path, fits))[0] == 200


async def test_a_least_length_that_never_fits_is_told_at_once(served: Stack) -> None:
    await shown(served, decode_blocks=BLOCKS)
    status, answer = await served.post(CHAT, HI | {"min_tokens": CAPACITY})
    assert (status, answer["error"]["param"]) == (400, "min_tokens")


async def test_what_is_lent_counts_as_far_as_it_may_be_lent(socket_folder: Path, rest_store: KvStore) -> None:
    async with stack(socket_folder, rest_store, engines=2) as served:
        await shown(served, decode_blocks=BLOCKS)
        served.says("word " * 400, end=False)
        assert (await served.post(CHAT, HI))[1]["usage"]["total_tokens"] == CAPACITY
        await shown(served, lends_blocks=BLOCKS // 2)
        _, answer = await served.post(CHAT, HI)
        assert answer["usage"]["total_tokens"] == CAPACITY + BLOCKS // 2 * BLOCK_TOKENS
        await shown(served, lends_blocks=0)  # it may come back for a while
        _, answer = await served.post(CHAT, HI)
        assert answer["usage"]["total_tokens"] == CAPACITY + BLOCKS // 2 * BLOCK_TOKENS
        await shown(served, decode_blocks=WINDOW)
        assert (await served.post(CHAT, HI))[1]["usage"]["total_tokens"] == WINDOW
