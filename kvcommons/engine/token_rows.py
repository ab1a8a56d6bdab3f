"""A batch of running sequences in an iteration: a token each, and drafts behind it, with attention here and
on other holders."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kvcommons.backend.interface import BatchPlan, PagedRows, Partial
from kvcommons.engine.batch import Batch, Queries
from kvcommons.engine.core import Core
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.attention import RemoteAttention, RemoteStep
from kvcommons.engine.remote.plans import NewRows
from kvcommons.errors import KVCommonsError
from kvcommons.grammar.grammars import prepare_masks
from kvcommons.model.sampling import SamplingRow
from kvcommons.model.slices import State


class TokenRows:
    """Use once. Rows in `lost` have no valid token: their sequences' KV is not there any more."""

    def __init__(self, core: Core, remote: RemoteAttention, batch: Batch, attend_deadline_s: float) -> None:
        """A layer waits so long for other holders."""
        self._core = core
        self._remote = remote
        self.batch = batch
        self._attend_deadline_s = attend_deadline_s
        self._plans: dict[int | None, BatchPlan] = {}
        self._all_append = len(batch.append_rows) == len(batch.sequences)
        self._head_rotation = None
        if batch.has_heads:
            self._head_rotation = core.model.rotation(core.backend.device.upload(batch.positions))
        self._step: RemoteStep
        self._timing: IterationTiming

    @property
    def tokens(self) -> Tensor:
        return self.batch.tokens

    @property
    def positions(self) -> Tensor:
        return self.batch.positions + self.batch.dropped

    @property
    def work(self) -> IterationWork:
        return self.batch.work(self._core.layout.block_bytes)

    @property
    def lost(self) -> dict[int, KVCommonsError]:
        return self._step.lost

    def open(self, timing: IterationTiming) -> None:
        self._timing = timing
        prepare_masks(self.batch.constrained())
        self._slots = self._core.memory.rows_of(self.batch.slots())
        self._step = self._remote.begin(
            self.batch, self._attend_deadline_s, timing, (self._core.memory, self._slots)
        )

    def sampling(self) -> list[SamplingRow]:
        batch = self.batch
        drafts = batch.drafts or [()] * len(batch.sequences)
        return [one.sampling_row(some) for one, some in zip(batch.sequences, drafts, strict=True)]

    def paged(self) -> PagedRows | None:
        if not self.batch.plain or not self._all_append or self._head_rotation is not None:
            return None
        core = self._core
        plans = [self._plan(core.model.window(layer)) for layer in core.layers]
        return PagedRows(kv=core.memory.tensor, slots=self._slots, plans=plans, scale=core.model.scale)

    def passed(self, layers: range) -> None:
        """Nobody waits for it."""

    def wanted_logprobs(self) -> None:
        """Of no prompt."""

    def close(self) -> None:
        self._remote.end(self._step)

    def attend(self, layer: int, state: State, *, needed: bool) -> Tensor:
        """Other holders are asked first, and answer while the local part is computed."""
        batch, model = self.batch, self._core.model
        step = self._step
        queries = Queries(plain=state.q)
        if self._head_rotation is not None:
            queries = Queries(plain=state.q, shifted=model.shifted_query(state, self._head_rotation))
        if batch.plain:
            self._write(layer, state)
            return self._attend_here(layer, state.q).out
        new = NewRows(layer, queries, state.k, state.v)
        self._remote.ask(step, new)
        here = None
        if len(batch.part_rows):
            whole = batch.part_groups[0].whole and not len(batch.part_heads)
            q = state.q if whole else queries.of(batch.on_device.parts, batch.on_device.heads)
            here = self._attend_here(layer, q, step.here)
        return self._remote.collect(step, new, here).out

    def _attend_here(self, layer: int, q: Tensor, into: Partial | None = None) -> Partial:
        """q [parts, H, D]; `into` as BatchPlan has it."""
        core, began_s = self._core, time.monotonic()
        plan = self._plan(core.model.window(layer))
        partial = plan.attend(q, core.memory.layer(layer), core.model.scale, into)
        self._timing.here_s += time.monotonic() - began_s
        return partial

    def _write(self, layer: int, state: State) -> None:
        """K and V of rows whose tail lies here."""
        appending = self.batch.on_device.appending
        if self._all_append:
            self._core.memory.write_rows(layer, self._slots, torch.cat((state.k, state.v), dim=1))
        elif len(appending):
            kv = torch.cat((state.k[appending], state.v[appending]), dim=1)
            self._core.memory.write_rows(layer, self._slots, kv)

    def _plan(self, window: int | None) -> BatchPlan:
        if window not in self._plans:
            batch = self.batch
            self._plans[window] = self._core.backend.attention.plan_batch(
                self._core.memory.layer(self._core.layers[0]),
                batch.tables,
                batch.lengths,
                first_key_positions=batch.first_keys,
                query_positions=batch.positions[batch.part_rows],
                window=window,
            )
        return self._plans[window]
