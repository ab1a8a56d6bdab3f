"""Partials over segments on other holders: asked for before the local ones are computed, merged after.

What a holder cannot answer for is lost for this iteration and the sequence with it; the others of the batch
go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES
from kvcommons.attention.partial import Partial
from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.client import AttendPart, attend_request
from kvcommons.holder.creditor import Creditor, PendingAttention
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline
from services.decode.batch import Batch, Group, HolderShare, Queries, RemoteSegment
from services.decode.mini_batches import Exchange, MiniBatches
from services.decode.placement.auto import Rates
from services.decode.spent import Spent

log = logging.getLogger(__name__)

_WAITED_S = 50e-6
_NOTHING = Exchange(rows=0, asked_bytes=0, answered_bytes=0, read_bytes=0)


@dataclass(frozen=True, slots=True)
class NewRows:
    """What a layer sends to holders: queries, and the new tokens' K and V, [B, kv_heads, D] each."""

    layer: int
    q: Queries
    k: Tensor
    v: Tensor


class _Message:
    """To one holder, layer by layer of an iteration: the same request, and memory for what changes."""

    def __init__(self, batch: Batch, share: HolderShare, layout: Layout) -> None:
        self.share = share
        parts = [_describe(batch, segment) for segment in share.segments]
        self.request = attend_request(parts)
        self.queries = torch.empty((len(share.rows), layout.query_heads, layout.head_dim))
        shape = (len(share.append_rows), 2, layout.kv_heads, 1, layout.head_dim)
        new = torch.empty(shape, dtype=TORCH_DTYPES[layout.kv_dtype])
        self.appended = [new] if len(share.append_rows) else []
        self._k, self._v = new[:, 0, :, 0], new[:, 1, :, 0]
        self._whole = share.groups[0].whole and not len(share.heads)
        self.exchange = Exchange(
            rows=len(share.rows),
            asked_bytes=self.queries.nbytes + new.nbytes,
            answered_bytes=self.queries.nbytes + self.queries.nbytes // layout.head_dim,
            read_bytes=sum(part.length for part in parts) * layout.object_bytes // layout.block_tokens,
        )

    def fill(self, new: NewRows) -> None:
        share = self.share
        if share.span is not None:
            self.queries.copy_(new.q.plain[share.span])
            self._k.copy_(new.k[share.span])
            self._v.copy_(new.v[share.span])
            return
        self.queries.copy_(new.q.plain if self._whole else new.q.of(share.rows, share.heads))
        if self.appended:
            self._k.copy_(new.k.index_select(0, share.append_rows))
            self._v.copy_(new.v.index_select(0, share.append_rows))


@dataclass(slots=True)
class _Asked:
    message: _Message
    call: PendingAttention
    began_s: float
    alone: bool  # nothing else is asked of this holder in this layer


@dataclass(slots=True)
class _Told:
    """By one holder in a layer, all of its mini-batches together."""

    waited_s: float = 0.0
    answered: bool = True
    computed_s: float = 0.0
    queued_s: float = 0.0
    read_bytes: int = 0
    began_s: float = 0.0  # to ask for the first
    last_s: float | None = None  # when the last answer came; None: before it was waited for


@dataclass(slots=True)
class RemoteStep:
    """One iteration's dealings with other holders. `lost` has, by row, why a row's attention is
    incomplete."""

    batch: Batch
    deadline: Deadline
    spent: Spent
    messages: list[_Message]
    largest: Exchange  # of a holder's, all of its messages together
    lost: dict[int, KVCommonsError] = field(default_factory=dict)


class RemoteAttention:
    """The engine's dealings with other holders."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        rates: Rates,
        budget: AttentionBudget,
        mini_batches: int = 0,
    ) -> None:
        """`rates` is told what was measured, `budget` when this process has nothing to do but wait. A holder
        is sent its share of a batch in so many `mini_batches`; 0: in as many as pays by what was measured."""
        self._budget = budget
        self._device = device
        self._layout = layout
        self._mini_batches = MiniBatches(mini_batches)
        self._rates = rates

    def begin(self, batch: Batch, deadline: Deadline, spent: Spent) -> RemoteStep:
        """An iteration of the batch."""
        messages = [_Message(batch, share, self._layout) for share in batch.shares]
        largest = _largest(messages)
        if messages:
            number = self._mini_batches.decide(largest, busy=len(batch.part_rows) > 0)
            if number != batch.mini_batches:
                batch.divide(number)
                messages = [_Message(batch, share, self._layout) for share in batch.shares]
        return RemoteStep(batch, deadline, spent, messages, largest)

    def ask(self, step: RemoteStep, new: NewRows) -> list[_Asked]:
        """Sends each holder its part."""
        asked: list[_Asked] = []
        alone = step.batch.mini_batches == 1
        began_s = time.monotonic()
        if step.lost:
            step.messages = self._without_lost(step)
        for message in step.messages:
            try:
                asked.append(self._send(step, message, new, alone=alone))
            except KVCommonsError as error:
                self._lose(step, message.share.segments, error)
            except BaseException:
                self.cancel(asked)
                raise
        step.spent.network_s += time.monotonic() - began_s
        return asked

    def cancel(self, asked: Iterable[_Asked]) -> None:
        """Instead of `collect`, or where that raised."""
        for item in asked:
            item.call.cancel()

    def collect(
        self, step: RemoteStep, asked: list[_Asked], new: NewRows
    ) -> list[tuple[list[Group], Partial]]:
        """The holders' partials, as contributions for Batch.gather."""
        partials: list[tuple[list[Group], Partial]] = []
        told: dict[Creditor, _Told] = {}
        began_s = time.monotonic()
        with self._budget.waiting():
            for item in asked:
                share = item.message.share
                try:
                    partials.append((share.groups, self._receive(item, told)))
                except (Unavailable, DeadlineExceeded) as error:
                    self._lose(step, share.segments, error)
                except KVCommonsError as error:
                    if len(share.segments) == 1:
                        self._lose(step, share.segments, error)
                    else:
                        partials += self._one_by_one(step, share, new, told)
        now_s = time.monotonic()
        waited = now_s - began_s > _WAITED_S and not len(step.batch.part_rows)
        if asked and waited and not step.lost:
            self._mini_batches.took(step.largest, step.batch.mini_batches, now_s - asked[0].began_s)
        for holder, one in told.items():
            holder.waited(one.waited_s, one.answered)
            if one.last_s is not None and not step.lost:
                self._rates.attended_there(one.read_bytes, one.last_s - one.began_s)
        slowest = max(told.values(), key=_computed_s, default=_Told())
        step.spent.waited(now_s - began_s, computed_s=slowest.computed_s, queued_s=slowest.queued_s)
        return partials

    def _one_by_one(
        self, step: RemoteStep, share: HolderShare, new: NewRows, told: dict[Creditor, _Told]
    ) -> list[tuple[list[Group], Partial]]:
        """The holder is well but refuses something: only the sequences whose segment is at fault are lost.

        Asking again is safe: an appended token is written to the same place.
        """
        partials = []
        for segment in share.segments:
            single = step.batch.share(share.holder, [segment])
            try:
                message = _Message(step.batch, single, self._layout)
                again = self._send(step, message, new, alone=False)
                partials.append((single.groups, self._receive(again, told)))
            except KVCommonsError as error:
                self._lose(step, [segment], error)
        return partials

    def _without_lost(self, step: RemoteStep) -> list[_Message]:
        """What is left to ask for, where rows were lost in a layer before."""
        left = []
        for message in step.messages:
            share = message.share
            segments = [segment for segment in share.segments if segment.row not in step.lost]
            if len(segments) == len(share.segments):
                left.append(message)
            elif segments:
                left.append(_Message(step.batch, step.batch.share(share.holder, segments), self._layout))
        return left

    def _send(self, step: RemoteStep, message: _Message, new: NewRows, *, alone: bool) -> _Asked:
        began_s = time.monotonic()
        message.fill(new)
        call = message.share.holder.begin_attend(
            new.layer, message.request, message.queries, message.appended, step.deadline
        )
        return _Asked(message, call, began_s, alone)

    def _receive(self, asked: _Asked, told: dict[Creditor, _Told]) -> Partial:
        holder, exchange = asked.message.share.holder, asked.message.exchange
        waits_s = time.monotonic()
        try:
            partial, reply = asked.call.finish_told()
        except DeadlineExceeded:
            known = told.setdefault(holder, _Told())
            known.waited_s += time.monotonic() - waits_s
            known.answered = False
            raise
        now_s = time.monotonic()
        known = told.setdefault(holder, _Told())
        known.waited_s += now_s - waits_s
        computed_s, queued_s = reply.computed_us / 1e6, reply.queued_us / 1e6
        if not known.computed_s:  # those behind it have queued for it
            known.queued_s = queued_s
        known.computed_s += computed_s
        known.began_s = known.began_s or asked.began_s
        known.read_bytes += exchange.read_bytes
        # An answer that was there before it was waited for took nobody knows how long.
        waited = now_s - waits_s > _WAITED_S
        known.last_s = now_s if waited else None
        if waited and asked.alone:  # one of several took some of the others' time, too
            network_s = max(now_s - asked.began_s - computed_s - queued_s, 0.0)
            self._mini_batches.observe(exchange, network_s=network_s, computed_s=computed_s)
        if self._device.type != "cpu":
            partial = Partial(out=partial.out.to(self._device), lse=partial.lse.to(self._device))
        return partial

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


def _describe(batch: Batch, segment: RemoteSegment) -> AttendPart:
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


def _largest(messages: Iterable[_Message]) -> Exchange:
    """Of all holders', each with all of its mini-batches."""
    whole: dict[Creditor, Exchange] = {}
    for message in messages:
        holder = message.share.holder
        whole[holder] = message.exchange.beside(whole.get(holder))
    return max(whole.values(), key=lambda exchange: exchange.read_bytes, default=_NOTHING)


def _computed_s(told: _Told) -> float:
    return told.computed_s
