"""Prompts that a decode in stages, or in ranks, computes itself: chunks go down the line beside tokens, and
what comes of them is transformers', whatever becomes of one of its processes meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from kvcommons.engine.chunk_budget import ChunkBudget
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationCosts, IterationWork
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.load_or_compute import LoadOrCompute
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import CapacityExhausted, KVCommonsError, Loading, Unavailable
from kvcommons.pb import common_pb2, ledger_pb2, prefill_pb2_grpc
from kvcommons.rpc.directory import Directory
from tests.contract.engine_stack import BLOCK, SlowIterations, Stack, prefill_idle, slow
from tests.contract.engine_turns import (
    Turn,
    assert_exact,
    prompt,
    started_in_order,
    turn,
    whole_beside_a_kill,
)
from tests.contract.test_decode_stages import SETTINGS
from tests.contract.test_engine_reuse import stored
from tests.contract.test_engine_truncation import Session, stays_in_use
from tests.contract.truncation_reference import TruncatedReference
from tests.machine import scaled
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio
pytest_plugins = ("tests.contract.engine_fixtures",)

ALL = 512  # tokens: every prompt of these tests
LOCAL: dict[str, Any] = {"max_local_prefill_tokens": ALL, "chunk_tokens": 32}
SHAPES = [(2, 1), (1, 2), slow(3, 1), slow(2, 2)]


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[set[type]]:
    """What each iteration of this process consisted of, in whatever stage."""
    seen: list[set[type]] = []
    run = Iteration.run

    def noted(self: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
        seen.append({type(group) for group in self.groups})
        return run(self, *between_layers)

    monkeypatch.setattr(Iteration, "run", noted)
    return seen


def alone(decode: Any, engines: Stack, tokens: list[int], new: int, **changes: Any) -> Turn:
    """There is no prefill that could compute it."""
    return turn(None, decode, engines.model, tokens, new, **changes)


@pytest.mark.parametrize(
    ("engines", "stages", "tensor"),
    [
        ("llama", 2, 1),
        ("qwen3", 3, 1),
        ("qwen3", 1, 2),
        ("llama-tied-biased", 2, 2),
        slow("qwen2-sliding", 2, 1),
        slow("mistral-sliding", 1, 4),
    ],
    indirect=["engines"],
)
async def test_chunks_and_tokens_share_the_line(
    engines: Stack, kinds: list[set[type]], stages: int, tensor: int
) -> None:
    """More sequences than there are stages generate while prompts of several chunks are computed beside them:
    tokens are the reference's, and so are their probabilities."""
    await engines.lenders()
    decode = await engines.staged_decode(stages, tensor=tensor, **LOCAL)
    lengths = (20, 33, 150, 90, 7, 200)
    known = [engines.reference.prompt(length, 40, 50 * n + 1) for n, length in enumerate(lengths)]
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, logprobs=True)
    turns = [alone(decode, engines, tokens, 40, sampling=sampling) for tokens, _ in known]
    first = [asyncio.create_task(one.run()) for one in turns[:2]]
    await eventually(lambda: all(len(one.tokens) > 3 for one in turns[:2]))
    kinds.clear()
    await asyncio.gather(*first, *(one.run() for one in turns[2:]))
    for one, (tokens, expected) in zip(turns, known, strict=True):
        assert_exact(engines.reference, one, tokens, expected)
        assert one.reserved is not None
        assert one.reserved.computes
    assert {TokenRows, PromptSpan} in kinds, "no iteration had a chunk and a token"
    await engines.idle("decode")


@pytest.mark.parametrize(("stages", "tensor"), SHAPES)
async def test_sampling_is_that_of_one_process(engines: Stack, stages: int, tensor: int) -> None:
    await engines.lenders()
    whole = await engines.decode("whole", **LOCAL)
    staged = await engines.staged_decode(stages, tensor=tensor, **LOCAL)

    def turns(decode: Any) -> list[Turn]:
        return [
            alone(decode, engines, prompt(20 + 9 * n, n + 1), 50, sampling=common_pb2.Sampling(**one))
            for n, one in enumerate(SETTINGS)
        ]

    expected = await asyncio.gather(*(one.run() for one in turns(whole)))
    made = await asyncio.gather(*(one.run() for one in turns(staged)))
    assert [one.tokens for one in made] == [one.tokens for one in expected]
    await engines.idle("decode", "whole")


@pytest.mark.parametrize(("before", "after"), [((2, 1), (3, 1)), ((1, 2), (2, 1)), slow((2, 2), (1, 2))])
async def test_history_is_found_in_memory_and_in_the_store(
    engines: Stack, monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Each process has saved its heads of its layers, of the prompt and of the answer: a fresh group of
    another shape loads them, beside a sequence that generates."""
    monkeypatch.setattr(LoadOrCompute, "patience_s", lambda *_, **__: scaled(20.0))
    await engines.lenders()
    store = await engines.kvstore()
    decode = await engines.staged_decode(before[0], "d1", tensor=before[1], **LOCAL)
    tokens, expected = engines.reference.prompt(75, 96)
    first = await alone(decode, engines, tokens, 32, history=engines.history(0)).run()
    assert first.tokens == expected[:32]
    full, known = (75 + 32 - 1) // BLOCK, tokens + expected[:32]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    second = await alone(decode, engines, known, 32, history=engines.history(full)).run()
    assert second.tokens == expected[32:64]
    assert second.first is not None
    assert second.first.device_tokens == full * BLOCK
    await engines.idle("d1")

    full, known = (75 + 64 - 1) // BLOCK, tokens + expected[:64]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    decode = await engines.staged_decode(after[0], "d2", tensor=after[1], **LOCAL)
    other, others = engines.reference.prompt(30, 120, 300)
    beside = alone(decode, engines, other, 120)
    generating = asyncio.create_task(beside.run())
    await eventually(lambda: len(beside.tokens) > 3)
    third = await alone(decode, engines, known, 32, history=engines.history(full)).run()
    assert third.tokens == expected[64:]
    assert third.first is not None
    assert (third.first.cached_tokens, third.first.device_tokens) == (full * BLOCK, 0)
    assert (await generating).tokens == others
    await engines.idle("d2")


@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2), slow(2, 2)])
async def test_what_the_store_has_no_more_is_computed_and_saved(
    engines: Stack, stages: int, tensor: int
) -> None:
    """Nothing is computed behind a history before it is known to be there: what is saved is right."""
    await engines.lenders()
    store = await engines.kvstore()
    decode = await engines.staged_decode(stages, "d1", tensor=tensor, **LOCAL)
    tokens, expected = engines.reference.prompt(200, 40)
    first = alone(decode, engines, tokens, 20, history=engines.history(9))
    assert (await first.run()).tokens == expected[:20]
    assert first.first is not None
    assert not first.first.cached_tokens
    full, known = (200 + 20 - 1) // BLOCK, tokens + expected[:20]
    assert await stored(engines, store, known[: full * BLOCK]) == full
    other = await engines.staged_decode(2, "d2", **LOCAL)
    second = await alone(other, engines, known, 20, history=engines.history(full)).run()
    assert second.tokens == expected[20:]
    assert second.first is not None
    assert second.first.cached_tokens == full * BLOCK
    await engines.idle("d1", "d2")


async def test_choices_of_one_prompt_compute_it_once(engines: Stack) -> None:
    """The later ones wait for blocks that the first one computes: the other stages hear of their blocks when
    these are known."""
    await engines.lenders()
    decode = await engines.staged_decode(2, **LOCAL)
    tokens, expected = engines.reference.prompt(200, 10)
    turns = [alone(decode, engines, tokens, 10, request_id=f"r{n}") for n in range(3)]
    await asyncio.gather(*await started_in_order(turns))
    assert [one.tokens for one in turns] == [expected] * 3
    assert sorted(one.first.device_tokens for one in turns if one.first is not None) == [0, 192, 192]
    await engines.idle("decode")


@pytest.mark.parametrize("shapes", [[(2, 1), (3, 1)], [(1, 2), (2, 2)]])
async def test_truncated_sessions_go_on(engines: Stack, shapes: list[tuple[int, int]]) -> None:
    await engines.lenders()
    store = await engines.kvstore()
    prefill = await engines.prefill(loads="always")
    names = [f"d{number}" for number in range(len(shapes))]
    pairs = [
        (prefill, await engines.staged_decode(stages, name, tensor=tensor, **LOCAL))
        for name, (stages, tensor) in zip(names, shapes, strict=True)
    ]
    session = Session(engines, TruncatedReference(engines.folder))
    await stays_in_use(session, 2, store, pairs)
    await engines.idle(*names)


async def test_what_is_refused_or_too_long_goes_to_prefill(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engines.lenders()
    prefill = await engines.staged(2)
    decode = await engines.staged_decode(2, max_local_prefill_tokens=64)
    (long, expected), (short, others) = (
        engines.reference.prompt(90, 10),
        engines.reference.prompt(40, 10, 300),
    )
    one = await turn(prefill, decode, engines.model, long, 10).run()
    assert one.tokens == expected
    assert one.reserved is not None
    assert not one.reserved.computes
    await engines.stop("decode")
    monkeypatch.setattr("services.decode.service.LOCAL_PROMPTS_MAX", 0)
    again = await engines.decode(
        stages=2, stage_group="decode", max_local_prefill_tokens=64
    )  # its other stage is there
    await engines.decode_together(again)
    refused = await turn(prefill, again, engines.model, short, 10).run()
    assert refused.tokens == others
    assert refused.missing == [0]
    await engines.idle("decode")


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("stages", "tensor"), SHAPES)
async def test_cancelled_late_and_preempted_ones_give_their_blocks_back(
    engines: Stack, stages: int, tensor: int
) -> None:
    """In mid-prompt, with chunks in the other stages."""
    await engines.lenders()
    decode = await engines.staged_decode(
        stages, tensor=tensor, engine={"capacity_tokens": 32 * BLOCK}, **LOCAL | {"chunk_tokens": 16}
    )
    old, expected = engines.reference.prompt(20, 120)
    first = alone(decode, engines, old, 120)
    running = asyncio.create_task(first.run())

    async def given_back() -> bool:
        return (await engines.inspect("decode")).free_blocks >= 27

    await eventually(lambda: len(first.tokens) > 1)
    call = decode.Generate(alone(decode, engines, prompt(300, 2), 5).request, timeout=scaled(20))
    assert (await call.read()).reserved.computes
    await asyncio.sleep(scaled(0.1))
    call.cancel()
    await eventually(given_back)
    late = alone(decode, engines, prompt(300, 3), 5, start_wait_ms=int(scaled(150)))
    with pytest.raises(KVCommonsError, match="not computed within its deadline"):
        await late.run()
    await eventually(given_back)
    young = alone(decode, engines, prompt(416, 4), 90)
    with pytest.raises(CapacityExhausted, match="older sequences precedence"):
        await young.run()
    assert (await running).tokens == expected
    await engines.idle("decode")


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2)])
async def test_a_stage_that_is_killed_fails_prompts_over_and_comes_back(
    engines: Stack, stages: int, tensor: int
) -> None:
    await engines.lenders()
    decode = await engines.staged_decode(stages, tensor=tensor, process=True, **LOCAL | {"chunk_tokens": 16})
    (tokens, expected), (other, others) = (
        engines.reference.prompt(300, 20),
        engines.reference.prompt(20, 90, 9),
    )
    generating, computing = alone(decode, engines, other, 90), alone(decode, engines, tokens, 20)
    running = [asyncio.create_task(generating.run())]
    await eventually(lambda: len(generating.tokens) > 3)
    running.append(asyncio.create_task(computing.run()))
    await eventually(lambda: computing.reserved is not None)
    await asyncio.sleep(scaled(0.1))
    assert not computing.tokens
    engines.children[-1].kill()
    engines.children[-1].wait()
    for task in running:
        with pytest.raises(Unavailable, match="stage"):
            await task
    await engines.idle("decode")
    with pytest.raises(Loading, match="lacks stages"):
        await alone(decode, engines, [5, 6, 7], 2).run()
    engines.decode_stage(stages - 1, stages, rank=tensor - 1, tensor=tensor, process=True)
    await engines.decode_together(decode)
    again = await alone(decode, engines, tokens, 20).run()
    assert again.tokens == expected
    assert again.first is not None
    assert not again.first.cached_tokens, "what stages of another epoch had is not found"
    heard = len(generating.tokens)
    assert generating.tokens == others[:heard]
    rest = alone(decode, engines, other + generating.tokens, 90 - heard, prompt_tokens=len(other))
    assert (await rest.run()).tokens == others[heard:]
    await engines.idle("decode")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2), (2, 2)])
async def test_kills_under_load(engines: Stack, stages: int, tensor: int) -> None:
    """Thirty times, at some moment of prompts and answers: each has the reference's tokens up to a clear
    error, or all of them, and all blocks come back."""
    draw, members = random.Random(10 * tensor + stages), stages * tensor
    await engines.lenders()
    decode = await engines.staged_decode(stages, tensor=tensor, process=True, **LOCAL)
    known = [engines.reference.prompt(length, 60) for length in (400, 250, 75, 33)]
    children = dict(zip(range(1, members), engines.children[-members + 1 :], strict=True))
    began = time.monotonic()
    await asyncio.gather(*(alone(decode, engines, tokens, 60).run() for tokens, _ in known))
    calm_s = time.monotonic() - began
    exact = refused = 0
    for _ in range(30):
        turns = [alone(decode, engines, tokens, 60) for tokens, _ in known]
        number = draw.randrange(1, members)
        expected = [expected for _, expected in known]
        whole = await whole_beside_a_kill(turns, expected, children[number], draw, calm_s)
        exact, refused = exact + whole, refused + len(turns) - whole
        await engines.idle("decode")
        stage, rank = divmod(number, tensor)
        engines.decode_stage(stage, stages, rank=rank, tensor=tensor, process=True)
        children[number] = engines.children[-1]
        await engines.decode_together(decode)
    assert exact
    assert refused
    made = await asyncio.gather(*(alone(decode, engines, tokens, 60).run() for tokens, _ in known))
    assert [one.tokens for one in made] == [expected for _, expected in known]
    await engines.idle("decode")


@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2), slow(2, 2)])
async def test_one_instance_has_both_roles(engines: Stack, stages: int, tensor: int) -> None:
    """It computes its own prompts, and as prefill those of others: of one process, and of several."""
    await engines.lenders()
    both = await engines.staged_decode(stages, "both", tensor=tensor, colocated=True, chunk_tokens=32)
    one, several = await engines.decode("one"), await engines.staged_decode(2, "several")
    prefill = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    known = [engines.reference.prompt(length, 30, 100 * n + 1) for n, length in enumerate((75, 90, 150))]
    decodes = (both, one, several)
    turns = [
        turn(prefill, decode, engines.model, tokens, 30)
        for decode, (tokens, _) in zip(decodes, known, strict=True)
    ]
    await asyncio.gather(*(one.run() for one in turns))
    assert [one.tokens for one in turns] == [expected for _, expected in known]
    assert [one.reserved.computes for one in turns if one.reserved is not None] == [True, False, False]
    await prefill_idle(prefill)
    await engines.idle("both", "one", "several")


@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), slow(3, 1)])
async def test_a_prompt_beyond_its_memory_is_spread_beside_tokens(
    engines: Stack, kinds: list[set[type]], stages: int, tensor: int
) -> None:
    """Its chunks are alone in their iterations; the sequences that generate go on between them."""
    await engines.lenders()
    both = await engines.staged_decode(
        stages, "both", tensor=tensor, colocated=True, chunk_tokens=16, engine={"capacity_tokens": 12 * BLOCK}
    )
    large = await engines.decode("large")
    prefill = prefill_pb2_grpc.PrefillStub(engines.channel("both"))
    (mine, answer), (theirs, other) = engines.reference.prompt(20, 100), engines.reference.prompt(300, 20, 50)
    generating = alone(both, engines, mine, 100)
    task = asyncio.create_task(generating.run())
    await eventually(lambda: len(generating.tokens) > 2)
    kinds.clear()
    spread = await turn(prefill, large, engines.model, theirs, 20).run()
    assert not task.done(), "its tokens came between the chunks"
    assert spread.tokens == other
    assert (await task).tokens == answer
    assert {TokenRows, PromptSpan} not in kinds
    await engines.idle("both", "large")


@pytest.mark.parametrize(("stages", "tensor", "times"), [(2, 1, 3), (1, 2, 1)])
async def test_what_iterations_take_is_known_from_the_start(
    engines: Stack, stages: int, tensor: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through all stages: the first one measures its own layers, and knows what share of all they are: one of
    three, or all."""
    # Whatever else the machine does: real ones of half a millisecond varied by a factor of four.
    monkeypatch.setattr(IterationTiming, "own_s", 0.01)
    await engines.lenders()
    measured = {"engine": {"calibrate_s": 1.0}}
    await engines.staged_decode(stages, "d", tensor=tensor, **measured, max_local_prefill_tokens=0)
    await engines.staged_decode(1, "whole", **measured, max_local_prefill_tokens=0)
    directory = Directory(engines.ledger, "test")
    directory.start()
    try:

        def costs(name: str) -> IterationCosts:
            found = [one.load for one in directory.instances("decode") if one.id == name]
            return IterationCosts.of((found or [ledger_pb2.Load()])[0].costs)

        await eventually(lambda: costs("d").chunks and costs("whole").chunks)
        for work in (IterationWork(rows=8), IterationWork.of_chunk(range(32))):
            staged_s, whole_s = costs("d").seconds(work), costs("whole").seconds(work)
            assert whole_s == pytest.approx(0.01, rel=0.01)
            assert staged_s == pytest.approx(0.01 * times, rel=0.01)
    finally:
        await directory.stop()


async def test_chunks_beside_tokens_keep_what_those_were_promised(
    engines: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the time through all stages, whichever sequences' tokens are under way."""
    SlowIterations(monkeypatch, scaled(0.06))  # each stage: what the first one takes itself is little
    chosen: list[tuple[float, int]] = []
    add = ChunkBudget.add

    def noted(self: ChunkBudget, chunk: IterationWork) -> None:
        chosen.append((self._limit_s, int(chunk.rows)))
        add(self, chunk)

    monkeypatch.setattr(ChunkBudget, "add", noted)
    await engines.lenders()
    decode = await engines.staged_decode(3, **LOCAL | {"chunk_tokens": 256}, tbt_objective_s=scaled(0.1))
    await engines.idle("decode")  # of the sequence that asked whether the stages are together
    chosen.clear()
    await alone(decode, engines, prompt(300, 7), 20).run()
    assert chosen[0] == (float("inf"), 256)
    beside = alone(decode, engines, prompt(20, 8), 60)
    generating = asyncio.create_task(beside.run())
    await eventually(lambda: len(beside.tokens) > 3)
    chosen.clear()
    await alone(decode, engines, prompt(300, 9), 2).run()
    limits, tokens = zip(*chosen, strict=True)
    assert max(limits) <= scaled(0.1)
    assert set(tokens[:-1]) == {32}, "the least that a prompt gets"
    await generating
    await engines.idle("decode")
