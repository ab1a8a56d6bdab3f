"""Requests of one row a segment, as decode makes them: layer after layer over the same segments. What follows
from the segments alone (block tables, slots, the attention's plan) is made once and serves all layers."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES, BlockMemory, byte_view
from kvcommons.attention.partial import BatchPlan, Partial
from kvcommons.holder.segment import Segment
from kvcommons.holder.segments import SegmentRef
from kvcommons.rblock.layout import Layout

# Plans: of debtors, and of their batches' mini-batches, that take turns. Each is of one iteration, so most of
# them are done with; those that are in use are the ones used last.
_KEPT_MAX, _KEPT_BYTES = 128, 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One segment of a request: its rows are q[first_row : first_row + rows]."""

    blocks: list[int]  # all of them, from first_block on
    first_block: int  # within the segment
    first_row: int
    rows: int
    query_position: int
    key_position: int
    append: bool
    length: int


class RowBuffers:
    """Memory of a request and its answer, on the CPU: q [parts, H, D] float32, `appended` [parts that append,
    2 * kv_heads, D] in the KV dtype, and the partial. As bytes: `request`, `answer`."""

    def __init__(self, layout: Layout, parts: int, appended: int) -> None:
        heads, dim = layout.query_heads, layout.head_dim
        self.q = torch.empty((parts, heads, dim))
        self.appended = torch.empty((appended, 2 * layout.kv_heads, dim), dtype=TORCH_DTYPES[layout.kv_dtype])
        both = torch.empty(parts * heads * (dim + 1))
        end = parts * heads * dim
        self.both = both  # of the partial
        self.partial = Partial(out=both[:end].view(parts, heads, dim), lse=both[end:].view(parts, heads))
        self.request = [byte_view(tensor) for tensor in (self.q, self.appended) if tensor.numel()]
        self.answer = [byte_view(both)]
        self.request_bytes = self.q.nbytes + self.appended.nbytes


class RowPlan:
    """Of a request's parts, one row each; all but `buffers` used by one thread at a time."""

    def __init__(
        self,
        memory: BlockMemory,
        windows: Sequence[int | None],
        scale: float,
        refs: Sequence[SegmentRef],
        segments: Sequence[Segment],
        parts: Sequence[Part],
    ) -> None:
        self.refs = refs
        self.appended = sum(part.append for part in parts)
        self._memory = memory
        self._windows = windows
        self._scale = scale
        self._segments = list(segments)
        self._shapes = [_shape(segment) for segment in segments]
        width = max(1, *(len(part.blocks) for part in parts))
        tables = [part.blocks + [0] * (width - len(part.blocks)) for part in parts]
        self._tables = self._longs(tables)
        self._lengths = self._longs([part.length for part in parts])
        self._key_positions = self._longs([part.key_position for part in parts])
        self._query_positions = self._longs([part.query_position for part in parts])
        size = memory.layout.block_tokens
        slots = [
            part.blocks[(part.length - 1) // size] * size + (part.length - 1) % size
            for part in parts
            if part.append
        ]
        self._rows = memory.rows_of(self._longs(slots))
        self._plans: dict[int | None, BatchPlan] = {}
        self._spare: deque[RowBuffers] = deque(maxlen=1)  # one layer is asked for after the other

    @property
    def kept_bytes(self) -> int:
        """Its tables, twice with the lists that they were made from, and one request's buffers."""
        layout, parts = self._memory.layout, len(self.refs)
        floats = parts * layout.query_heads * (2 * layout.head_dim + 1)
        appended = self.appended * 2 * layout.kv_heads * layout.head_dim
        return 2 * self._tables.nbytes + floats * 4 + appended * TORCH_DTYPES[layout.kv_dtype].itemsize

    def holds_for(self, segments: Sequence[Segment]) -> bool:
        """Whether these are the segments that it was made for, and their blocks are where they were."""
        return all(
            now is then and _shape(now) == shape
            for now, then, shape in zip(segments, self._segments, self._shapes, strict=True)
        )

    @contextmanager
    def buffers(self) -> Iterator[RowBuffers]:
        """For one request. Layer after layer gets the same ones."""
        try:
            taken = self._spare.pop()
        except IndexError:
            taken = RowBuffers(self._memory.layout, len(self.refs), self.appended)
        yield taken
        self._spare.append(taken)

    def attend(self, layer: int, buffers: RowBuffers) -> None:
        """Appends what is new, and attends: buffers.partial."""
        if self.appended:
            self._memory.write_rows(layer, self._rows, buffers.appended.to(self._memory.device))
        window = self._windows[layer]
        kv = self._memory.layer(layer)
        if window not in self._plans:
            self._plans[window] = BatchPlan(
                kv.shape,
                self._tables,
                self._lengths,
                first_key_positions=self._key_positions,
                query_positions=self._query_positions,
                window=window,
            )
        plan = self._plans[window]
        if kv.device.type == "cpu":
            plan.attend(buffers.q, kv, self._scale, buffers.partial)
            return
        partial = plan.attend(buffers.q.to(kv.device), kv, self._scale)
        buffers.partial.out.copy_(partial.out)
        buffers.partial.lse.copy_(partial.lse)

    def _longs(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._memory.device)


class RowPlans:
    """Those used last, by the wording of their requests. Thread-safe."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        """`kept_bytes` bounds them all together; one plan is kept however large it is."""
        self._lock = threading.Lock()
        self._plans: OrderedDict[bytes, RowPlan] = OrderedDict()
        self._bytes = 0
        self._kept_bytes = kept_bytes

    def find(self, wording: bytes) -> RowPlan | None:
        with self._lock:
            plan = self._plans.get(wording)
            if plan is not None:
                self._plans.move_to_end(wording)
            return plan

    def keep(self, wording: bytes, plan: RowPlan) -> None:
        with self._lock:
            before = self._plans.pop(wording, None)
            self._bytes += plan.kept_bytes - (before.kept_bytes if before is not None else 0)
            self._plans[wording] = plan
            while len(self._plans) > 1 and (len(self._plans) > _KEPT_MAX or self._bytes > self._kept_bytes):
                self._bytes -= self._plans.popitem(last=False)[1].kept_bytes


def _shape(segment: Segment) -> tuple[int, int, int, int]:
    """Blocks are only added behind the others, or trimmed before them: with the same numbers of both they
    are the same blocks."""
    return (segment.trimmed, len(segment.blocks), segment.frozen, segment.shared)
