"""What a batch's holders are sent in a layer, made once for many iterations of the same batch: from one to
the next each sequence has a token more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES, BlockMemory
from kvcommons.attention.partial import Partial
from kvcommons.engine.batch import Batch, HolderShare, Queries, RemoteSegment
from kvcommons.engine.remote.mini_batches import Exchange
from kvcommons.errors import KVCommonsError
from kvcommons.holder import ask, asking
from kvcommons.holder.attend_call import AttendPart, attend_request
from kvcommons.holder.creditor import Creditor
from kvcommons.pb import data_pb2
from kvcommons.rblock.layout import Layout

NOTHING = Exchange(rows=0, asked_bytes=0, answered_bytes=0, read_bytes=0)


@dataclass(slots=True)
class NewRows:
    """What a layer sends to holders: queries, and the new tokens' K and V, [B, kv_heads, D] each."""

    layer: int
    q: Queries
    k: Tensor
    v: Tensor


class Message:
    """To one holder, layer by layer: the same request, and memory for what changes."""

    def __init__(self, batch: Batch, share: HolderShare, layout: Layout) -> None:
        self.share = share
        self._layout = layout
        parts = [_describe(batch, segment) for segment in share.segments]
        self.request = attend_request(parts)
        self._tokens = sum(part.length for part in parts)
        rows, appended = len(share.rows), len(share.append_rows)
        self._queries: Tensor | None = None
        self._new: Tensor | None = None
        self._whole = share.groups[0].whole and not len(share.heads)
        size = TORCH_DTYPES[layout.kv_dtype].itemsize
        queries = rows * layout.query_heads * layout.head_dim * 4
        self._exchange = Exchange(
            rows=rows,
            asked_bytes=queries + 2 * appended * layout.kv_heads * layout.head_dim * size,
            answered_bytes=queries + queries // layout.head_dim,
            read_bytes=0,
        )
        self.exchange = self._exchange
        self._read()

    def advance(self, tokens: int) -> None:
        """To a later iteration. The request is another one: who was given the last one may have it still."""
        request = data_pb2.AttendLayer()
        request.CopyFrom(self.request)
        for segment in request.segments:
            segment.first_position += tokens
            if segment.append:
                segment.length += tokens
        self.request = request
        self._tokens += tokens * len(self.share.append_rows)
        self._read()

    def fill(self, new: NewRows) -> tuple[Tensor, list[Tensor]]:
        """The layer's queries, and K and V: what begin_attend takes."""
        share, layout = self.share, self._layout
        if self._queries is None or self._new is None:
            self._queries = torch.empty((len(share.rows), layout.query_heads, layout.head_dim))
            shape = (len(share.append_rows), 2, layout.kv_heads, 1, layout.head_dim)
            self._new = torch.empty(shape, dtype=TORCH_DTYPES[layout.kv_dtype])
        k, v = self._new[:, 0, :, 0], self._new[:, 1, :, 0]
        if share.span is not None:
            self._queries.copy_(new.q.plain[share.span])
            k.copy_(new.k[share.span])
            v.copy_(new.v[share.span])
            return self._queries, [self._new]
        self._queries.copy_(new.q.plain if self._whole else new.q.of(share.rows, share.heads))
        if not len(share.append_rows):
            return self._queries, []
        k.copy_(new.k.index_select(0, share.append_rows))
        v.copy_(new.v.index_select(0, share.append_rows))
        return self._queries, [self._new]

    def native(self, recipients: Sequence[ask.Recipient], answer: Partial) -> ask.Message:
        """As asking.py has it."""
        share = self.share
        return ask.Message(
            recipients=recipients,
            rows=share.rows.tolist(),
            shifted=share.heads.tolist(),
            appended=share.append_rows.tolist(),
            answer=answer,
        )

    def _read(self) -> None:
        layout, made = self._layout, self._exchange
        self.exchange = Exchange(
            rows=made.rows,
            asked_bytes=made.asked_bytes,
            answered_bytes=made.answered_bytes,
            read_bytes=self._tokens * layout.object_bytes // layout.block_tokens,
        )


class Messages:
    """All of a batch's, for one division of it into shares."""

    def __init__(self, batch: Batch, layout: Layout) -> None:
        self.all = [Message(batch, share, layout) for share in batch.shares]
        self.here: Partial | None = None  # memory for this instance's own parts
        self.able = True  # to be sent without the interpreter, as far as is known
        self._native: asking.Asks | None = None
        self._layout = layout
        self._shares = batch.shares
        self._steps = batch.steps

    def fit(self, batch: Batch) -> bool:
        """Whether they are of its division."""
        return self._shares is batch.shares

    def largest(self) -> Exchange:
        """Of all holders', each with all of its mini-batches."""
        whole: dict[Creditor, Exchange] = {}
        for message in self.all:
            holder = message.share.holder
            whole[holder] = message.exchange.beside(whole.get(holder))
        return max(whole.values(), key=lambda exchange: exchange.read_bytes, default=NOTHING)

    def advance(self, batch: Batch) -> None:
        """To the batch's iteration."""
        steps, self._steps = batch.steps - self._steps, batch.steps
        if steps:
            for message in self.all:
                message.advance(steps)

    def asks_for(
        self, batch: Batch, deadline_s: float, own: tuple[BlockMemory, Tensor, Tensor] | None
    ) -> asking.Asks | None:
        """For the iteration, without the interpreter (Asks.begin); None where that does not go. Connections
        have to be taken yet."""
        if not self.able:
            return None
        try:
            recipients = [message.share.holder.recipients(message.request) for message in self.all]
        except KVCommonsError:
            return None  # who asks in Python hears of which
        if not all(recipients):
            self.able = False
            return None
        if self._native is None:
            self._native = self._asks(batch, recipients)
        self._native.begin([one.wording for some in recipients for one in some], deadline_s, own)
        return self._native

    def _asks(self, batch: Batch, recipients: Sequence[Sequence[ask.Recipient]]) -> asking.Asks:
        layout, rows = self._layout, len(batch.sequences)
        whole = _room(rows, layout)
        if batch.apart and not len(batch.part_rows) and all(message.share.span for message in self.all):
            # Answers lie side by side: they are received where they belong.
            spans = [message.share.span or slice(0) for message in self.all]
            answers = [Partial(out=whole.out[span], lse=whole.lse[span]) for span in spans]
            each = zip(self.all, recipients, answers, strict=True)
            made = [message.native(some, answer) for message, some, answer in each]
            return asking.Asks(layout, made, [], whole)
        sources = []
        if len(batch.part_rows):
            self.here = _room(len(batch.part_rows), layout)
            sources += [
                asking.Source(partial=self.here, index=group.index.tolist(), rows=group.rows.tolist())
                for group in batch.part_groups
            ]
        made = []
        for message, some in zip(self.all, recipients, strict=True):
            made.append(message.native(some, _room(len(message.share.rows), layout)))
            sources += [
                asking.Source(partial=made[-1].answer, index=group.index.tolist(), rows=group.rows.tolist())
                for group in message.share.groups
            ]
        return asking.Asks(layout, made, sources, whole)


def _room(rows: int, layout: Layout) -> Partial:
    return Partial(
        out=torch.empty((rows, layout.query_heads, layout.head_dim)),
        lse=torch.empty((rows, layout.query_heads)),
    )


def _describe(batch: Batch, segment: RemoteSegment) -> AttendPart:
    sequence, run, size = batch.sequences[segment.row], segment.run, batch.block_tokens
    length = len(sequence.tokens) - run.first_block * size if segment.tail else run.count * size
    return AttendPart(
        ref=run.ref,
        rows=1,
        first_position=sequence.computed,
        append=segment.tail,
        length=length,
        first_block=run.segment_block,
    )
