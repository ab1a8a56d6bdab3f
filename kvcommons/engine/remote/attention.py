"""Partials over segments on other holders: asked for before the local ones are computed, merged after.

What a holder cannot answer for is lost for this iteration and the sequence with it; the others of the batch
go on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcommons.backend.interface import Backend, Partial
from kvcommons.backend.memory import BlockMemory
from kvcommons.engine.batch import Batch, Group, RemoteSegment
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.remote.division import ShareDivision, Undivided
from kvcommons.engine.remote.plans import BatchPlans, NewRows
from kvcommons.engine.remote.timing import RemoteTiming
from kvcommons.errors import DataLoss, KVCommonsError
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.exchange import LayerExchange, NewKV
from kvcommons.rblock.layout import Layout

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RemoteStep:
    """One iteration's dealings with other holders. `lost` has, by row, why a row's attention is
    incomplete."""

    batch: Batch
    timing: IterationTiming
    plans: BatchPlans
    own: tuple[BlockMemory, Tensor] | None
    exchange: LayerExchange | None = None  # None: nobody has to be asked
    here: Partial | None = None  # where this instance's own partials go, if it matters
    lost: dict[int, KVCommonsError] = field(default_factory=dict)


class RemoteAttention:
    """The engine's dealings with other holders."""

    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        budget: AttentionBudget,
        division: ShareDivision | None = None,
    ) -> None:
        """`budget` takes when this process has nothing to do but wait. `division` says in how many
        messages a holder is sent its share of a batch; None: in one."""
        self._budget = budget
        self._backend = backend
        self._layout = layout
        self._division = division or Undivided()
        self._timing = RemoteTiming(self._division)

    def begin(
        self,
        batch: Batch,
        deadline_s: float,
        timing: IterationTiming,
        own: tuple[BlockMemory, Tensor] | None = None,
    ) -> RemoteStep:
        """An iteration of the batch, whose layers may wait so long each. `own`: where K and V of rows go
        whose newest tokens lie here (BlockMemory.rows_of). Holders hear of what has changed at once, and look
        it up while the first slice is computed. `end` follows."""
        plans = self._plans(batch)
        if plans.shares:
            largest = plans.largest(plans.step(batch))
            number = self._division.decide(largest, busy=len(batch.part_rows) > 0)
            if number != batch.messages:
                batch.divide(number)
                plans = self._plans(batch)
        step = RemoteStep(batch, timing, plans, own)
        if plans.shares:
            step.exchange = plans.exchange(batch)
            step.here = plans.here
            new = None if own is None else NewKV(memory=own[0], places=own[1], rows=batch.on_device.appending)
            step.exchange.begin(plans.step(batch), deadline_s, new)
            self._lose_failed(step, step.exchange)
        return step

    def ask(self, step: RemoteStep, new: NewRows) -> None:
        """Sends each holder its part, and writes K and V that belong here."""
        if step.exchange is not None:
            step.exchange.ask(new.layer, new.q.plain, new.k, new.v, new.q.shifted)
        elif step.own is not None and len(step.batch.append_rows):
            memory, places = step.own
            rows = torch.cat((new.k, new.v), dim=1)[step.batch.on_device.appending]
            memory.write_rows(new.layer, places, rows)

    def collect(self, step: RemoteStep, new: NewRows, here: Partial | None = None) -> Partial:
        """The layer's attention [B, H, D]: the holders' partials, merged with this instance's own, of
        `batch.part_groups`."""
        exchange = step.exchange
        if exchange is not None:
            with self._budget.waiting():
                exchange.receive()
            self._lose_failed(step, exchange)
            if exchange.native:
                return exchange.whole
        own = [] if here is None else [(step.batch.part_groups, here)]
        return step.batch.gather(own + self._answers(step), new.q.plain)

    def settle(self, step: RemoteStep) -> None:
        """Tells what was measured since this was last asked for."""
        if step.exchange is None:
            return
        at = step.plans.step(step.batch)
        shares = [(plan.share.holder, plan.exchange(at)) for plan in step.plans.shares]
        largest = step.plans.largest(at)
        for layer in step.exchange.take_timings():
            self._timing.layer(
                step.timing,
                layer,
                shares,
                largest=largest,
                messages=step.batch.messages,
                lost=bool(step.lost),
                busy=len(step.batch.part_rows) > 0,
            )

    def end(self, step: RemoteStep) -> None:
        """Of the iteration, whether it went well or not."""
        if step.exchange is None:
            return
        try:
            for share, rows in step.exchange.lost().items():
                segments = step.plans.shares[share].share.segments
                for index, error in rows.items():
                    self._lose(step, [segments[index]], error)
            self._lose_failed(step, step.exchange)
            self.settle(step)
        finally:
            step.exchange.end()

    def _plans(self, batch: Batch) -> BatchPlans:
        if batch.plans is None or not batch.plans.fit(batch):
            batch.plans = BatchPlans(batch, self._layout, self._backend)
        return batch.plans

    def _answers(self, step: RemoteStep) -> list[tuple[list[Group], Partial]]:
        """Of shares that have not failed, in Python."""
        if step.exchange is None:
            return []
        upload = self._backend.device.upload
        return [
            (plan.share.groups, Partial(out=upload(answer.out), lse=upload(answer.lse)))
            for number, (plan, answer) in enumerate(
                zip(step.plans.shares, step.exchange.answers, strict=True)
            )
            if number not in step.exchange.failures
        ]

    def _lose_failed(self, step: RemoteStep, exchange: LayerExchange) -> None:
        for share, error in exchange.failures.items():
            segments = step.plans.shares[share].share.segments
            left = [segment for segment in segments if segment.row not in step.lost]
            if left:
                self._lose(step, left, error)

    def _lose(self, step: RemoteStep, segments: list[RemoteSegment], error: KVCommonsError) -> None:
        for segment in segments:
            step.lost[segment.row] = DataLoss(
                f"the sequence's KV on the holder at {segment.run.holder.data_address} is lost "
                f"({error.message}): compute it again from its tokens"
            )
        log.warning(
            "a holder failed its sequences",
            extra={
                "holder": segments[0].run.holder.data_address,
                "segments": len(segments),
                "reason": error.message,
            },
        )
