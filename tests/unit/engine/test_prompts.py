"""Prompts on a real engine: several in one iteration give what each gives alone, and what fails of one is no
matter of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.core import Core
from kvcommons.engine.engine import Engine
from kvcommons.engine.history import Histories
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.keeper import BlockKeeper
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
from kvcommons.telemetry.trace import Tracer
from tests.unit.engine.sinks import RecordingSink
from tests.unit.engine.tiny import tiny_core

LONG_S = 20.0
CHUNK = 48
LAYERS = 2


@dataclass(slots=True)
class Kept(RecordingSink):
    """`breaks_at`: the layer at which taking KV fails."""

    breaks_at: int | None = None

    def computed(self, prompt: Prompt, layer: int, blocks: range) -> None:
        if layer == self.breaks_at:
            raise MemoryError("on purpose")
        self.runs.append((layer, blocks))

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

    def submit(self, tokens: list[int], sink: Kept, *, seconds: float = LONG_S) -> int:
        request = Request(
            request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(tokens),
            prompt_tokens=len(tokens), sampling=SamplingParams(logprobs=True), store_control="",
            store_data="", matched_blocks=0, no_reuse=False,
        )  # fmt: skip
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


@contextmanager
def running(*, chunk_tokens: int = CHUNK) -> Iterator[Running]:
    core = tiny_core(layers=LAYERS)
    loader, saver = BlockLoader(lambda _: None), BlockSaver("engine", buffer_bytes=1 << 20)
    keeper = BlockKeeper(core, saver)
    scheduler = Scheduler(max_queue=8, max_prompts=4)
    prompts = Prompts(
        core, scheduler, chunk_tokens=chunk_tokens, keeper=keeper,
        histories=Histories(core, loader), read_buffer=ReadBuffer(layers=LAYERS, bytes_max=0),
        tracer=Tracer.off(),
    )  # fmt: skip
    engine = prompt_engine(core, scheduler, prompts, keeper)
    yield Running(core, engine, WholePrompt(core, prompts))
    engine.stop(LONG_S)
    keeper.close()
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
