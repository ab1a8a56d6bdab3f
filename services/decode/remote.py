"""Partials over segments on other holders: asked for before the local ones are computed, merged after.

What a holder cannot answer for is lost for this iteration and the sequence with it; the others of the batch
go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES
from kvcommons.attention.partial import Partial
from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.client import AttendPart, PendingPartial
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline
from services.decode.batch import Batch, Group, HolderShare, Queries, RemoteSegment
from services.decode.placement.auto import Rates

log = logging.getLogger(__name__)

_WAITED_S = 50e-6


@dataclass(slots=True)
class _Asked:
    share: HolderShare
    call: PendingPartial
    read_bytes: int  # of KV, by the holder
    began_s: float


@dataclass(slots=True)
class RemoteStep:
    """One iteration's dealings with other holders. `lost` has, by row, why a row's attention is
    incomplete."""

    batch: Batch
    deadline: Deadline
    lost: dict[int, KVCommonsError] = field(default_factory=dict)

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

    def ask(self, step: RemoteStep, layer: int, q: Queries, k: Tensor, v: Tensor) -> list[_Asked]:
        """Sends each holder its part: k, v [B, kv_heads, D] of the batch's new tokens."""
        asked = []
        for whole in step.batch.shares:
            share = step.live(whole)
            if share is None:
                continue
            try:
                asked.append(self._send(step, share, layer, q, k, v))
            except KVCommonsError as error:
                self._lose(step, share.segments, error)
        return asked

    def collect(
        self, step: RemoteStep, layer: int, asked: list[_Asked], q: Queries, k: Tensor, v: Tensor
    ) -> list[tuple[list[Group], Partial]]:
        """The holders' partials, as contributions for Batch.gather."""
        partials: list[tuple[list[Group], Partial]] = []
        for item in asked:
            try:
                partials.append((item.share.groups, self._receive(item)))
            except (Unavailable, DeadlineExceeded) as error:
                self._lose(step, item.share.segments, error)
            except KVCommonsError as error:
                if len(item.share.segments) == 1:
                    self._lose(step, item.share.segments, error)
                else:
                    partials += self._one_by_one(step, item.share, layer, q, k, v)
        return partials

    def _one_by_one(
        self, step: RemoteStep, share: HolderShare, layer: int, q: Queries, k: Tensor, v: Tensor
    ) -> list[tuple[list[Group], Partial]]:
        """The holder is well but refuses something: only the sequences whose segment is at fault are lost.

        Asking again is safe: an appended token is written to the same place.
        """
        partials = []
        for segment in share.segments:
            single = step.batch.share(share.holder, [segment])
            try:
                again = self._send(step, single, layer, q, k, v)
                partials.append((single.groups, self._receive(again)))
            except KVCommonsError as error:
                self._lose(step, [segment], error)
        return partials

    def _send(
        self, step: RemoteStep, share: HolderShare, layer: int, q: Queries, k: Tensor, v: Tensor
    ) -> _Asked:
        began_s = time.monotonic()
        appended: Sequence[Tensor] = ()
        if len(share.append_rows):
            # [segments, 2, kv_heads, 1, D]: one new token each.
            pairs = torch.stack((k[share.append_rows], v[share.append_rows]), dim=1).unsqueeze(3)
            appended = pairs.to(self._dtype).unbind(0)
        parts = [self._describe(step.batch, segment) for segment in share.segments]
        queries = q.of(share.rows, share.heads)
        return _Asked(
            share=share,
            call=share.holder.begin_attend(layer, parts, queries, appended, step.deadline),
            read_bytes=sum(part.length for part in parts) * self._token_bytes,
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

    def _receive(self, asked: _Asked) -> Partial:
        waits_s = time.monotonic()
        with self._budget.waiting():
            partial = asked.call.finish()
        now_s = time.monotonic()
        # An answer that was there before it was asked for took nobody knows how long.
        if now_s - waits_s > _WAITED_S:
            self._rates.attended_there(asked.read_bytes, now_s - asked.began_s)
        return Partial(out=partial.out.to(self._device), lse=partial.lse.to(self._device))

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
