"""Prompts on a real engine: several in one iteration give what each gives alone, and what fails of one is no
matter of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from kvcommons.backend.interface import AttentionBackend, ChunkPlan, Partial
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Histories
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.load_or_compute import AlwaysLoad
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.prompt_engine import prompt_engine
from kvcommons.engine.prompt_memory import WholePrompt
from kvcommons.engine.prompts import Prompts
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.request import Request
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import Sequence
from kvcommons.errors import DeadlineExceeded, Internal, Unavailable
from kvcommons.model.sampling import SamplingParams
from kvcommons.model.slices import Model
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.deadline import Deadline
from tests.unit.engine.loads import HeldLoader, KeptKV, kept_kv
from tests.unit.engine.sinks import RecordingSink
from tests.unit.engine.tiny import tiny_core

LONG_S = 20.0
CHUNK = 48
LAYERS = 2


@dataclass(slots=True)
class Kept(RecordingSink):
    """`breaks_at`: the layer at which taking KV fails. `pace` is called within each layer, on the engine's
    thread."""

    breaks_at: int | None = None
    pace: Callable[[int], None] = lambda layer: None

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        if layer == self.breaks_at:
            raise MemoryError("on purpose")
        self.runs.append((layer, blocks))
        self.pace(layer)

    def token(self) -> tuple[int, float]:
        """And its log probability."""
        assert self.ended.wait(LONG_S)
        assert self.first is not None, self.error
        return self.first.token.token, self.first.token.logprob


class Running:
    """An engine that has not begun: what is submitted before `start` begins together."""

    def __init__(self, core: Core, engine: Engine, memory: WholePrompt) -> None:
        self.core = core
        self.engine = engine
        self._memory = memory

    def submit(
        self, tokens: list[int], sink: Kept, *, seconds: float = LONG_S, stored_blocks: int = 0
    ) -> int:
        """`stored_blocks`: leading ones that a store is said to have."""
        request = self.request(tokens, stored_blocks)
        key, now = self.engine.new_key(), time.monotonic()
        sequence = Sequence(
            key=key, request=request, block_tokens=self.core.block_tokens,
            chain=request.chain(self.core.info),
        )  # fmt: skip
        self.engine.submit(
            Prompt(
                sequence=sequence, sink=sink, memory=self._memory, deadline_s=now + seconds, submitted_s=now
            )
        )
        return key

    def request(self, tokens: list[int], stored_blocks: int = 0) -> Request:
        return Request(
            request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(tokens),
            prompt_tokens=len(tokens), sampling=SamplingParams(logprobs=True), store_control="",
            store_data="unix:/store" if stored_blocks else "", matched_blocks=stored_blocks, no_reuse=False,
        )  # fmt: skip


@contextmanager
def running(*, chunk_tokens: int = CHUNK, loader: HeldLoader | None = None) -> Iterator[Running]:
    """What `loader` loads is waited for, however long it takes."""
    core = tiny_core(layers=LAYERS)
    cost = AlwaysLoad(lambda _: 0.0) if loader else None
    loader, saver = loader or HeldLoader(), BlockSaver("engine", buffer_bytes=1 << 20)
    keeper = BlockKeeper(core, saver)
    scheduler = Scheduler(max_queue=8, max_prompts=4)
    prompts = Prompts(
        core, scheduler, chunk_tokens=chunk_tokens, keeper=keeper,
        histories=Histories(core, loader), read_buffer=ReadBuffer(layers=LAYERS, bytes_max=0),
        cost=cost, tracer=Tracer.off(),
    )  # fmt: skip
    engine = prompt_engine(core, scheduler, prompts, keeper)
    yield Running(core, engine, WholePrompt(core, prompts))
    engine.stop(LONG_S)
    keeper.close()
    saver.close(Deadline.after(0))
    loader.close()
    assert core.allocator.free == core.allocator.total, "no block is left with anybody"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups of rows each iteration had."""
    seen: list[int] = []
    run = Iteration.run

    def counted(self: Iteration, between_layers: Callable[[], None] | None = None) -> object:
        seen.append(len(self.groups))
        return run(self, between_layers)

    monkeypatch.setattr(Iteration, "run", counted)
    return seen


def tokens(count: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i) % 97 + 1 for i in range(count)]


def alone(prompt: list[int], *, chunk_tokens: int = 64) -> tuple[int, float]:
    with running(chunk_tokens=chunk_tokens) as one:
        sink = Kept()
        one.submit(prompt, sink)
        one.engine.start()
        return sink.token()


def test_prompts_that_share_an_iteration_give_what_each_gives_alone(groups: list[int]) -> None:
    prompts = [tokens(11, 1), tokens(13, 2), tokens(9, 3)]
    expected = [alone(prompt) for prompt in prompts]
    groups.clear()
    with running() as together:
        sinks = [Kept() for _ in prompts]
        for prompt, sink in zip(prompts, sinks, strict=True):
            together.submit(prompt, sink)
        together.engine.start()
        for (token, logprob), sink in zip(expected, sinks, strict=True):
            assert sink.token() == (token, pytest.approx(logprob, abs=1e-5))
    assert groups == [3]


def test_every_iteration_is_learnt_from() -> None:
    with running(chunk_tokens=16) as one:
        sink = Kept()
        one.submit(tokens(45, 4), sink)
        one.engine.start()
        sink.token()
        one.engine.stop(LONG_S)
        predictor = one.engine.predictor
        assert predictor.most == IterationWork(rows=16, pairs=IterationWork.of_chunk(range(32, 45)).pairs)
        assert predictor.seconds(predictor.most) > 0


def test_chunks_that_end_inside_a_block_give_the_same_and_each_block_goes_out_once() -> None:
    prompt = tokens(45, 4)
    token, logprob = alone(prompt)
    with running(chunk_tokens=7) as one:
        sink = Kept()
        one.submit(prompt, sink)
        one.engine.start()
        assert sink.token() == (token, pytest.approx(logprob, abs=1e-5))
    for layer in range(LAYERS):
        blocks = [block for at, some in sink.runs if at == layer for block in some]
        assert blocks == [0, 1, 2]


def test_what_fails_of_one_prompt_ends_that_one_alone(groups: list[int]) -> None:
    prompts = [tokens(11, 1), tokens(13, 2), tokens(9, 3)]
    expected = [alone(prompt) for prompt in prompts]
    groups.clear()
    with running() as together:
        sinks = [Kept(), Kept(breaks_at=1), Kept()]
        for prompt, sink in zip(prompts, sinks, strict=True):
            together.submit(prompt, sink)
        together.engine.start()
        for number in (0, 2):
            token, logprob = expected[number]
            assert sinks[number].token() == (token, pytest.approx(logprob, abs=1e-5))
        assert sinks[1].ended.wait(LONG_S)
        assert isinstance(sinks[1].error, Internal)
    assert groups == [3]


def stored(prompt: list[int]) -> tuple[KeptKV, tuple[int, float]]:
    """What a store would have of it, and what it gives alone."""
    with running(chunk_tokens=64) as one:
        sink = Kept()
        one.submit(prompt, sink)
        one.engine.start()
        outcome = sink.token()
        ids = one.request(prompt).chain(one.core.info).ids
        return kept_kv(one.core, ids), outcome


def test_a_prompt_whose_history_is_on_its_way_is_alone_in_its_iteration(groups: list[int]) -> None:
    """It may wait for its next layer, and no row of another prompt waits with it."""
    prompt, other = tokens(29, 1), tokens(9, 2)
    kept, (token, logprob) = stored(prompt)
    beside = alone(other)
    groups.clear()
    loader = HeldLoader(kept, at_once=[None])  # its first layer, with which it may begin

    def pace(layer: int) -> None:
        if layer == 0:
            loader.loads[0].come()

    with running(loader=loader) as one:
        waits, sink = Kept(pace=pace), Kept()
        one.submit(prompt, waits, stored_blocks=1)
        one.submit(other, sink)
        one.engine.start()
        assert waits.token() == (token, pytest.approx(logprob, abs=1e-5))
        assert sink.token() == (beside[0], pytest.approx(beside[1], abs=1e-5))
        assert waits.first is not None
        assert waits.first.cached_tokens == one.core.block_tokens
    assert groups == [1, 1]


def test_prompts_whose_history_is_there_share_an_iteration(groups: list[int]) -> None:
    prompt, other = tokens(29, 1), tokens(9, 2)
    kept, (token, logprob) = stored(prompt)
    groups.clear()
    loader = HeldLoader(kept, at_once=[None] * LAYERS)
    with running(loader=loader) as one:
        sinks = [Kept(), Kept()]
        one.submit(prompt, sinks[0], stored_blocks=1)
        one.submit(other, sinks[1])
        one.engine.start()
        assert sinks[0].token() == (token, pytest.approx(logprob, abs=1e-5))
        sinks[1].token()
    assert groups == [2]


def test_a_history_that_fell_short_sets_its_own_prompt_back_alone(groups: list[int]) -> None:
    """All of its layers came, but with one block of two: that is found out in the iteration, which goes on
    with the other prompt's rows."""
    prompt, other = tokens(37, 1), tokens(9, 2)
    kept, (token, logprob) = stored(prompt)
    beside = alone(other)
    groups.clear()
    loader = HeldLoader(kept, at_once=[1] * LAYERS)
    with running(loader=loader) as one:
        short, sink = Kept(), Kept()
        one.submit(prompt, short, stored_blocks=2)
        one.submit(other, sink)
        one.engine.start()
        assert sink.token() == (beside[0], pytest.approx(beside[1], abs=1e-5))
        assert sink.layers == list(range(LAYERS)), "it was computed once"
        assert short.token() == (token, pytest.approx(logprob, abs=1e-5))
        assert short.first is not None
        assert short.first.cached_tokens == one.core.block_tokens
    assert groups == [2, 1]


def test_chunks_that_are_not_the_last_need_no_attention_in_the_last_layer_and_no_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their keys and values of that layer are all that others will look for."""
    with running(chunk_tokens=16) as one:
        attended, heads = counted(one.core, monkeypatch)
        sink = Kept()
        one.submit(tokens(45, 4), sink)
        one.engine.start()
        sink.token()
    assert attended == [(0, 16), (0, 16), (0, 13), (LAYERS - 1, 13)]
    assert heads == [1]
    assert len(sink.layers) == 3 * LAYERS, "each chunk's KV goes out in all layers"


def counted(core: Core, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, int]], list[int]]:
    """The layer and the rows of each attention over a chunk, and the rows of each product with the head."""
    attended, heads = list[tuple[int, int]](), list[int]()
    attention, head = core.backend.attention, Model.head
    plan_chunk = attention.plan_chunk
    layers = {core.memory.layer(layer).data_ptr(): layer for layer in core.layers}

    class Counting:
        def __init__(self, plan: ChunkPlan) -> None:
            self._plan = plan

        def attend(self, q: Tensor, kv: Tensor, scale: float) -> Partial:
            attended.append((layers[kv.data_ptr()], len(q)))
            return self._plan.attend(q, kv, scale)

    def plan(self: AttentionBackend, *args: Any, **kwargs: Any) -> ChunkPlan:
        return Counting(plan_chunk(*args, **kwargs))

    def counting(self: Model, closed: Tensor) -> Tensor:
        heads.append(len(closed))
        return head(self, closed)

    monkeypatch.setattr(type(attention), "plan_chunk", plan)
    monkeypatch.setattr(Model, "head", counting)
    return attended, heads


def test_a_prompt_nobody_wants_any_more_ends_before_its_next_chunk() -> None:
    with running() as one:
        unwanted, late = Kept(failure=Unavailable("gone")), Kept()
        one.submit(tokens(20, 1), unwanted)
        one.submit(tokens(20, 2), late, seconds=-1.0)
        one.engine.start()
        assert unwanted.ended.wait(LONG_S)
        assert late.ended.wait(LONG_S)
        assert isinstance(unwanted.error, Unavailable)
        assert isinstance(late.error, DeadlineExceeded)
        assert not unwanted.layers


def test_what_is_left_when_the_engine_stops_hears_so() -> None:
    with running() as one:
        sink = Kept()
        one.submit(tokens(20, 1), sink)
        one.engine.stop(0.0)
        one.engine.start()
        one.engine.stop(LONG_S)
    assert isinstance(sink.error, Unavailable)
