"""Prefill alone: tokens, reuse of its own memory, fairness, limits, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcommons.errors import CapacityExhausted, ContextLengthExceeded, InvalidInput, ModelNotFound
from kvcommons.pb import prefill_pb2 as pb
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack, prefill_idle
from tests.contract.engine_turns import CALL_S, compute, prefill_request, prompt
from tests.machine import scaled

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


async def inspect(stub: Any) -> pb.PrefillInspectReply:
    return await stub.Inspect(pb.PrefillInspectRequest(), timeout=scaled(5))


async def test_the_first_token_is_the_reference_with_and_without_reuse(
    engines: Stack,
) -> None:
    stub = await engines.prefill()
    tokens, (expected,) = engines.reference.prompt(75)
    cold = await compute(stub, prefill_request(engines.model, tokens))
    assert (cold.token.token, cold.token.position) == (expected, 75)
    assert (cold.cached_tokens, cold.device_tokens) == (0, 0)
    warm = await compute(stub, prefill_request(engines.model, tokens))
    assert warm.token.token == expected
    assert (warm.cached_tokens, warm.device_tokens) == (64, 64)
    again = await compute(stub, prefill_request(engines.model, tokens, no_reuse=True))
    assert (again.token.token, again.cached_tokens) == (expected, 0)
    assert (await prefill_idle(stub)).cached_blocks == 4


async def test_a_prompt_of_whole_blocks_computes_its_last_one(engines: Stack) -> None:
    stub = await engines.prefill()
    tokens, (expected,) = engines.reference.prompt(64)
    first = await compute(stub, prefill_request(engines.model, tokens))
    second = await compute(stub, prefill_request(engines.model, tokens))
    assert second.cached_tokens == 48
    assert first.token.token == second.token.token == expected


async def test_without_reuse_nothing_is_left_behind(engines: Stack) -> None:
    stub = await engines.prefill()
    await compute(stub, prefill_request(engines.model, prompt(60), no_reuse=True))
    assert (await prefill_idle(stub)).cached_blocks == 0
    assert (await compute(stub, prefill_request(engines.model, prompt(60)))).cached_tokens == 0


async def test_another_tenant_finds_nothing(engines: Stack) -> None:
    stub = await engines.prefill()
    await compute(stub, prefill_request(engines.model, prompt(60)))
    other = await compute(stub, prefill_request(engines.model, prompt(60), salt=bytes(32)))
    assert other.cached_tokens == 0


async def test_jobs_that_need_the_same_blocks_compute_them_once(engines: Stack) -> None:
    stub = await engines.prefill()
    results = await asyncio.gather(
        *(compute(stub, prefill_request(engines.model, prompt(200))) for _ in range(3))
    )
    assert sorted(first.device_tokens for first in results) == [0, 192, 192]
    assert len({first.token.token for first in results}) == 1


async def test_a_short_prompt_passes_a_long_one(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowIterations(monkeypatch, 0.05)
    stub = await engines.prefill()
    order = []

    async def job(name: str, tokens: list[int]) -> None:
        await compute(stub, prefill_request(engines.model, tokens))
        order.append(name)

    long = asyncio.create_task(job("long", prompt(480)))
    await _running(stub)
    await asyncio.gather(long, job("short", prompt(10, seed=2)))
    assert order == ["short", "long"]


async def _running(stub: Any) -> None:
    async with asyncio.timeout(scaled(20)):
        while not (await inspect(stub)).jobs:
            await asyncio.sleep(0)


@pytest.mark.usefixtures("unhurried")
async def test_cancelled_jobs_give_their_blocks_back(engines: Stack) -> None:
    stub = await engines.prefill()
    calls = [
        stub.Compute(prefill_request(engines.model, prompt(480, seed)), timeout=CALL_S) for seed in range(3)
    ]
    tasks = [asyncio.create_task(_drain(call)) for call in calls]
    await _running(stub)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await prefill_idle(stub)


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def test_what_cannot_be_computed_is_refused_with_a_reason(engines: Stack) -> None:
    stub = await engines.prefill(engine={"capacity_tokens": 4 * BLOCK})
    with pytest.raises(CapacityExhausted, match="needs 5 blocks and this prefill instance has 4"):
        await compute(stub, prefill_request(engines.model, prompt(65)))
    with pytest.raises(ContextLengthExceeded, match="513 tokens"):
        await compute(stub, prefill_request(engines.model, prompt(513)))
    with pytest.raises(ModelNotFound):
        await compute(stub, prefill_request(bytes(32), prompt(5)))
    with pytest.raises(InvalidInput, match="at least one token"):
        await compute(stub, prefill_request(engines.model, []))
    with pytest.raises(InvalidInput, match="vocabulary"):
        await compute(stub, prefill_request(engines.model, [199]))
    await compute(stub, prefill_request(engines.model, prompt(64)))
    await prefill_idle(stub)


async def test_memory_full_of_cached_blocks_is_room(engines: Stack) -> None:
    stub = await engines.prefill(engine={"capacity_tokens": 6 * BLOCK})
    for seed in range(5):
        await compute(stub, prefill_request(engines.model, prompt(90, seed)))
    assert (await prefill_idle(stub)).free_blocks == 6
