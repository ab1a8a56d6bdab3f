"""One iteration: a token for each row of a batch, slice by slice, with attention here and elsewhere between
them."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from kvcommons.attention.partial import BatchPlan, Partial
from kvcommons.engine.batch import Batch, Queries
from kvcommons.engine.core import Core
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.remote.messages import NewRows
from kvcommons.engine.slices import Here, Slices
from kvcommons.errors import KVCommonsError
from kvcommons.model.slices import State
from kvcommons.pb import common_pb2 as pb
from kvcommons.placement.auto import Rates

_READ_BYTES = 1 << 20


class Iteration:
    """Use once. Rows in `lost` have no valid token: their sequences' KV is not there any more."""

    def __init__(
        self,
        core: Core,
        remote: RemoteAttention,
        batch: Batch,
        attend_deadline_s: float,
        rates: Rates,
        slices: Slices | None = None,
    ) -> None:
        """`slices`: where they are computed; None: here, without taking turns."""
        self._core = core
        self._remote = remote
        self.batch = batch
        self._slices = slices or Here(core.model)
        self.timing = IterationTiming()
        self._rows = core.memory.rows_of(batch.slots())
        self._remote_step = remote.begin(batch, attend_deadline_s, self.timing, (core.memory, self._rows))
        self._plans: dict[int | None, BatchPlan] = {}
        self._all_append = len(batch.append_rows) == len(batch.sequences)
        self._head_rotation = core.model.rotation(batch.positions) if batch.has_heads else None
        self._rates = rates

    @property
    def lost(self) -> dict[int, KVCommonsError]:
        return self._remote_step.lost

    def run(self) -> list[pb.SampledToken]:
        """A sampled token for each row, lost ones included."""
        started = time.monotonic()
        try:
            tokens = self._run()
        finally:
            self._remote.end(self._remote_step)
        self._observe()
        self.timing.seconds = time.monotonic() - started
        return tokens

    def _run(self) -> list[pb.SampledToken]:
        slices, timing, batch = self._slices, self.timing, self.batch
        state = slices.begin(timing, batch.tokens, batch.positions + batch.dropped)
        last = self._core.layout.layers - 1
        for layer in range(last):
            state = slices.advance(timing, layer, state, self._attend(layer, state))
        sampling = [sequence.sampling_row() for sequence in batch.sequences]
        return slices.end(timing, state, self._attend(last, state), sampling)

    def _attend(self, layer: int, state: State) -> Tensor:
        """[B, H, D] float32: other holders are asked first, and answer while the local part is computed."""
        batch, model = self.batch, self._core.model
        step = self._remote_step
        queries = Queries(plain=state.q)
        if self._head_rotation is not None:
            queries = Queries(plain=state.q, shifted=model.shifted_query(state, self._head_rotation))
        if batch.plain:
            self._write(layer, state)
            return self._attend_here(layer, state.q).out
        new = NewRows(layer, queries, state.k, state.v)
        asked = self._remote.ask(step, new)
        try:
            if step.asks is None:
                self._write(layer, state)
            here = None
            if len(batch.part_rows):
                whole = batch.part_groups[0].whole and not len(batch.part_heads)
                q = state.q if whole else queries.of(batch.part_rows, batch.part_heads)
                here = self._attend_here(layer, q, step.here)
            return self._remote.collect(step, asked, new, here).out
        except BaseException:
            self._remote.cancel(asked)
            raise

    def _attend_here(self, layer: int, q: Tensor, into: Partial | None = None) -> Partial:
        """q [parts, H, D]; `into` as BatchPlan has it."""
        core, began_s = self._core, time.monotonic()
        plan = self._plan(core.model.window(layer))
        partial = plan.attend(q, core.memory.layer(layer), core.model.scale, into)
        self.timing.here_s += time.monotonic() - began_s
        return partial

    def _observe(self) -> None:
        """What a small read takes says little of how quick reading is."""
        layout = self._core.layout
        read_bytes = self.batch.kept_tokens * layout.layers * layout.object_bytes // layout.block_tokens
        if read_bytes >= _READ_BYTES:
            self._rates.attended_here(read_bytes, self.timing.here_s)

    def _write(self, layer: int, state: State) -> None:
        """K and V of rows whose tail lies here."""
        appending = self.batch.append_rows
        if self._all_append:
            self._core.memory.write_rows(layer, self._rows, torch.cat((state.k, state.v), dim=1))
        elif len(appending):
            kv = torch.cat((state.k[appending], state.v[appending]), dim=1)
            self._core.memory.write_rows(layer, self._rows, kv)

    def _plan(self, window: int | None) -> BatchPlan:
        if window not in self._plans:
            batch = self.batch
            self._plans[window] = BatchPlan(
                self._core.memory.layer(0).shape,
                batch.tables,
                batch.lengths,
                first_key_positions=batch.first_keys,
                query_positions=batch.positions[batch.part_rows],
                window=window,
            )
        return self._plans[window]
