"""A plan at its creditor: which blocks its rows attend over, for as long as nobody changes their segments."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcommons.attention.native.exchange import Library
from kvcommons.attention.native.structures import STRUCTURES, fill
from kvcommons.backend.interface import BatchPlan, Partial
from kvcommons.backend.memory import TORCH_DTYPES
from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.holder.holder import Holder
from kvcommons.holder.plan import PlanRow, arrangement
from kvcommons.holder.segment import Pin

ROWS_MAX, QUERIES_MAX = 4096, 1 << 16
# Of a plan's block table: 64 MiB.
_ENTRIES_MAX = 8 << 20
_STEP_MAX = 1 << 32
_ATTEMPTS_MAX = 64


def check_rows(count: int) -> None:
    """Of a message, before anything is made of its rows. Raises InvalidInput."""
    if count > ROWS_MAX:
        raise InvalidInput(f"{count} rows: a plan has at most {ROWS_MAX}", param="rows")


class RowState(enum.Enum):
    CHANGED = "its segment has to be looked up"
    HELD = "its segment is pinned, and its blocks are in the table"
    LOST = "its segment is gone, or not as the row has it: the row's partial is empty"


@dataclass(slots=True, eq=False)
class _Row:
    row: PlanRow  # as of step 0
    state: RowState = RowState.CHANGED
    pin: Pin | None = None
    key_position: int = 0  # of the first key
    blocks: int = 0  # in the table
    error: KVCommonsError | None = None  # why it is lost

    @property
    def held(self) -> bool:
        return self.state is RowState.HELD


class ServedPlan:
    """For its connection's thread. Segments stay pinned from one layer to the next, but are in nobody's way:
    whoever changes one ends its rows' pins, at once where no layer is under way, and the next layer looks
    them up again."""

    def __init__(
        self, holder: Holder, number: int, rows: Sequence[PlanRow], *, step: int, trace: str
    ) -> None:
        """`rows` as of `step`. Raises InvalidInput for what no plan can be."""
        self.number = number
        self.revision = 0
        self.trace = trace
        self._holder = holder
        self._memory = holder.memory
        self._device, self._attention = self._memory.backend.device, self._memory.backend.attention
        self._rows: list[_Row] = []
        # Guards what others may do meanwhile: `_end`, with the holder's lock held.
        self._lock = threading.Lock()
        self._changed: list[_Row] = []  # whose pins were ended, or are to be given back
        self._busy = False
        self._tables = torch.empty((0, 1), dtype=torch.int64)
        self._library = self._attention.native_exchange
        self._struct: Any = None
        self._plans: dict[int | None, BatchPlan] = {}  # of `_step`, by window
        self._step: int | None = None
        # Told of, and not looked up yet: the step of layers to come.
        self._coming_step: int | None = step
        self._arrange([None] * len(rows), [_Row(row.moved(-step)) for row in rows])

    @property
    def queries(self) -> int:
        return self._queries

    @property
    def appended(self) -> int:
        """Queries that bring K and V."""
        return self._appended

    @property
    def request_bytes(self) -> int:
        """Of a layer's payload."""
        layout = self._memory.layout
        brought = 2 * self._appended * layout.kv_heads * TORCH_DTYPES[layout.kv_dtype].itemsize
        return (4 * self._queries * layout.query_heads + brought) * layout.head_dim

    @property
    def answer_bytes(self) -> int:
        layout = self._memory.layout
        return 4 * self._queries * layout.query_heads * (layout.head_dim + 1)

    @property
    def table_entries(self) -> int:
        return self._tables.numel()

    @property
    def lost(self) -> list[tuple[int, KVCommonsError]]:
        """Rows by index, each with why."""
        return [(index, one.error) for index, one in enumerate(self._rows) if one.error is not None]

    def change(
        self, revision: int, removed: Sequence[int], placed: Sequence[tuple[int, PlanRow]], step: int
    ) -> None:
        """`placed` as of `step`: a row that goes on where a removed one was keeps its pin and its blocks.
        Raises InvalidInput."""
        if revision != self.revision + 1:
            raise InvalidInput(
                f"plan {self.number} has revision {self.revision}: {revision} does not follow it"
            )
        order = arrangement(len(self._rows), removed, [index for index, _ in placed])
        left = {index: self._rows[index] for index in removed}
        known = {(one.row.place, one.row.append): index for index, one in left.items() if one.held}
        new = list[_Row]()
        for index, row in placed:
            former = known.pop((row.place, row.append), None)
            order[index] = former
            if former is None:
                new.append(_Row(row.moved(-step)))
            else:
                left.pop(former).row = row.moved(-step)
        self._arrange(order, new)
        self._unpin(left.values())
        self.revision, self._coming_step = revision, step

    def close(self) -> None:
        self._unpin(self._rows)

    def begin(self, step: int) -> None:
        """A layer of this step: `end` follows. Raises InvalidInput for a step that cannot be of this plan;
        rows whose segments fail it are lost."""
        for _ in range(_ATTEMPTS_MAX):
            self.settle()
            if not (self._resolved and self._first_step <= step <= self._last_step):
                self._resolve(step)
            with self._lock:
                if not self._changed:
                    self._busy = True
                    return
        raise InvalidInput(f"segments of plan {self.number} change all the time: ask again")

    def end(self) -> None:
        with self._lock:
            self._busy = False
        self.settle()

    def look_up(self, step: int) -> None:
        """As `begin`, for a layer to come, which hears of what is wrong."""
        with contextlib.suppress(InvalidInput):
            self.begin(step)
            self.end()

    def settle(self) -> None:
        """Gives back what was ended meanwhile. No layer is under way."""
        with self._lock:
            changed, self._changed = self._changed, []
            if self._struct is not None:
                self._struct.access = 0
        if changed:
            self._unpin(changed)

    def attend(self, layer: int, step: int, q: Tensor, kv: Tensor, answer: Partial) -> None:
        """Between `begin` and `end`: q [queries, H, D] float32, kv [appended, 2, kv_heads, D], in host
        memory."""
        memory = self._memory
        window, scale = self._holder.model.windows[layer], self._holder.model.scale
        self._append(layer, step, kv)
        if not self._single:
            parts = [self._chunk(layer, step, index, q, window) for index in range(len(self._rows))]
            self._answer(
                answer,
                Partial(
                    out=torch.cat([part.out for part in parts]), lse=torch.cat([part.lse for part in parts])
                ),
            )
            return
        if step != self._step:
            self._plans, self._step = {}, step
        if window not in self._plans:
            self._plans[window] = self._attention.plan_batch(
                memory.layer(0),
                self._tables,
                self._first_lengths + step * self._grows,
                first_key_positions=self._key_positions,
                query_positions=self._first_positions + step,
                window=window,
            )
        plan, kv_here = self._plans[window], memory.layer(layer)
        if self._device.host:
            plan.attend(q, kv_here, scale, answer)
        else:
            self._answer(answer, plan.attend(self._device.upload(q), kv_here, scale))

    def native(self) -> int | None:
        """The address of its kvc_plan, for layers on the native path; None where there can be none: only
        torch can attend, a row has several queries, or its layers belong to a trace."""
        kv = self._memory.tensor
        if self._library is None or not self._single or self.trace:
            return None
        if not self._resolved:
            # Of segments that have changed since, the next layer's step tells what may be written.
            if self._coming_step is not None:
                self.look_up(self._coming_step)
            if not self._resolved:
                return None
        if self._struct is None:
            if not self._library.serves(kv[0]):
                self._library = None
                return None
            self._struct = STRUCTURES["kvc_plan"]()
            self._fill(self._struct, self._library, kv)
        return ctypes.addressof(self._struct)

    def _arrange(self, order: Sequence[int | None], placed: Sequence[_Row]) -> None:
        """Rows in a new order: those at their index before, others from `placed`."""
        new = iter(placed)
        rows = [next(new) if index is None else self._rows[index] for index in order]
        queries = sum(one.row.queries for one in rows)
        if not rows or len(rows) > ROWS_MAX or queries > QUERIES_MAX:
            raise InvalidInput(
                f"a plan of {len(rows)} rows with {queries} queries: at least one, and at most {ROWS_MAX} "
                f"rows with {QUERIES_MAX} queries"
            )
        if not len(self._tables):
            self._tables = self._tables.new_zeros((len(rows), 1))
        elif order != list(range(len(self._tables))):
            self._tables = self._tables.index_select(0, self._longs([index or 0 for index in order]))
        self._rows = rows
        self._queries = queries
        self._appended = sum(one.row.queries for one in rows if one.row.append)
        self._single = queries == len(rows)
        self._resolved = False

    def _resolve(self, step: int) -> None:
        """Looks up what was changed, and rows that have outgrown the blocks that are known."""
        self._coming_step = None
        if not 0 <= step < _STEP_MAX:
            raise InvalidInput(f"step {step} of plan {self.number}")
        changed = [one for one in self._rows if one.state is RowState.CHANGED]
        pins = self._holder.pin_each([(one.row.ref, partial(self._end, one)) for one in changed])
        for one, pin in zip(changed, pins, strict=True):
            if isinstance(pin, Pin):
                one.pin, one.state, one.blocks = pin, RowState.HELD, 0
            else:
                self._lose(one, pin)
        size = self._memory.layout.block_tokens
        for index, one in enumerate(self._rows):
            row = one.row.moved(step)
            if one.held and (not one.blocks or row.length > one.blocks * size):
                try:
                    self._look_up(index, one, row)
                except InvalidInput as error:
                    self._lose(one, error)
        self._place(step)

    def _look_up(self, index: int, one: _Row, row: PlanRow) -> None:
        """Those of the row's blocks, as of its step, that are not in the table. Raises InvalidInput."""
        assert one.pin is not None
        segment, size = one.pin.segment, self._memory.layout.block_tokens
        if row.append and row.first_block + (row.length - row.queries) // size < segment.writable_from:
            raise InvalidInput(
                f"segment {row.handle} takes no tokens before block {segment.writable_from}: those are "
                "frozen or shared"
            )
        one.key_position = segment.first_position + row.first_block * size
        if row.length <= 0:
            return
        known, needed = one.blocks, -(-row.length // size)
        more = self._holder.blocks(segment, row.first_block + known, needed - known, beyond=True)
        one.blocks, width = known + len(more), self._tables.shape[1]
        if one.blocks > width:
            width = one.blocks + one.blocks // 8  # it may grow
            if len(self._rows) * width > _ENTRIES_MAX:
                raise InvalidInput(
                    f"a plan of {len(self._rows)} rows over {width} blocks: make several of it"
                )
            tables = self._tables.new_zeros((len(self._rows), width))
            tables[:, : self._tables.shape[1]] = self._tables
            self._tables = tables
        self._tables[index, known : one.blocks] = self._longs(more)

    def _place(self, step: int) -> None:
        """What the rows' attention follows from, as of step 0. Lost rows have no keys."""
        size = self._memory.layout.block_tokens
        held = [one.held for one in self._rows]
        lengths = [one.row.length if here else 0 for one, here in zip(self._rows, held, strict=True)]
        grows = [int(one.row.append and here) for one, here in zip(self._rows, held, strict=True)]
        positions = [one.row.position for one in self._rows]
        self._first_lengths, self._grows = self._longs(lengths), self._longs(grows)
        self._brings = self._longs([int(one.row.append) for one in self._rows])
        self._first_positions = self._longs(positions)
        self._key_positions = self._longs([one.key_position for one in self._rows])
        self._first_step, self._last_step = max(-min(positions), 0), _STEP_MAX - 1
        for one, grown in zip(self._rows, grows, strict=True):
            if grown and one.pin is not None:
                frozen = max(one.pin.segment.writable_from - one.row.first_block, 0) * size
                self._first_step = max(self._first_step, frozen + one.row.queries - one.row.length)
                self._last_step = min(self._last_step, one.blocks * size - one.row.length)
        if not self._first_step <= step <= self._last_step:
            raise InvalidInput(f"plan {self.number} has no step {step}: it goes from {self._first_step} on")
        self._plans, self._step = {}, None
        self._resolved = True
        if self._struct is not None and self._library is not None:
            self._fill(self._struct, self._library, self._memory.tensor)

    def _fill(self, plan: Any, library: Library, kv: Tensor) -> None:
        kernel = library.kernel
        layout, model = self._memory.layout, self._holder.model
        self._lengths = self._first_lengths.clone()
        self._positions = self._first_positions.clone()
        self._windows = torch.tensor([window or 0 for window in model.windows], dtype=torch.int64)
        fill(
            plan.batch, kv=kv, tables=self._tables, lengths=self._lengths,
            first_positions=self._key_positions, query_positions=self._positions,
            threads=torch.get_num_threads(), variant=kernel._index, batch=len(self._rows),
            q_row=layout.query_heads * layout.head_dim, q_head=layout.head_dim,
            heads=layout.query_heads, kv_heads=layout.kv_heads, dim=layout.head_dim,
            block_tokens=layout.block_tokens, table_width=self._tables.shape[1], scale=model.scale,
            q_is_bf16=False, kv_is_bf16=kv.dtype == torch.bfloat16,
        )  # fmt: skip
        fill(
            plan, lengths=self._lengths, positions=self._positions, first_lengths=self._first_lengths,
            first_positions=self._first_positions, grows=self._grows, brings=self._brings,
            windows=self._windows, first_step=self._first_step, last_step=self._last_step, step=-1,
            layers=layout.layers, layer_bytes=kv[0].nbytes, appended=self._appended, number=self.number,
            revision=self.revision, lost=len(self.lost),
        )  # fmt: skip

    def _append(self, layer: int, step: int, kv: Tensor) -> None:
        size, first = self._memory.layout.block_tokens, 0
        slots, brought = list[Tensor](), list[int]()
        for index, one in enumerate(self._rows):
            if not one.row.append:
                continue
            row = one.row.moved(step)
            if one.held:
                tokens = torch.arange(row.length - row.queries, row.length)
                slots.append(self._tables[index, tokens // size] * size + tokens % size)
                brought += range(first, first + row.queries)
            first += row.queries
        if slots:
            new = self._device.upload(kv[brought].flatten(1, 2))
            self._memory.write_rows(layer, self._memory.rows_of(torch.cat(slots)), new)

    def _chunk(self, layer: int, step: int, index: int, q: Tensor, window: int | None) -> Partial:
        one, memory = self._rows[index], self._memory
        first = sum(other.row.queries for other in self._rows[:index])
        queries = self._device.upload(q[first : first + one.row.queries])
        if one.state is RowState.LOST:
            return Partial.empty(queries)
        row = one.row.moved(step)
        kv = memory.layer(layer)
        plan = self._attention.plan_chunk(
            kv,
            queries.shape[1],
            self._tables[index, : one.blocks],
            row.length,
            first_key_position=one.key_position,
            query_positions=range(row.position, row.position + row.queries),
            window=window,
        )
        return plan.attend(queries, kv, self._holder.model.scale)

    def _answer(self, answer: Partial, partial: Partial) -> None:
        """What was computed goes to host memory."""
        out, _ = self._device.download(partial.out)
        lse, event = self._device.download(partial.lse)
        event.wait()
        answer.out.copy_(out)
        answer.lse.copy_(lse)

    def _end(self, one: _Row) -> bool:
        """As Pin.end, of a row's."""
        with self._lock:
            self._changed.append(one)
            idle = not self._busy
            if self._struct is not None and self._library is not None:
                access = ctypes.addressof(self._struct) + type(self._struct).access.offset
                idle = bool(self._library.end_access(access)) and idle
            return idle

    def _lose(self, one: _Row, error: KVCommonsError) -> None:
        self._unpin([one])
        one.state, one.error = RowState.LOST, error

    def _unpin(self, rows: Collection[_Row]) -> None:
        pins = [one.pin for one in rows if one.pin is not None]
        for one in rows:
            one.pin = None
            if one.held:
                one.state = RowState.CHANGED
        self._resolved = False
        if pins:
            self._holder.unpin_all(pins)

    def _longs(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)
