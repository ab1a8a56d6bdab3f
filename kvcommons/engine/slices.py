"""This process's replica of the model, and whose slice it computes next."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import Tensor

from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.turn_queue import TurnQueue
from kvcommons.errors import DeadlineExceeded
from kvcommons.model.sampling import SamplingRow, sample
from kvcommons.model.slices import Model, State
from kvcommons.pb import common_pb2 as pb
from kvcommons.transport.deadline import Deadline

TURN_S = 60.0  # for a batch's own turn at its own replica: each before it is a slice that is being computed


class Turn:
    """At a replica: one slice at a time, first come, first served. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: TurnQueue[threading.Event] = TurnQueue()

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Raises DeadlineExceeded."""
        granted = threading.Event()
        with self._lock:
            mine = self._queue.ask(granted)
        if not mine and not granted.wait(deadline.left()):
            with self._lock:
                mine = not self._queue.leave(granted)
            if not mine:
                raise DeadlineExceeded("other batches had their turn at the model until the deadline")
        try:
            yield
        finally:
            with self._lock:
                successor = self._queue.ended()
            if successor is not None:
                successor.set()


class Slices(Protocol):
    """Where a batch's slices are computed (kvcommons.model.slices); what they take is told to `timing`."""

    def begin(self, timing: IterationTiming, tokens: Tensor, positions: Tensor) -> State:
        """tokens, positions LongTensor [B]."""

    def advance(self, timing: IterationTiming, layer: int, state: State, attention: Tensor) -> State:
        """attention [B, query_heads, head_dim] of `layer`."""

    def end(
        self, timing: IterationTiming, state: State, attention: Tensor, rows: Sequence[SamplingRow]
    ) -> list[pb.SampledToken]:
        """The last layer's attention -> a token for each row."""


class LocalSlices:
    """On this process's replica."""

    def __init__(self, model: Model, turn: Turn | None = None) -> None:
        """`turn`: for batches that share the replica's cores."""
        self._model = model
        self._turn = turn

    def begin(self, timing: IterationTiming, tokens: Tensor, positions: Tensor) -> State:
        with timing.slice(self._my_turn()):
            return self._model.begin(tokens, positions)

    def advance(self, timing: IterationTiming, layer: int, state: State, attention: Tensor) -> State:
        with timing.slice(self._my_turn()):
            return self._model.advance(layer, state, attention)

    def end(
        self, timing: IterationTiming, state: State, attention: Tensor, rows: Sequence[SamplingRow]
    ) -> list[pb.SampledToken]:
        with timing.slice(self._my_turn()):
            return sample(self._model.end(state, attention, range(len(rows))), rows)

    def _my_turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._turn is None else self._turn.within(Deadline.after(TURN_S))
