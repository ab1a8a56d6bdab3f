"""The holder's side of AttendLayer: append the rows' K and V, then attend over what the segments have.

DistAttention (Infinite-LLM, section 4.2): the debtor sends queries, the creditor answers a partial, the
debtor merges."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES
from kvcommons.attention.partial import Partial, attend_batch, attend_chunk
from kvcommons.errors import DeadlineExceeded, InvalidInput
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.holder import Holder
from kvcommons.holder.segments import Segment, SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import Exchange


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One segment of a request: its rows are q[first_row : first_row + rows]."""

    blocks: list[int]
    first_row: int
    rows: int
    query_position: int
    key_position: int
    append: bool
    length: int


class Attention:
    """Answers AttendLayer for one holder. Thread-safe; `compute` lets one request at a time use the cores:
    more threads than cores are three times slower. An owner process with a model shares it with its engine,
    or gives its own."""

    def __init__(
        self, holder: Holder, compute: threading.Lock | None = None, budget: AttentionBudget | None = None
    ) -> None:
        """`budget` bounds what is computed for others; None: nothing does."""
        self._holder = holder
        self._budget = budget
        self._compute = compute or threading.Lock()

    def answer(self, request: pb.AttendLayer, exchange: Exchange) -> None:
        """Receives queries, and K and V to append; replies outputs and lse. Errors: StaleEpoch for a segment
        that is gone, InvalidInput for one that is too short; nothing was computed then, appended rows may be
        there."""
        layout = self._holder.memory.layout
        if request.layer >= layout.layers or not request.segments:
            raise InvalidInput(
                f"layer {request.layer} of {len(request.segments)} segments: nothing to attend over"
            )
        refs = [
            SegmentRef(handle=part.handle, epoch=part.epoch, generation=part.generation)
            for part in request.segments
        ]
        with self._holder.pinned(refs) as segments:
            parts = self._parts(request.segments, segments)
            q, appended = _receive(parts, layout, exchange)
            others = self._budget.turn(exchange.deadline) if self._budget is not None else nullcontext()
            with others:
                partial = self._attend(request.layer, parts, q, appended, exchange.deadline)
        payload = [byte_view(partial.out.cpu().contiguous()), byte_view(partial.lse.cpu().contiguous())]
        exchange.reply(pb.DataReply(attend_layer=pb.AttendLayerReply()), payload)

    def _parts(self, wanted: Sequence[pb.AttendSegment], segments: Sequence[Segment]) -> list[_Part]:
        parts, row, size = [], 0, self._holder.memory.layout.block_tokens
        for ask, segment in zip(wanted, segments, strict=True):
            if not ask.rows or (ask.append and ask.rows > ask.length):
                raise InvalidInput(
                    f"segment {ask.handle}: {ask.rows} rows at a length of {ask.length} tokens"
                )
            blocks: list[int] = []
            if ask.length:
                blocks = self._holder.blocks(segment, ask.first_block, -(-ask.length // size))
            if ask.append and ask.first_block + (ask.length - ask.rows) // size < segment.writable_from:
                raise InvalidInput(
                    f"segment {ask.handle} takes no tokens before block {segment.writable_from}: those are "
                    "frozen or shared"
                )
            parts.append(
                _Part(
                    blocks=blocks,
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

    def _attend(
        self, layer: int, parts: list[_Part], q: Tensor, appended: list[Tensor], deadline: Deadline
    ) -> Partial:
        device = self._holder.memory.device
        if not self._compute.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(
                "the holder was busy until the deadline: spread the load over more holders"
            )
        try:
            with torch.inference_mode():
                self._append(layer, parts, appended)
                q = q.to(device)
                if all(part.rows == 1 for part in parts):
                    return self._batch(layer, parts, q)
                chunks = [self._chunk(layer, part, q) for part in parts]
                return Partial(out=torch.cat([c.out for c in chunks]), lse=torch.cat([c.lse for c in chunks]))
        finally:
            self._compute.release()

    def _append(self, layer: int, parts: list[_Part], appended: list[Tensor]) -> None:
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

    def _batch(self, layer: int, parts: list[_Part], q: Tensor) -> Partial:
        """One row a segment, all at once."""
        memory = self._holder.memory
        width = max(1, *(len(part.blocks) for part in parts))
        tables = torch.zeros((len(parts), width), dtype=torch.int64)
        for row, part in enumerate(parts):
            tables[row, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int64)
        return attend_batch(
            q,
            memory.layer(layer),
            tables.to(memory.device),
            _column(parts, "length", memory.device),
            scale=self._holder.model.scale,
            window=self._holder.model.windows[layer],
            first_key_positions=_column(parts, "key_position", memory.device),
            query_positions=_column(parts, "query_position", memory.device),
        )

    def _chunk(self, layer: int, part: _Part, q: Tensor) -> Partial:
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


def _column(parts: list[_Part], name: str, device: torch.device) -> Tensor:
    return torch.tensor([getattr(part, name) for part in parts], dtype=torch.int64, device=device)


def _receive(parts: list[_Part], layout: Layout, exchange: Exchange) -> tuple[Tensor, list[Tensor]]:
    """q [rows, H, D] float32, and [2, kv_heads, rows, D] in the KV dtype for each part that appends."""
    rows = sum(part.rows for part in parts)
    appends = [part.rows for part in parts if part.append]
    dtype = TORCH_DTYPES[layout.kv_dtype]
    due = rows * layout.query_heads * layout.head_dim * 4
    due += 2 * sum(appends) * layout.kv_heads * layout.head_dim * dtype.itemsize
    if exchange.payload_bytes != due:
        raise InvalidInput(f"AttendLayer came with {exchange.payload_bytes} bytes where {due} belong")
    q = torch.empty((rows, layout.query_heads, layout.head_dim), dtype=torch.float32)
    appended = [torch.empty((2, layout.kv_heads, count, layout.head_dim), dtype=dtype) for count in appends]
    exchange.receive_payload([byte_view(tensor) for tensor in (q, *appended)])
    return q, appended
