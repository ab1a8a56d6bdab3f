"""What a batch's holders attend over, as plans: made once for many iterations of the same batch, for from one
to the next each sequence has a token more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.backend.interface import Backend, Partial
from kvcommons.backend.memory import TORCH_DTYPES
from kvcommons.engine.batch import Batch, HolderShare, Queries, RemoteSegment
from kvcommons.engine.remote.division import ExchangeSize
from kvcommons.holder.exchange import LayerExchange, PartialSource, Share
from kvcommons.holder.head_group import Creditor
from kvcommons.holder.plan import PlanRow
from kvcommons.rblock.layout import Layout

NOTHING = ExchangeSize(rows=0, asked_bytes=0, answered_bytes=0, read_bytes=0)


@dataclass(slots=True)
class NewRows:
    """What a layer sends to holders: queries, and the new tokens' K and V, [B, kv_heads, D] each."""

    layer: int
    q: Queries
    k: Tensor
    v: Tensor


class SharePlan:
    """A holder's share of a batch, or a part of it."""

    def __init__(self, batch: Batch, share: HolderShare, layout: Layout) -> None:
        self.share = share
        self.rows = [_row(batch, segment) for segment in share.segments]  # as of the batch's step now
        self._layout = layout
        self._tokens = sum(row.length for row in self.rows)
        size = TORCH_DTYPES[layout.kv_dtype].itemsize
        queries = len(share.rows) * layout.query_heads * layout.head_dim * 4
        self._asked_bytes = queries + 2 * len(share.append_rows) * layout.kv_heads * layout.head_dim * size
        self._answered_bytes = queries + queries // layout.head_dim

    def exchange(self, step: int) -> ExchangeSize:
        """In a layer, so many steps on."""
        layout, tokens = self._layout, self._tokens + step * len(self.share.append_rows)
        return ExchangeSize(
            rows=len(self.rows),
            asked_bytes=self._asked_bytes,
            answered_bytes=self._answered_bytes,
            read_bytes=tokens * layout.object_bytes // layout.block_tokens,
        )


class BatchPlans:
    """All of a batch's, for one division of it into shares."""

    def __init__(self, batch: Batch, layout: Layout, backend: Backend) -> None:
        self.shares = [SharePlan(batch, share, layout) for share in batch.shares]
        self.here: Partial | None = None  # memory for this instance's own parts, where they are put together
        self._layout = layout
        self._divided = batch.shares
        self._made_at = batch.steps
        self._backend = backend
        self._exchange: LayerExchange | None = None

    def fit(self, batch: Batch) -> bool:
        """Whether they are of its division."""
        return self._divided is batch.shares

    def step(self, batch: Batch) -> int:
        """Steps that the batch has made since."""
        return batch.steps - self._made_at

    def largest(self, step: int) -> ExchangeSize:
        """Of all holders', each with all of its messages."""
        whole: dict[Creditor, ExchangeSize] = {}
        for plan in self.shares:
            holder = plan.share.holder
            whole[holder] = plan.exchange(step).beside(whole.get(holder))
        return max(whole.values(), key=lambda one: one.read_bytes, default=NOTHING)

    def exchange(self, batch: Batch) -> LayerExchange:
        """Made when it is first wanted: a batch may be divided anew before that."""
        if self._exchange is None:
            self._exchange = self._make(batch)
        return self._exchange

    def _make(self, batch: Batch) -> LayerExchange:
        layout, rows = self._layout, len(batch.sequences)
        whole = _empty_partial(rows, layout)
        recipients = [plan.share.holder.recipients(plan.rows) for plan in self.shares]
        sources: list[PartialSource] = []
        if batch.apart and not len(batch.part_rows) and all(plan.share.span for plan in self.shares):
            # Answers lie side by side: they are received where they belong.
            spans = [plan.share.span or slice(0) for plan in self.shares]
            answers = [Partial(out=whole.out[span], lse=whole.lse[span]) for span in spans]
        else:
            answers = [_empty_partial(len(plan.rows), layout) for plan in self.shares]
            if len(batch.part_rows):
                self.here = _empty_partial(len(batch.part_rows), layout)
                sources += [
                    PartialSource(partial=self.here, index=group.index, rows=group.rows)
                    for group in batch.part_groups
                ]
            sources += [
                PartialSource(partial=answer, index=group.index, rows=group.rows)
                for plan, answer in zip(self.shares, answers, strict=True)
                for group in plan.share.groups
            ]
        shares = [
            Share(
                rows=plan.share.rows.tolist(),
                shifted=plan.share.heads.tolist(),
                appended=plan.share.append_rows.tolist(),
                answer=answer,
            )
            for plan, answer in zip(self.shares, answers, strict=True)
        ]
        made = LayerExchange(
            layout, list(zip(shares, recipients, strict=True)), sources, whole, backend=self._backend
        )
        if not made.native:
            self.here = None
        return made


def _empty_partial(rows: int, layout: Layout) -> Partial:
    return Partial(
        out=torch.empty((rows, layout.query_heads, layout.head_dim)),
        lse=torch.empty((rows, layout.query_heads)),
    )


def _row(batch: Batch, segment: RemoteSegment) -> PlanRow:
    sequence, run, size = batch.sequences[segment.row], segment.run, batch.block_tokens
    length = len(sequence.tokens) - run.first_block * size if segment.tail else run.count * size
    return PlanRow.of(
        run.ref,
        position=sequence.computed,
        length=length,
        append=segment.tail,
        first_block=run.segment_block,
    )
