"""How `Staggered` carries iterations out: batches that take turns, and prompts, which are in none of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvcommons.engine.executor import Composer
from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun
from kvcommons.engine.sequence import Sequence as Generating
from kvcommons.engine.slices import Slices
from kvcommons.model.sampling import SamplingParams
from kvcommons.pb import common_pb2 as pb
from kvcommons.rblock.identity import IdentityChain
from services.decode.staggering.executor import Staggered
from services.decode.staggering.lanes import LANES, BatchLane
from tests.machine import scaled
from tests.unit.engine.tiny import tiny_core

LONG_S = scaled(20.0)
BLOCK = 16
SPAN: Any = SimpleNamespace(exclusive=False)  # a chunk of a prompt


@dataclass(eq=False)
class Flight:
    """An iteration, as far as an executor sees it; in a lane it ends when the test says so."""

    keys: list[int]
    spans: list[Any]
    slices: Any
    ends: threading.Event = field(default_factory=threading.Event)
    failures: dict[int, Exception] = field(default_factory=dict)
    timing: IterationTiming = field(default_factory=IterationTiming)
    thread: str = ""

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def groups(self) -> list[Any]:
        return []

    def run_or_fail(self, between_layers: Callable[[], None] | None = None) -> list[Any]:
        self.thread = threading.current_thread().name
        if between_layers is None:
            assert self.ends.wait(LONG_S)
        return []


class Flights(Composer):
    """Makes `Flight`s, and keeps them."""

    def __init__(self) -> None:
        self.made: list[Flight] = []
        self.seen = 0  # of them, by the test

    def batch(self, last: Any, sequences: Sequence[Generating], drafts: Any = None) -> Any:
        keys = [one.key for one in sequences]
        return SimpleNamespace(keys=keys, has_heads=False, objectives_s=()) if keys else None

    def work(self, batch: Any) -> IterationWork:
        return IterationWork(rows=len(batch.keys) if batch else 0)

    def iteration(self, batch: Any, spans: Sequence[Any] = (), slices: Slices | None = None) -> Iteration:
        made: Any = Flight(batch.keys if batch else [], list(spans), slices)
        self.made.append(made)
        return made  # type: ignore[no-any-return]


class Engine:
    """What an executor knows of the engine: four sequences that generate, and prompts where there are any."""

    def __init__(self) -> None:
        self.has_prompts = False
        self.results: list[Any] = []
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sequences = {key: sequence(key) for key in range(4)}

    def serve(self, commands: int) -> None:
        for _ in range(commands):
            self._commands.get(timeout=LONG_S)()

    def post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def make_room(self) -> Mapping[int, Generating]:
        return self._sequences

    def drafts(self, sequences: Sequence[Generating]) -> Mapping[int, Sequence[int]]:
        return {}

    def spans(self, *, beside: IterationWork, objectives_s: Collection[float] = ()) -> Sequence[Any]:
        return [SPAN] if self.has_prompts else []

    def prompts(self) -> bool:
        return self.has_prompts

    def load(self) -> tuple[int, int]:
        return len(self._sequences), 20 * len(self._sequences)

    def answer_switches(self) -> None:
        """Nothing was switched."""

    def cores(self, iteration: Iteration) -> AbstractContextManager[None]:
        return nullcontext()

    def between_layers(self, iteration: Iteration) -> None:
        """Nothing waits."""

    def take_results(self, iteration: Iteration, tokens: Any) -> None:
        self.results.append(iteration)

    def sampled(self, key: int, token: pb.SampledToken) -> None:
        raise AssertionError("there are no stages")

    def scored(self, key: int, logprobs: pb.PromptLogprobs) -> None:
        raise AssertionError("there are no stages")

    def idle(self) -> None:
        """There is always something."""


def sequence(key: int) -> Generating:
    request = Request(
        request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(range(20)), prompt_tokens=20,
        sampling=SamplingParams(), store_control="", store_data="", matched_blocks=0, no_reuse=False,
    )  # fmt: skip
    chain = IdentityChain(bytes(32), bytes(32), BLOCK)
    made = Generating(key=key, request=request, block_tokens=BLOCK, chain=chain)
    made.append_run(LocalRun(first_block=0, blocks=[2 * key, 2 * key + 1]))
    return made


class Always:
    """A policy by which batches take turns wherever that is possible; `learnt` from these iterations, by
    whether there was one batch."""

    def __init__(self) -> None:
        self.learnt: list[bool] = []

    def batches(self, sequences: int, tokens: int) -> int:
        return LANES

    def slices(self, lane: int, here: Slices, *, unrotated: bool) -> Slices:
        return here

    def ended(self, sequences: int, tokens: int, timing: IterationTiming, *, batch: int, alone: bool) -> None:
        self.learnt.append(alone)

    def took_staggered(self, sequences: int, tokens: int, lane: BatchLane) -> None:
        """Nothing is measured."""


@dataclass
class Staggering:
    executor: Staggered
    composer: Flights
    engine: Engine
    policy: Always

    def advance(self) -> bool:
        return self.executor.advance(self.engine)

    def last(self, count: int) -> list[Flight]:
        """The latest iterations; there are no others since the last call."""
        made = self.composer.made[self.composer.seen :]
        assert len(made) == count
        self.composer.seen += count
        return made


@pytest.fixture
def staggering() -> Iterator[Staggering]:
    composer, policy = Flights(), Always()
    executor = Staggered(tiny_core(layers=1), composer, policy, close_s=LONG_S)
    yield Staggering(executor, composer, Engine(), policy)
    for one in composer.made:
        one.ends.set()
    executor.close()


def test_prompts_wait_for_batches_that_took_turns_and_are_computed_in_one_iteration(
    staggering: Staggering,
) -> None:
    """Then the batches take turns again."""
    engine = staggering.engine
    assert not staggering.advance()
    lanes = staggering.last(2)
    assert [one.spans for one in lanes] == [[], []]
    assert sorted(key for one in lanes for key in one.keys) == [0, 1, 2, 3]
    engine.has_prompts = True
    assert not staggering.advance()
    lanes[0].ends.set()
    engine.serve(1)
    assert not staggering.advance()
    staggering.last(0)
    assert engine.results == lanes[:1]
    lanes[1].ends.set()
    engine.serve(1)
    for _ in range(2):
        assert staggering.advance()
        (alone,) = staggering.last(1)
        assert (alone.keys, alone.spans) == ([0, 1, 2, 3], [SPAN])
        assert alone.thread == threading.current_thread().name
        assert engine.results[-1] is alone
    assert staggering.policy.learnt == [False, False], "what a chunk takes says nothing of batches"
    engine.has_prompts = False
    assert not staggering.advance()
    again = staggering.last(2)
    assert [one.spans for one in again] == [[], []]
    for one in again:
        one.ends.set()
    engine.serve(2)
    assert all(one.thread.startswith("decode-lane-") for one in [*lanes, *again])
