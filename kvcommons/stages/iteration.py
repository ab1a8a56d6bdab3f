"""An iteration over a stage's layers: what comes before its first layer, and after its last one, are
activations where it is not the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from kvcommons.engine.core import Core
from kvcommons.engine.iteration import Iteration, Rows
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import DataLoss, Unavailable
from kvcommons.model.slices import State
from kvcommons.pb import common_pb2 as pb


class StageIteration(Iteration):
    """Use once. A stage before the last samples nothing: once it has run, `leaving` is what the next one
    enters with, the residual stream [rows, hidden] in host memory of the groups in `going_on`.

    Where a stage has several ranks, all of them sum up the same rows: a group that fails at one has zeros
    there until the end.
    """

    def __init__(
        self,
        core: Core,
        groups: Sequence[Rows],
        entering: Tensor | None = None,
        *,
        entered: Callable[[StageIteration, Tensor], None] | None = None,
    ) -> None:
        """`entering` [rows, hidden] in host memory: None for the first stage, which begins with tokens.
        `entered` is told the same there before the first layer."""
        super().__init__(core, groups)
        self._entering = entering
        self._entered = entered
        self._summed = core.model.rank.ranks > 1
        self.going_on: list[int] = []
        self.leaving: Tensor | None = None
        self.epoch = 0  # in which the first stage began it
        self.left_s = 0.0  # when it went on to the next stage

    def run(self, between_layers: Callable[[], None] | None = None) -> list[list[pb.SampledToken]]:
        tokens = super().run(between_layers)
        for number, group in enumerate(self.groups if self._summed else ()):
            if isinstance(group, TokenRows) and group.batch.shares and number not in self.failures:
                self._agree_on_lost(group)  # some is known at the end only
        return [[] if number in self.failures else made for number, made in enumerate(tokens)]

    def _agree(self) -> None:
        for number, group in enumerate(self.groups if self._summed else ()):
            if isinstance(group, PromptSpan):
                self._agree_on_chunk(number, group)

    def _agree_on_lost(self, group: TokenRows) -> None:
        """What one rank could not attend over none has summed up right."""
        lost = torch.zeros(len(group.batch.sequences))
        lost[list(group.lost)] = 1
        for row in self._over_ranks(lost).nonzero().flatten().tolist():
            group.lost.setdefault(row, DataLoss("another rank of this stage could not attend over its KV"))

    def _agree_on_chunk(self, number: int, span: PromptSpan) -> None:
        """Where one rank has zeros in place of it all have something wrong: nothing is saved of it. One of a
        spread prompt is alone in its iteration, and is not passed on."""
        failed = torch.full((1,), float(number in self.failures))
        if not self._over_ranks(failed).any():
            span.save_whole()
            return
        span.drop()
        if not span.prompt.memory.keeps:
            lost = Unavailable("another rank of this stage could not attend over the prompt's blocks")
            self.failures.setdefault(number, lost)

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Their sums over all ranks of the stage, in host memory as they are."""
        device = self._core.backend.device
        return device.fetch(self._core.model.summed(device.upload(values)))

    def _begin(self, positions: Tensor) -> State:
        if self._entering is None and self._entered is None:
            return super()._begin(positions)
        if self._entering is None:
            device = self._core.backend.device
            tokens = torch.cat([group.tokens for group in self.groups])
            with self.timing.slice(nullcontext()):
                self._entering = device.fetch(self._core.model.embed(device.upload(tokens)))
        if self._entered is not None:
            self._entered(self, self._entering)
        with self.timing.slice(nullcontext()):
            return self._core.model.enter(self._core.backend.device.upload(self._entering), positions)

    def _finish(self, state: State) -> list[list[pb.SampledToken]]:
        core = self._core
        nothing: list[list[pb.SampledToken]] = [[] for _ in self.groups]
        if core.model.rank.number and core.layers.stop == core.model.spec.layers:
            self._close_sampled(state)
            self._agree()
            return nothing
        if core.model.last:
            return super()._finish(state)
        attention = self._attend(core.layers[-1], state)
        if attention is None:
            return nothing
        with self.timing.slice(nullcontext()):
            hidden = core.model.leave(state, attention)
            self._agree()
            if core.model.rank.number:
                return nothing  # the first rank has the same, and passes it on
            self.going_on = [number for number in range(len(self.groups)) if number not in self.failures]
            if not self.going_on:
                return nothing
            if len(self.going_on) < len(self.groups):
                hidden = torch.cat([hidden[self._rows_of(number)] for number in self.going_on])
            self.leaving = core.backend.device.fetch(hidden.contiguous())
        return nothing

    def _attend(self, layer: int, state: State) -> Tensor | None:
        if not self._summed:
            return super()._attend(layer, state)
        parts = [self._attend_group(number, layer, state, needed=True) for number in range(len(self.groups))]
        return torch.cat([part for part in parts if part is not None])

    def _attend_group(self, number: int, layer: int, state: State, *, needed: bool) -> Tensor | None:
        part = super()._attend_group(number, layer, state, needed=needed)
        return self._nothing(number) if part is None and needed and self._summed else part

    def _close_sampled(self, state: State) -> None:
        """A rank beside the one that has the head: its part of the last layer, of the rows that are
        read or sampled, in the order in which that one sums them up."""
        hidden, attention = [], []
        for number, group in enumerate(self.groups):
            count, wanted = len(group.sampling()), group.wanted_logprobs()
            needed = bool(count) or wanted is not None
            part = self._attend_group(number, self._core.layers[-1], state, needed=needed)
            if part is not None and wanted is not None:
                leading = slice(len(wanted.tokens))
                with self.timing.slice(nullcontext()):
                    self._core.model.leave(self._of(state, number).rows(leading), part[leading])
            if part is not None and count:
                hidden.append(self._of(state, number).hidden[-count:])
                attention.append(part[-count:])
        if hidden:
            with self.timing.slice(nullcontext()):
                self._core.model.leave(state.ending(torch.cat(hidden)), torch.cat(attention))

    def _rows_of(self, number: int) -> slice:
        end = self._ends[number]
        return slice(end - len(self.groups[number].tokens), end)
