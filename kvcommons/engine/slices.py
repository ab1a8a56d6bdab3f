"""The slices of an iteration on this process's replica of the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from kvcommons.backend.interface import PagedRows
from kvcommons.engine.fair_lock import FairLock
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.model.sampling import SamplingRow, sample
from kvcommons.model.slices import Model, State
from kvcommons.pb import common_pb2 as pb
from kvcommons.transport.deadline import Deadline

LOCK_S = 60.0  # for a batch at its own replica: each one before it is a slice that is being computed


class Slices(Protocol):
    """Where a batch's slices are computed (kvcommons.model.slices); `timing` takes how long they take."""

    def begin(self, timing: IterationTiming, tokens: Tensor, positions: Tensor) -> State:
        """tokens, positions LongTensor [B]."""

    def advance(self, timing: IterationTiming, layer: int, state: State, attention: Tensor) -> State:
        """attention [B, query_heads, head_dim] of `layer`."""

    def forward(self, timing: IterationTiming, layers: range, state: State, rows: PagedRows) -> State | None:
        """Through `layers` to the one behind them, with their attention. None, with nothing done, where they
        go one by one."""

    def end(
        self, timing: IterationTiming, state: State, attention: Tensor, rows: Sequence[SamplingRow]
    ) -> list[pb.SampledToken]:
        """The last layer's attention -> a token for each row."""

    def close(self, timing: IterationTiming, state: State, attention: Tensor) -> Tensor:
        """The last layer's attention -> what the head takes, [B, hidden]."""

    def head(self, timing: IterationTiming, closed: Tensor) -> Tensor:
        """closed [B, hidden] -> logits [B, vocab] float32."""


class LocalSlices:
    """On this process's replica."""

    def __init__(self, model: Model, model_lock: FairLock | None = None) -> None:
        """`model_lock` is held by one batch at a time, where several share the replica's cores."""
        self._model = model
        self._model_lock = model_lock

    def begin(self, timing: IterationTiming, tokens: Tensor, positions: Tensor) -> State:
        with timing.slice(self._locked()):
            return self._model.begin(tokens, positions)

    def advance(self, timing: IterationTiming, layer: int, state: State, attention: Tensor) -> State:
        with timing.slice(self._locked()):
            return self._model.advance(layer, state, attention)

    def forward(self, timing: IterationTiming, layers: range, state: State, rows: PagedRows) -> State | None:
        if self._model_lock is not None:
            return None  # others compute between two layers
        with timing.slice(nullcontext()):
            found = self._model.forward(layers, state, rows)
        if found is None:
            return None
        state, attention_s = found
        timing.here_s += attention_s
        timing.slices_s -= attention_s
        return state

    def end(
        self, timing: IterationTiming, state: State, attention: Tensor, rows: Sequence[SamplingRow]
    ) -> list[pb.SampledToken]:
        with timing.slice(self._locked()):
            logits = self._model.end(state, attention, range(len(rows)))
            return sample(logits, rows, self._model.backend.device)

    def close(self, timing: IterationTiming, state: State, attention: Tensor) -> Tensor:
        with timing.slice(self._locked()):
            return self._model.close(state, attention)

    def head(self, timing: IterationTiming, closed: Tensor) -> Tensor:
        with timing.slice(self._locked()):
            return self._model.head(closed)

    def _locked(self) -> AbstractContextManager[None]:
        return nullcontext() if self._model_lock is None else self._model_lock.within(Deadline.after(LOCK_S))
