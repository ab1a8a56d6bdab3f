"""Prefill in pipeline stages: its tokens are those of transformers, whatever becomes of a stage meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcommons.engine.prompts import PromptSpan
from kvcommons.errors import CapacityExhausted, InvalidInput, KVCommonsError, Loading, Unavailable
from kvcommons.model.synthetic import random_config, write_random_folder
from kvcommons.pb import common_pb2
from kvcommons.pb import prefill_pb2 as pb
from kvcommons.stages.group import StagedHandOver, StageGroup
from kvcommons.stages.settings import StageSettings
from services.prefill.config import PrefillConfig
from services.prefill.stage import stage_share
from tests.contract.engine_stack import BLOCK, CHUNK, Stack, prefill_idle, ready, scale_calls, settings
from tests.contract.engine_turns import compute, prefill_request, prompt, turn
from tests.contract.filled_pipeline import FilledPipeline
from tests.contract.test_engine_reuse import stored
from tests.exactness import evident
from tests.machine import scaled

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)


@pytest.mark.parametrize(("engines", "stages"), [("llama", 2), ("qwen3", 3)], indirect=["engines"])
async def test_the_first_token_is_the_reference_with_and_without_reuse(engines: Stack, stages: int) -> None:
    await engines.lenders()
    stub = await engines.staged(stages)
    tokens, (expected,) = engines.reference.prompt(75)
    cold = await compute(stub, prefill_request(engines.model, tokens))
    assert (cold.token.token, cold.token.position, cold.cached_tokens) == (expected, 75, 0)
    warm = await compute(stub, prefill_request(engines.model, tokens))
    assert (warm.token.token, warm.cached_tokens, warm.device_tokens) == (expected, 64, 64)
    longer, (expected,) = engines.reference.prompt(300)
    assert (await compute(stub, prefill_request(engines.model, longer))).token.token == expected
    await prefill_idle(stub)


async def test_prompts_side_by_side_take_turns(engines: Stack) -> None:
    await engines.lenders()
    stub = await engines.staged(2)
    lengths = [400, 33, 210, 75, 1, 64]
    known = [engines.reference.prompt(length) for length in lengths]
    made = await asyncio.gather(
        *(compute(stub, prefill_request(engines.model, tokens)) for tokens, _ in known)
    )
    assert [first.token.token for first in made] == [expected for _, (expected,) in known]
    await prefill_idle(stub)


@pytest.mark.parametrize("stages", [2, 3])
async def test_a_chunk_enters_the_first_stage_while_those_before_it_are_in_the_others(
    engines: Stack, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one prompt: in each stage another of its chunks, but for the first and the last ones."""
    await engines.lenders()
    stub = await engines.staged(stages)
    tokens, (expected,) = engines.reference.prompt(300)
    chunks = [range(first, min(first + CHUNK, 300)) for first in range(0, 300, CHUNK)]
    line = FilledPipeline(monkeypatch, stages, len(chunks))
    assert (await compute(stub, prefill_request(engines.model, tokens))).token.token == expected
    begun = [group.chunk for one in line.begun for group in one.groups if isinstance(group, PromptSpan)]
    assert begun == chunks
    assert line.ended == len(chunks)
    await prefill_idle(stub)


@pytest.mark.parametrize("engines", ["mistral-sliding"], indirect=True)
async def test_turns_over_stages_load_their_history_from_the_store(engines: Stack) -> None:
    """Each stage saves its layers, and loads them: what one group computed, a fresh one goes on with."""
    await engines.lenders()
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(75, 64)
    prefill, decode = await engines.staged(2, "p1"), await engines.decode("d1")
    first = turn(prefill, decode, engines.model, tokens, 32, history=engines.history(0))
    assert (await first.run()).tokens == expected[:32]
    full = (75 + 32 - 1) // BLOCK
    known = tokens + expected[:32]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    await engines.idle("d1")

    prefill = await engines.staged(3, "p2", loads="always")
    decode = await engines.decode("d2", fetch_min_bytes=1 << 30)
    second = turn(prefill, decode, engines.model, known, 32, history=engines.history(full))
    assert (await second.run()).tokens == expected[32:]
    assert second.first is not None
    assert (second.first.cached_tokens, second.first.device_tokens) == (full * BLOCK, 0)
    await engines.idle("d2")
    await prefill_idle(prefill)


async def test_what_the_store_has_no_more_is_computed_in_all_stages(engines: Stack) -> None:
    await engines.lenders()
    store = await engines.kvstore()
    tokens, expected = engines.reference.prompt(100, 20)
    prefill, decode = await engines.staged(2, loads="always"), await engines.decode()
    made = turn(prefill, decode, engines.model, tokens, 20, history=engines.history(6))
    assert (await made.run()).tokens == expected
    assert made.first is not None
    # Where decode asked once more for what it found missing, a second job finds what the first one computed.
    assert made.first.cached_tokens == (made.first.device_tokens if made.missing else 0)
    assert await stored(engines, store, tokens[:96]) == 6
    await engines.idle("decode")
    await prefill_idle(prefill)


@pytest.mark.usefixtures("unhurried")
async def test_cancelled_jobs_give_their_blocks_back_in_all_stages(engines: Stack) -> None:
    await engines.lenders()
    await assert_cancelling_frees(engines, await engines.staged(2))


async def assert_cancelling_frees(engines: Stack, stub: Any) -> None:
    """All blocks of jobs that are cancelled in the middle, everywhere; the next prompt is exact."""
    calls = [
        asyncio.create_task(compute(stub, prefill_request(engines.model, prompt(480, seed))))
        for seed in range(3)
    ]
    await under_way(stub)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await prefill_idle(stub)
    tokens, (expected,) = engines.reference.prompt(75)
    assert (await compute(stub, prefill_request(engines.model, tokens))).token.token == expected


async def under_way(stub: Any) -> None:
    async with asyncio.timeout(scaled(20)):
        while not (await stub.Inspect(pb.PrefillInspectRequest(), timeout=scaled(5))).jobs:
            await asyncio.sleep(0.001)


@pytest.mark.usefixtures("unhurried")
async def test_a_stage_that_is_killed_fails_its_jobs_over_and_comes_back(engines: Stack) -> None:
    """Of its own process, in the middle of a prompt: the call says so, no block stays taken, what was found
    in memory is found no more; once the stage is there again, the group is."""
    await engines.lenders()
    stub = await engines.staged(2, process=True)
    tokens, (expected,) = engines.reference.prompt(480)
    kept = prompt(64, 9)
    await compute(stub, prefill_request(engines.model, kept))
    assert (await compute(stub, prefill_request(engines.model, kept))).device_tokens == 48
    call = asyncio.create_task(compute(stub, prefill_request(engines.model, tokens)))
    await under_way(stub)
    child = engines.children[-1]
    child.kill()
    child.wait()
    with pytest.raises(Unavailable, match="stage"):
        await call
    await prefill_idle(stub)
    with pytest.raises(Loading, match="lacks stages"):
        await compute(stub, prefill_request(engines.model, tokens))
    engines.stage(1, 2, process=True)
    await engines.together(stub)
    again = await compute(stub, prefill_request(engines.model, kept))
    assert again.device_tokens == 0
    assert (await compute(stub, prefill_request(engines.model, tokens))).token.token == expected
    await prefill_idle(stub)


@pytest.mark.usefixtures("unhurried")
async def test_a_prompt_that_arrives_while_a_stage_ends_says_so(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages were together when it was taken in, and are not when the engine has it: it does not wait for
    its deadline."""
    taken_in, killed = StageGroup.sink, list[subprocess.Popen[bytes]]()

    def and_then_lost(group: StageGroup, *asked: Any) -> StagedHandOver:
        sink = taken_in(group, *asked)
        for child in killed:
            child.kill()
        until = time.monotonic() + scaled(20)
        while killed and group.formed:
            assert time.monotonic() < until
            time.sleep(0.001)
        return sink

    monkeypatch.setattr(StageGroup, "sink", and_then_lost)
    await engines.lenders()
    stub = await engines.staged(2, process=True)
    killed.append(engines.children[-1])
    with pytest.raises(Loading, match="lacks stages"):
        await compute(stub, prefill_request(engines.model, prompt(64)))
    await prefill_idle(stub)


@pytest.mark.usefixtures("unhurried")
async def test_a_turn_survives_a_stage_killed_in_its_prompt(engines: Stack) -> None:
    """Driven as a router does: the reservation at decode stands, the same prompt is asked for again."""
    await engines.lenders()
    stub, decode = await engines.staged(2, process=True), await engines.decode()
    tokens, expected = engines.reference.prompt(480, 8)
    made = turn(Retrying(stub), decode, engines.model, tokens, 8)
    running = asyncio.create_task(made.run())
    await under_way(stub)
    engines.children[-1].kill()
    engines.children[-1].wait()
    engines.stage(1, 2, process=True)
    assert (await running).tokens == expected
    await engines.idle("decode")
    await prefill_idle(stub)


class Retrying:
    """A prefill's stub whose calls are made again while it fails."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    async def Compute(self, request: pb.PrefillRequest, timeout: float) -> Any:
        until = time.monotonic() + scaled(30)
        while True:
            try:
                events = [event async for event in self._stub.Compute(request, timeout=timeout)]
            except KVCommonsError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.05)
                continue
            for event in events:
                yield event
            return


@pytest.mark.usefixtures("unhurried")
async def test_a_stage_that_says_nothing_is_given_up(engines: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paused, it answers nobody: its jobs do not wait for it, and it is a stage again once it goes on."""
    monkeypatch.setattr("kvcommons.stages.connected.SILENCE_S", scaled(2.0))
    await engines.lenders()
    stub = await engines.staged(2, process=True)
    tokens, (expected,) = engines.reference.prompt(480)
    call = asyncio.create_task(compute(stub, prefill_request(engines.model, tokens)))
    await under_way(stub)
    child = engines.children[-1]
    child.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable, match="stage"):
            await call
        await prefill_idle(stub)
    finally:
        child.send_signal(signal.SIGCONT)
    await engines.together(stub)
    assert (await compute(stub, prefill_request(engines.model, tokens))).token.token == expected
    await prefill_idle(stub)


async def test_a_first_stage_that_is_started_again_finds_the_others(engines: Stack) -> None:
    await engines.lenders()
    await engines.staged(2)
    tokens, (expected,) = engines.reference.prompt(75)
    for _ in range(2):
        await engines.stop("prefill")
        stub = await engines.prefill(stages=2)
        await engines.together(stub)
        made = await compute(stub, prefill_request(engines.model, tokens))
        assert (made.token.token, made.cached_tokens) == (expected, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stages", [2, 3])
async def test_kills_under_load(engines: Stack, stages: int) -> None:
    """Thirty times a stage is killed at some moment while prompts compute: each has the reference's token or
    a clear error, and all blocks come back."""
    draw = random.Random(stages)
    await engines.lenders()
    stub = await engines.staged(stages, process=True)
    known = [engines.reference.prompt(length) for length in (480, 300, 120, 33)]
    children = dict(zip(range(1, stages), engines.children[-stages + 1 :], strict=True))
    exact = refused = 0
    for _ in range(30):
        calls = [
            asyncio.create_task(
                compute(stub, prefill_request(engines.model, tokens, no_reuse=draw.random() < 0.5))
            )
            for tokens, _ in known
        ]
        await asyncio.sleep(draw.random() * 0.1)
        number = draw.randrange(1, stages)
        children[number].kill()
        children[number].wait()
        made = await asyncio.gather(*calls, return_exceptions=True)
        for result, (_, (expected,)) in zip(made, known, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, Unavailable | Loading), result
                refused += 1
            else:
                assert result.token.token == expected
                exact += 1
        await prefill_idle(stub)
        engines.stage(number, stages, process=True)
        children[number] = engines.children[-1]
        await engines.together(stub)
    assert exact
    assert refused
    for tokens, (expected,) in known:
        assert (await compute(stub, prefill_request(engines.model, tokens))).token.token == expected
    await prefill_idle(stub)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_prompt_of_16k_tokens_over_one_to_four_stages(
    monkeypatch: pytest.MonkeyPatch, socket_folder: Path, tmp_path: Path
) -> None:
    """Of the 7M model, with a window for it: transformers' token, and its log-probability."""
    config = random_config("7m") | {"max_position_embeddings": 20_000}
    write_random_folder(tmp_path / "7m", config, dtype="float32")
    draw = random.Random(4)
    tokens = [draw.randrange(100, 8000) for _ in range(16_000)]
    expected, logprob = last_of_transformers(tmp_path / "7m", tokens)
    scale_calls(monkeypatch)
    nobody: Any = None
    stack = Stack(socket_folder, tmp_path / "7m", nobody)
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)
    request = prefill_request(stack.model, tokens, sampling=sampling, no_reuse=True)
    try:
        await stack.lenders()
        for stages, chunk_tokens in ((1, 512), (2, 4096), (2, 256), (4, 512)):
            changes = {"engine": {"capacity_tokens": 17_000}, "chunk_tokens": chunk_tokens}
            stub = await stack.staged(stages, f"p{stages}-{chunk_tokens}", **changes)
            events = [event async for event in stub.Compute(request, timeout=scaled(120.0))]
            made = events[-1].first.token
            assert (made.token, made.position) == (expected, len(tokens))
            assert made.logprob == pytest.approx(logprob, abs=1e-3)
            await prefill_idle(stub)
    finally:
        await stack.close()


def last_of_transformers(folder: Path, tokens: list[int]) -> tuple[int, float]:
    """The token that follows in float32, which is evident, and its log-probability. Eager scores of so many
    do not fit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1:]
    assert evident(logits).all()
    return int(logits.argmax()), float(logits.log_softmax(-1).max())


async def test_a_stage_that_stops_is_waited_for(engines: Stack) -> None:
    await engines.lenders()
    stub = await engines.staged(2)
    await engines.stop("prefill-stage-1")

    async def apart() -> None:
        with pytest.raises((Loading, Unavailable)):
            await compute(stub, prefill_request(engines.model, [5, 6, 7]))

    await ready(apart)
    engines.stage(1, 2)
    await engines.together(stub)


async def test_more_stages_than_layers_are_refused(engines: Stack) -> None:
    config = PrefillConfig(
        node=engines.node("prefill"),
        engine=settings(engines.folder),
        ledger=engines.ledger,
        shape=StageSettings(stages=4),
    )
    with pytest.raises(InvalidInput, match="stages = 4, and the model has 3 layers"):
        stage_share(config)


async def test_a_prompt_beyond_the_stages_memory_is_refused(engines: Stack) -> None:
    await engines.lenders()
    stub = await engines.staged(2, engine={"capacity_tokens": 4 * BLOCK})
    with pytest.raises(CapacityExhausted, match="needs 7 blocks"):
        await compute(stub, prefill_request(engines.model, prompt(100)))
    tokens, (expected,) = engines.reference.prompt(60)
    assert (await compute(stub, prefill_request(engines.model, tokens))).token.token == expected


async def test_stages_that_do_not_fit_say_why(engines: Stack) -> None:
    await engines.lenders()
    engines.stage(1, 2, stage_layers=(2, 1))
    stub = await engines.prefill(stages=2, stage_layers=(1, 2))

    async def why() -> None:
        with pytest.raises(Loading) as refused:
            await compute(stub, prefill_request(engines.model, [5, 6]))
        if "layers" not in refused.value.message:
            raise Unavailable("the registry has not said it yet")
        assert "has layers 2 … 2 of 2 stages, and 1 … 2 of 2 are due" in refused.value.message

    await ready(why)
