"""An iteration over a stage's layers: what comes before its first layer, and after its last one, are
activations where it is not the model's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from kvcommons.engine.core import Core
from kvcommons.engine.iteration import Iteration, Rows
from kvcommons.model.slices import State
from kvcommons.pb import common_pb2 as pb


class StageIteration(Iteration):
    """Use once. A stage before the last samples nothing: once it has run, `leaving` is what the next one
    enters with, the residual stream [rows, hidden] in host memory of the groups in `going_on`."""

    def __init__(self, core: Core, groups: Sequence[Rows], entering: Tensor | None = None) -> None:
        """`entering` [rows, hidden] in host memory: None for the first stage, which begins with tokens."""
        super().__init__(core, groups)
        self._entering = entering
        self.going_on: list[int] = []
        self.leaving: Tensor | None = None

    def _begin(self, positions: Tensor) -> State:
        if self._entering is None:
            return super()._begin(positions)
        with self.timing.slice(nullcontext()):
            return self._core.model.enter(self._core.backend.device.upload(self._entering), positions)

    def _finish(self, state: State) -> list[list[pb.SampledToken]]:
        core = self._core
        if core.model.last:
            return super()._finish(state)
        nothing: list[list[pb.SampledToken]] = [[] for _ in self.groups]
        attention = self._attend(core.layers[-1], state)
        if attention is None:
            return nothing
        with self.timing.slice(nullcontext()):
            hidden = core.model.leave(state, attention)
            self.going_on = [number for number in range(len(self.groups)) if number not in self.failures]
            if len(self.going_on) < len(self.groups):
                hidden = torch.cat([hidden[self._rows_of(number)] for number in self.going_on])
            self.leaving = core.backend.device.fetch(hidden.contiguous())
        return nothing

    def _rows_of(self, number: int) -> slice:
        end = self._ends[number]
        return slice(end - len(self.groups[number].tokens), end)
