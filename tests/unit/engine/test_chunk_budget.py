"""Chunks beside tokens, by the law itself and by the engine's own classes on a simulated machine."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import pytest

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.engine.chunk_budget import LEAST_TOKENS, ChunkBudget
from kvcommons.engine.chunk_rows import ChunkRows
from kvcommons.engine.core import Core
from kvcommons.engine.history import Histories
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.keeper import BlockKeeper
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.prompt import Prompt
from kvcommons.engine.prompts import Prompts, PromptSpan
from kvcommons.engine.read_buffer import ReadBuffer
from kvcommons.engine.request import Request
from kvcommons.engine.scheduler import Scheduler
from kvcommons.engine.sequence import Sequence
from kvcommons.errors import KVCommonsError
from kvcommons.model.sampling import SamplingParams
from kvcommons.telemetry.trace import Tracer
from tests.unit.engine.sinks import RecordingSink
from tests.unit.engine.tiny import tiny_core

OBJECTIVE_S = 0.2
CHUNK = 512
TOKENS = IterationWork(rows=4, read_bytes=100 << 20)  # of sequences that generate


def takes_s(work: IterationWork) -> float:
    return 0.02 + 1e-4 * work.rows + 3e-8 * work.pairs + 1e-10 * work.read_bytes


def seconds_beside(chunk: range) -> float:
    return takes_s(TOKENS.beside(IterationWork.of_chunk(chunk)))


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """It knows the machine, which never hesitates."""
    made, chance = Predictor(), random.Random(1)
    for _ in range(600):
        first = chance.choice([0, 1000, 20_000, 100_000])
        chunk = IterationWork.of_chunk(range(first, first + chance.randint(LEAST_TOKENS, CHUNK)))
        tokens = IterationWork(rows=chance.randint(1, 8), read_bytes=chance.randint(1, 400) << 20)
        for work in (tokens, chunk, chunk.beside(tokens)):
            made.learn(work, takes_s(work))
    assert made.error < 0.02
    return made


def budget(
    predictor: Predictor, *, objective_s: float = OBJECTIVE_S, chunk_tokens: int = CHUNK
) -> ChunkBudget:
    return ChunkBudget(predictor, TOKENS, objective_s=objective_s, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("first", [0, 5_000, 10_000, 30_000])
def test_a_chunk_is_the_largest_with_which_the_objective_is_kept(predictor: Predictor, first: int) -> None:
    tokens = budget(predictor).fit(first, 10**6)
    assert LEAST_TOKENS <= tokens <= CHUNK
    assert seconds_beside(range(first, first + tokens)) <= OBJECTIVE_S
    if tokens < CHUNK:
        assert seconds_beside(range(first, first + int(1.15 * tokens))) > OBJECTIVE_S


def test_chunks_get_smaller_as_the_context_grows_and_end_at_the_least(predictor: Predictor) -> None:
    chunks = [budget(predictor).fit(first, 10**6) for first in range(0, 200_000, 5_000)]
    assert chunks == sorted(chunks, reverse=True)
    assert (chunks[0], chunks[-1]) == (CHUNK, LEAST_TOKENS)
    assert len(set(chunks)) > 10


def test_others_who_want_the_cores_do_not_make_chunks_small(predictor: Predictor) -> None:
    noisy = copy.copy(predictor)
    chunks = []
    for noisy.error in (0.0, 0.1, 0.9):
        chunks.append(budget(noisy).fit(20_000, 10**6))
    assert chunks[0] > chunks[1] == chunks[2] > LEAST_TOKENS


def test_bounds_and_what_is_wanted_count_too(predictor: Predictor) -> None:
    assert budget(predictor).fit(0, 7) == 7
    assert budget(predictor, chunk_tokens=100).fit(0, 1000) == 100
    assert budget(predictor, chunk_tokens=20, objective_s=1e-6).fit(0, 1000) == 20
    assert budget(predictor, objective_s=1e-6).fit(0, 1000) == LEAST_TOKENS
    assert budget(Predictor(), objective_s=math.inf).fit(0, 1000) == CHUNK


def test_short_prompts_share_what_an_iteration_has(predictor: Predictor) -> None:
    made, taken = budget(predictor), []
    while tokens := made.fit(0, 60):
        made.add(IterationWork.of_chunk(range(tokens)))
        taken.append(tokens)
    assert sum(taken) == CHUNK
    made = budget(predictor)
    made.add(IterationWork.of_chunk(range(30_000, 30_000 + made.fit(30_000, 1000))))
    assert made.fit(30_000, 1000) <= 2, "the least is for one of them only"


def test_chunks_grow_as_what_they_take_becomes_known() -> None:
    made, first, chunks = Predictor(), 0, []
    made.learn(TOKENS, takes_s(TOKENS))
    while len(chunks) < 30:
        tokens = budget(made).fit(first, 10**6)
        work = TOKENS.beside(IterationWork.of_chunk(range(first, first + tokens)))
        made.learn(work, takes_s(work))
        chunks.append(tokens)
        first += tokens
    assert chunks[0] == LEAST_TOKENS
    assert max(chunks) > 10 * LEAST_TOKENS
    assert all(after <= 3 * before for before, after in pairwise(chunks))


def test_the_first_chunks_beside_tokens_do_not_overrun_what_nobody_knows_yet() -> None:
    """Each that is larger than those before is learnt from before the next one."""
    made, objective_s, first = Predictor(), 0.045, 0
    for _ in range(55):
        made.learn(TOKENS, takes_s(TOKENS))
    for _ in range(20):
        tokens = budget(made, objective_s=objective_s).fit(first, 10**6)
        work = TOKENS.beside(IterationWork.of_chunk(range(first, first + tokens)))
        assert takes_s(work) <= 1.1 * objective_s
        made.learn(work, takes_s(work))
        first += tokens
    assert first > 20 * 2 * LEAST_TOKENS


class _Room:
    """A `PromptMemory` without memory: nothing is computed."""

    keeps = True

    def check(self, prompt: Prompt) -> None:
        """There is always room."""

    def take(self, prompt: Prompt) -> bool:
        return True

    def chunk(self, prompt: Prompt, tokens: int) -> range:
        return prompt.chunk(tokens)

    def work(self, chunk: range) -> IterationWork:
        return IterationWork.of_chunk(chunk)

    def open(self, prompt: Prompt, chunk: range) -> bool:
        return True

    def rows(self, prompt: Prompt, chunk: range) -> ChunkRows:
        return cast(ChunkRows, None)  # nobody attends

    def close(self, prompt: Prompt) -> None:
        """Nothing was taken."""


class Machine:
    """The engine's own prompts and scheduler, beside four sequences that generate; an iteration takes what
    `takes_s` says, and some percent more or less. `lends`: whether others' attention waits for it, too."""

    def __init__(self, core: Core, keeper: BlockKeeper, loader: BlockLoader, seed: int) -> None:
        self.lends = False
        self._core = core
        self._scheduler = Scheduler(max_queue=8, max_prompts=8)
        self._prompts = Prompts(
            core, self._scheduler, chunk_tokens=CHUNK, keeper=keeper,
            histories=Histories(core, loader), read_buffer=ReadBuffer(layers=1, bytes_max=0),
            tracer=Tracer.off(), tbt_objective_s=OBJECTIVE_S, lends=lambda: self.lends,
        )  # fmt: skip
        self._chance = random.Random(seed)
        self._keys = iter(range(10**6))

    def submit(self, tokens: int) -> int:
        request = Request(
            request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=(1,) * tokens,
            prompt_tokens=tokens, sampling=SamplingParams(), store_control="", store_data="",
            matched_blocks=0, no_reuse=True,
        )  # fmt: skip
        sequence = Sequence(
            key=next(self._keys), request=request, block_tokens=self._core.block_tokens,
            chain=request.chain(self._core.info),
        )  # fmt: skip
        self._prompts.submit(
            Prompt(
                sequence=sequence, sink=RecordingSink(), memory=_Room(), deadline_s=math.inf, submitted_s=0.0
            )
        )
        self._prompts.admit()
        return sequence.key

    def next_chunk(self, *objectives_s: float) -> int:
        """How many tokens of a prompt would be beside sequences that were promised these; beside none where
        nothing was promised."""
        beside = TOKENS if objectives_s else IterationWork()
        (span,) = self._prompts.spans(self._fail, beside=beside, objectives_s=frozenset(objectives_s))
        return len(span.chunk)

    def iterate(self) -> tuple[list[PromptSpan], float]:
        """Its spans, and how long it took."""
        spans = self._prompts.spans(self._fail, beside=TOKENS)
        work = TOKENS
        for span in spans:
            work = work.beside(span.work)
        seconds = takes_s(work) * self._chance.lognormvariate(0.0, 0.05)
        self._prompts.predictor.learn(work, seconds)
        for span in spans:
            self._prompts.take_result(span, None, seconds)
            if not span.prompt.tokens_left:
                self._prompts.remove(span.prompt.key)
                self._scheduler.remove(span.prompt.key)
        return spans, seconds

    def _fail(self, key: int, error: KVCommonsError) -> None:
        raise error


@pytest.fixture
def machine() -> Iterator[Machine]:
    core, loader = tiny_core(layers=1), BlockLoader(lambda _: None)
    keeper = BlockKeeper(core, BlockSaver("engine", buffer_bytes=1 << 20))
    yield Machine(core, keeper, loader, seed=1)
    keeper.close()
    loader.close()


def test_late_chunks_of_a_long_prompt_are_smaller_and_the_objective_holds(machine: Machine) -> None:
    """Short prompts beside it, whose tokens take far less each, change nothing of that."""
    long = machine.submit(40_000)
    chunks: list[range] = []
    seconds: list[float] = []
    for number in range(2000):
        if number % 5 == 0:
            machine.submit(60)
        spans, took_s = machine.iterate()
        chunks += [span.chunk for span in spans if span.prompt.key == long]
        seconds.append(took_s)
        if chunks and chunks[-1].stop == 40_000:
            break
    assert chunks[-1].stop == 40_000
    assert all(before.stop == after.start for before, after in pairwise(chunks))
    known = seconds[50:]  # the first ones are small, for little is known
    assert sum(took_s > OBJECTIVE_S for took_s in known) <= 0.02 * len(known)
    assert sorted(known)[len(known) // 2] > 0.6 * OBJECTIVE_S, "nor is it kept by small chunks"
    early = [len(chunk) for chunk in chunks if 5_000 < chunk.start < 8_000]
    late = [len(chunk) for chunk in chunks if 35_000 < chunk.start < 39_000]
    assert max(late) < min(early) / 2
    # What the early ones would have made of the last one, as one rate for all contexts would have had it.
    assert seconds_beside(range(39_000, 39_000 + min(early))) > 1.5 * OBJECTIVE_S


def test_the_strictest_of_the_sequences_beside_decides(machine: Machine) -> None:
    """0 stands for the instance's own objective, which is that of sequences without one."""
    machine.submit(40_000)
    for _ in range(60):
        machine.iterate()
    own = machine.next_chunk(0.0)
    assert LEAST_TOKENS < own < CHUNK
    assert machine.next_chunk(OBJECTIVE_S / 2, 0.0, 1.0) == machine.next_chunk(OBJECTIVE_S / 2) < own
    assert machine.next_chunk(1.0, 0.0) == own
    assert machine.next_chunk(1.0) > own, "nobody in the batch was promised more"


def test_those_it_lends_to_have_half_of_the_objective(machine: Machine) -> None:
    """Nobody knows when they ask: half of what the strictest objective allows is left to them, of the
    instance's own one where none of its sequences generates."""
    machine.submit(10_000)
    for _ in range(60):  # until it is known what chunks take
        machine.iterate()
    machine.submit(40_000)
    for _ in range(8):
        machine.iterate()
    promised = machine.next_chunk(OBJECTIVE_S / 2, 0.0)
    half, quarter = machine.next_chunk(OBJECTIVE_S / 2), machine.next_chunk(OBJECTIVE_S / 4)
    assert LEAST_TOKENS < quarter < half == promised
    assert machine.next_chunk() == CHUNK, "nobody waits for it"
    machine.lends = True
    assert half < machine.next_chunk() < CHUNK
    assert machine.next_chunk(0.0) == half
    assert machine.next_chunk(OBJECTIVE_S / 2, 0.0) == quarter
    assert machine.next_chunk(1.0) == half, "to others it is bound by its own"
    machine.lends = False
    assert machine.next_chunk(0.0) > half


def test_a_short_prompt_beside_a_long_one_waits_for_one_chunk_at_most(machine: Machine) -> None:
    """For the iteration under way when it comes: the next one has it alone, beside the tokens."""
    long, chance, waits, done = machine.submit(40_000), random.Random(2), 0, 0
    for _ in range(30):  # until it is known what chunks take
        machine.iterate()
    while done < 39_000:
        spans, _ = machine.iterate()
        done = max([done, *(span.chunk.stop for span in spans if span.prompt.key == long)])
        if chance.random() < 0.2:
            short = machine.submit(chance.choice([20, 60, 100]))
            spans, _ = machine.iterate()
            assert [span.prompt.key for span in spans] == [short]
            assert spans[0].prompt.tokens_left == 0
            waits += 1
    assert waits > 10
