"""Partials over segments on other holders: asked for before the local ones are computed, merged after.

What a holder cannot answer for is lost for this iteration and the sequence with it; the others of the batch
go on.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES
from kvcommons.attention.partial import Partial
from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.client import AttendPart, PendingPartial, attend_request
from kvcommons.pb import data_pb2
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline
from services.decode.batch import Batch, Group, HolderShare, Queries, RemoteSegment
from services.decode.placement.auto import Rates
from services.decode.spent import Spent

log = logging.getLogger(__name__)

_WAITED_S = 50e-6


@dataclass(slots=True)
class _Asked:
    share: HolderShare
    call: PendingPartial
    read_bytes: int  # of KV, by the holder
    began_s: float


@dataclass(frozen=True)
class NewRows:
    """What a layer sends to holders: queries, and the new tokens' K and V, [B, kv_heads, D] each."""

    layer: int
    q: Queries
    k: Tensor
    v: Tensor
    dtype: torch.dtype  # of KV

    @cached_property
    def whole_q(self) -> Tensor:
        """Of all rows, in float32."""
        return self.q.plain.float().contiguous()

    @cached_property
    def kv(self) -> Tensor:
        """[B, 2, kv_heads, 1, D] in the KV dtype: for holders that append."""
        return torch.stack((self.k, self.v), dim=1).unsqueeze(3).to(self.dtype)


@dataclass(frozen=True, slots=True)
class _Wording:
    """Of what a holder is asked for: the same for all layers."""

    share: HolderShare
    request: data_pb2.AttendLayer
    read_bytes: int


@dataclass(slots=True)
class RemoteStep:
    """One iteration's dealings with other holders. `lost` has, by row, why a row's attention is
    incomplete."""

    batch: Batch
    deadline: Deadline
    spent: Spent
    lost: dict[int, KVCommonsError] = field(default_factory=dict)
    wordings: dict[int, _Wording] = field(default_factory=dict)  # by the share's id

    def live(self, share: HolderShare) -> HolderShare | None:
        """The share without rows that are lost; None when nothing is left."""
        if not self.lost:
            return share
        left = [segment for segment in share.segments if segment.row not in self.lost]
        return self.batch.share(share.holder, left) if left else None


class RemoteAttention:
    """The engine's dealings with other holders."""

    def __init__(self, layout: Layout, device: torch.device, rates: Rates, budget: AttentionBudget) -> None:
        """`rates` is told what was measured, `budget` when this process has nothing to do but wait."""
        self._budget = budget
        self._device = device
        self._dtype = TORCH_DTYPES[layout.kv_dtype]
        self._token_bytes = layout.object_bytes // layout.block_tokens
        self._rates = rates

    def rows(self, layer: int, q: Queries, k: Tensor, v: Tensor) -> NewRows:
        """k, v [B, kv_heads, D]."""
        return NewRows(layer, q, k, v, self._dtype)

    def ask(self, step: RemoteStep, new: NewRows) -> list[_Asked]:
        """Sends each holder its part."""
        asked, began_s = [], time.monotonic()
        for whole in step.batch.shares:
            share = step.live(whole)
            if share is None:
                continue
            try:
                asked.append(self._send(step, share, new))
            except KVCommonsError as error:
                self._lose(step, share.segments, error)
        step.spent.network_s += time.monotonic() - began_s
        return asked

    def collect(
        self, step: RemoteStep, asked: list[_Asked], new: NewRows
    ) -> list[tuple[list[Group], Partial]]:
        """The holders' partials, as contributions for Batch.gather."""
        partials: list[tuple[list[Group], Partial]] = []
        began_s, slowest = time.monotonic(), data_pb2.AttendLayerReply()
        for item in asked:
            try:
                partial, told = self._receive(item)
                partials.append((item.share.groups, partial))
                slowest = max(slowest, told, key=lambda one: one.computed_us)
            except (Unavailable, DeadlineExceeded) as error:
                self._lose(step, item.share.segments, error)
            except KVCommonsError as error:
                if len(item.share.segments) == 1:
                    self._lose(step, item.share.segments, error)
                else:
                    partials += self._one_by_one(step, item.share, new)
        step.spent.waited(
            time.monotonic() - began_s,
            computed_s=slowest.computed_us / 1e6,
            queued_s=slowest.queued_us / 1e6,
        )
        return partials

    def _one_by_one(
        self, step: RemoteStep, share: HolderShare, new: NewRows
    ) -> list[tuple[list[Group], Partial]]:
        """The holder is well but refuses something: only the sequences whose segment is at fault are lost.

        Asking again is safe: an appended token is written to the same place.
        """
        partials = []
        for segment in share.segments:
            single = step.batch.share(share.holder, [segment])
            try:
                again = self._send(step, single, new)
                partials.append((single.groups, self._receive(again)[0]))
            except KVCommonsError as error:
                self._lose(step, [segment], error)
        return partials

    def _send(self, step: RemoteStep, share: HolderShare, new: NewRows) -> _Asked:
        began_s = time.monotonic()
        if share.span is not None:
            queries, appended = new.whole_q[share.span], [new.kv[share.span]]
        else:
            whole = share.groups[0].whole and not len(share.heads)
            queries = new.whole_q if whole else new.q.of(share.rows, share.heads)
            appended = [new.kv.index_select(0, share.append_rows)] if len(share.append_rows) else []
        wording = step.wordings.get(id(share))
        if wording is None:
            parts = [self._describe(step.batch, segment) for segment in share.segments]
            read_bytes = sum(part.length for part in parts) * self._token_bytes
            wording = _Wording(share, attend_request(parts), read_bytes)
            step.wordings[id(share)] = wording
        return _Asked(
            share=share,
            call=share.holder.begin_attend(new.layer, wording.request, queries, appended, step.deadline),
            read_bytes=wording.read_bytes,
            began_s=began_s,
        )

    def _describe(self, batch: Batch, segment: RemoteSegment) -> AttendPart:
        sequence, run, size = batch.sequences[segment.row], segment.run, batch.block_tokens
        length = len(sequence.tokens) - run.first_block * size if segment.tail else run.count * size
        return AttendPart(
            ref=run.ref,
            rows=1,
            first_position=sequence.kv_tokens,
            append=segment.tail,
            length=length,
            first_block=run.segment_block,
        )

    def _receive(self, asked: _Asked) -> tuple[Partial, data_pb2.AttendLayerReply]:
        waits_s = time.monotonic()
        try:
            with self._budget.waiting():
                partial, told = asked.call.finish_told()
        except DeadlineExceeded:
            asked.share.holder.waited(time.monotonic() - waits_s, False)
            raise
        now_s = time.monotonic()
        asked.share.holder.waited(now_s - waits_s, True)
        # An answer that was there before it was asked for took nobody knows how long.
        if now_s - waits_s > _WAITED_S:
            self._rates.attended_there(asked.read_bytes, now_s - asked.began_s)
        return Partial(out=partial.out.to(self._device), lse=partial.lse.to(self._device)), told

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
