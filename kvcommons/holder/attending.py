"""The holder's side of AttendLayer: append the rows' K and V, then attend over what the segments have.

DistAttention (Infinite-LLM, section 4.2): the debtor sends queries, the creditor answers a partial, the
debtor merges."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES, byte_view
from kvcommons.attention.partial import Partial, attend_chunk
from kvcommons.errors import InvalidInput
from kvcommons.holder.allowance import Allowance, computing
from kvcommons.holder.holder import Holder
from kvcommons.holder.rows import Part, RowPlan, RowPlans
from kvcommons.holder.segment import Segment
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange


class Attention:
    """Answers AttendLayer for one holder. Thread-safe; one request at a time uses the cores."""

    def __init__(self, holder: Holder, allowance: Allowance) -> None:
        self._holder = holder
        self._allowance = allowance
        self._plans = RowPlans()

    def answer(self, request: pb.AttendLayer, exchange: Exchange) -> None:
        """Receives queries, and K and V to append; replies outputs and lse. Errors: StaleEpoch for a segment
        that is gone, InvalidInput for one that is too short; nothing was computed then, appended rows may be
        there."""
        layout = self._holder.memory.layout
        if request.layer >= layout.layers or not request.segments:
            raise InvalidInput(
                f"layer {request.layer} of {len(request.segments)} segments: nothing to attend over"
            )
        layer, request.layer = request.layer, 0
        wording = request.SerializeToString()
        known = self._plans.find(wording)
        refs = known.refs if known is not None else [_ref(part) for part in request.segments]
        with self._holder.pinned(refs) as segments:
            if known is not None and known.holds_for(segments):
                self._rows(layer, known, exchange)
                return
            parts = self._parts(request.segments, segments)
            if all(part.rows == 1 for part in parts):
                model = self._holder.model
                plan = RowPlan(self._holder.memory, model.windows, model.scale, refs, segments, parts)
                self._plans.keep(wording, plan)
                self._rows(layer, plan, exchange)
            else:
                self._chunks(layer, parts, exchange)

    def _parts(self, wanted: Sequence[pb.AttendSegment], segments: Sequence[Segment]) -> list[Part]:
        parts, row, size = [], 0, self._holder.memory.layout.block_tokens
        for ask, segment in zip(wanted, segments, strict=True):
            if not ask.rows or (ask.append and ask.rows > ask.length):
                raise InvalidInput(
                    f"segment {ask.handle}: {ask.rows} rows at a length of {ask.length} tokens"
                )
            blocks: list[int] = []
            if ask.length:
                blocks = self._holder.blocks(segment, ask.first_block, -(-ask.length // size), beyond=True)
            if ask.append and ask.first_block + (ask.length - ask.rows) // size < segment.writable_from:
                raise InvalidInput(
                    f"segment {ask.handle} takes no tokens before block {segment.writable_from}: those are "
                    "frozen or shared"
                )
            parts.append(
                Part(
                    blocks=blocks,
                    first_block=ask.first_block,
                    first_row=row,
                    rows=ask.rows,
                    query_position=ask.first_position,
                    key_position=segment.first_position + ask.first_block * size,
                    append=ask.append,
                    length=ask.length,
                )
            )
            row += ask.rows
        return parts

    def _rows(self, layer: int, plan: RowPlan, exchange: Exchange) -> None:
        with plan.buffers() as buffers:
            _check_payload(buffers.request_bytes, exchange)
            exchange.receive_payload(buffers.request)
            with self._computing(exchange.deadline) as spent:
                plan.attend(layer, buffers)
            exchange.reply(pb.DataReply(attend_layer=spent), buffers.answer)

    def _chunks(self, layer: int, parts: list[Part], exchange: Exchange) -> None:
        rows, appends = sum(part.rows for part in parts), [part.rows for part in parts if part.append]
        q, appended = _receive(rows, appends, self._holder.memory.layout, exchange)
        with self._computing(exchange.deadline) as spent:
            self._append(layer, parts, appended)
            q = q.to(self._holder.memory.device)
            chunks = [self._chunk(layer, part, q) for part in parts]
            payload = [
                byte_view(torch.cat([c.out for c in chunks]).cpu()),
                byte_view(torch.cat([c.lse for c in chunks]).cpu()),
            ]
        exchange.reply(pb.DataReply(attend_layer=spent), payload)

    @contextmanager
    def _computing(self, deadline: Deadline) -> Iterator[pb.AttendLayerReply]:
        """One request at a time, within the budget; what it waited and took, once it has ended."""
        spent, asked_s = pb.AttendLayerReply(), time.monotonic()
        with computing(self._allowance, deadline), torch.inference_mode():
            began_s = time.monotonic()
            yield spent
        spent.queued_us = int((began_s - asked_s) * 1e6)
        spent.computed_us = int((time.monotonic() - began_s) * 1e6)

    def _append(self, layer: int, parts: list[Part], appended: list[Tensor]) -> None:
        if not appended:
            return
        memory, size = self._holder.memory, self._holder.memory.layout.block_tokens
        slots = [
            part.blocks[token // size] * size + token % size
            for part in parts
            if part.append
            for token in range(part.length - part.rows, part.length)
        ]
        # [2, kv_heads, rows, D] each, to [all rows, kv_heads, D].
        both = torch.cat([kv.transpose(1, 2) for kv in appended], dim=1).to(memory.device)
        memory.write_tokens(layer, torch.tensor(slots, device=memory.device), both[0], both[1])

    def _chunk(self, layer: int, part: Part, q: Tensor) -> Partial:
        memory = self._holder.memory
        positions = torch.arange(part.rows, device=memory.device) + part.query_position
        return attend_chunk(
            q[part.first_row : part.first_row + part.rows],
            memory.layer(layer),
            torch.tensor(part.blocks, dtype=torch.int64, device=memory.device),
            part.length,
            first_key_position=part.key_position,
            query_positions=positions,
            scale=self._holder.model.scale,
            window=self._holder.model.windows[layer],
        )


def _ref(part: pb.AttendSegment) -> SegmentRef:
    return SegmentRef(handle=part.handle, epoch=part.epoch, generation=part.generation)


def _check_payload(due: int, exchange: Exchange) -> None:
    if exchange.payload_bytes != due:
        raise InvalidInput(f"AttendLayer came with {exchange.payload_bytes} bytes where {due} belong")


def _receive(
    rows: int, appends: Sequence[int], layout: Layout, exchange: Exchange
) -> tuple[Tensor, list[Tensor]]:
    """q [rows, H, D] float32, and [2, kv_heads, rows, D] in the KV dtype for each of `appends`, so many
    rows."""
    dtype = TORCH_DTYPES[layout.kv_dtype]
    due = rows * layout.query_heads * layout.head_dim * 4
    due += 2 * sum(appends) * layout.kv_heads * layout.head_dim * dtype.itemsize
    _check_payload(due, exchange)
    q = torch.empty((rows, layout.query_heads, layout.head_dim))
    appended = [torch.empty((2, layout.kv_heads, count, layout.head_dim), dtype=dtype) for count in appends]
    exchange.receive_payload([byte_view(tensor) for tensor in (q, *appended)])
    return q, appended
