"""The attention exchange from its debtor's side: the plans of a batch at its creditors, layer by layer.

A plan is opened or changed before the first layer (PlanConnection); a layer is then the same few calls each
time: on the native path (debtor.cpp) where a creditor's connection has a socket of its own and the kernel is
compiled, else in Python, by the same format. Python around a layer took as long as the kernel: the weights
that are read between two layers drive its code out of the caches."""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcommons.attention.native.exchange import TransferOutcome
from kvcommons.attention.native.structures import STRUCTURES, fill
from kvcommons.backend.interface import Backend, Partial
from kvcommons.backend.memory import TORCH_DTYPES, BlockMemory, byte_view
from kvcommons.errors import DeadlineExceeded, KVCommonsError, UnknownPlan
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.plan_connection import PLAN, PlanConnection, PlanPool
from kvcommons.rblock.heads import divided
from kvcommons.rblock.layout import Layout
from kvcommons.transport.deadline import Deadline

# What may come of an answer before it is known whose business it is, beside the answer's own bytes.
_AHEAD_BYTES = 128
_TIMINGS = len(STRUCTURES["kvc_timing"]._fields_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipient:
    """Who attends over rows, or over some heads of them."""

    plans: PlanPool
    rows: Sequence[PlanRow]
    query_heads: slice | None = None  # None: all
    kv_heads: slice | None = None


def by_heads(layout: Layout, recipients: Sequence[Recipient]) -> list[Recipient]:
    """Each for its part of the heads, in the order of the parts; one by itself has all."""
    if len(recipients) == 1:
        return list(recipients)
    return [
        replace(one, query_heads=part.query_heads(layout), kv_heads=part.kv_heads(layout))
        for one, part in zip(recipients, divided(len(recipients)), strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one creditor, which may be several recipients, attends over: `rows` of the batch in the plan's
    order, those of them (by index) whose query is shifted, and the rows whose K and V go along; where the
    answer goes: out [rows, query_heads, head_dim] and lse [rows, query_heads]."""

    rows: Sequence[int]
    shifted: Sequence[int]
    appended: Sequence[int]
    answer: Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSource:
    """Of a partial, what lies at `index` belongs to `rows` of the batch."""

    partial: Partial
    index: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKV:
    """Where this instance's own K and V go: `places` (BlockMemory.rows_of) of `rows` of the batch, both on
    the device."""

    memory: BlockMemory
    places: Tensor
    rows: Tensor


class ShareTiming(NamedTuple):
    """Of a share in one layer; instants of the monotonic clock. Of several recipients, the slowest's. A share
    that failed has none, unless it was late."""

    share: int
    began_s: float
    waits_s: float
    came_s: float
    queued_us: int
    computed_us: int
    answered: bool  # False: it was waited for until the deadline


class LayerTiming(NamedTuple):
    """When a layer was asked for, when it was waited for, and each share's."""

    asks_s: float
    asked_s: float
    waits_s: float
    came_s: float
    native: bool
    shares: Sequence[ShareTiming]


class CallState(enum.Enum):
    READY = "no layer is under way"
    SENT = "a layer is under way"
    FAILED = "its share has failed: it is left alone for the rest of the iteration"


class _Call:
    """A recipient's plan, and memory for its layers. `struct` is its kvc_call."""

    def __init__(self, layout: Layout, number: int, share: Share, recipient: Recipient, struct: Any) -> None:
        self.number = number  # of the share
        self.share = share
        self.recipient = recipient
        self.struct = struct
        self.state = CallState.READY
        self._plan: PlanConnection | None = None
        heads, last, _ = (recipient.query_heads or slice(None)).indices(layout.query_heads)
        kv_heads, kv_last, _ = (recipient.kv_heads or slice(None)).indices(layout.kv_heads)
        rows, appended, dim = len(share.rows), len(share.appended), layout.head_dim
        dtype = TORCH_DTYPES[layout.kv_dtype]
        q_bytes = rows * (last - heads) * dim * 4
        self.sent_bytes = q_bytes + 2 * appended * (kv_last - kv_heads) * dim * dtype.itemsize
        self.answer_bytes = q_bytes + rows * (last - heads) * 4
        self._payload = torch.empty(self.sent_bytes, dtype=torch.uint8)
        self._q = self._payload[:q_bytes].view(torch.float32).view(rows, last - heads, dim)
        self._kv = self._payload[q_bytes:].view(dtype).view(appended, 2, kv_last - kv_heads, dim)
        self._heads, self._kv_heads = slice(heads, last), slice(kv_heads, kv_last)
        self._out, self._lse = share.answer.out[:, self._heads], share.answer.lse[:, self._heads]
        self._unread = torch.empty(self.answer_bytes + _AHEAD_BYTES, dtype=torch.uint8)
        self.timings = torch.zeros((layout.layers, _TIMINGS), dtype=torch.int64)
        shifted = set(share.shifted)
        numbers = [~row if i in shifted else row for i, row in enumerate(share.rows)]
        batch_rows = torch.tensor(numbers, dtype=torch.int64)
        appended_rows = torch.tensor(share.appended, dtype=torch.int64)
        parts = torch.empty(16 * (2 * rows + 2), dtype=torch.uint8)
        self._kept = batch_rows, appended_rows, parts
        fill(
            struct, rows=batch_rows, appended=appended_rows, parts=parts, payload=self._payload,
            unread=self._unread, timings=self.timings, out=self._out, lse=self._lse,
            out_row=self._out.stride(0), lse_row=self._lse.stride(0), row_count=rows,
            appended_count=appended, plan=PLAN, first_head=heads, heads=last - heads,
            first_kv_head=kv_heads, kv_heads=kv_last - kv_heads,
        )  # fmt: skip

    @property
    def plan(self) -> PlanConnection:
        assert self._plan is not None, "the iteration has not begun"
        return self._plan

    def begin(self, step: int, steps: int, deadline: Deadline, *, native: bool) -> None:
        """Has its plan as an iteration needs it: `step` steps after the recipient's rows, and `steps` after
        the iteration before. Raises what PlanConnection.prepare raises."""
        plan = self.plan
        if plan.user is self:
            plan.advance(steps, deadline)
        else:
            plan.user = self
            plan.prepare([row.moved(step) for row in self.recipient.rows], deadline)
        self.opened(native=native)

    def opened(self, *, native: bool) -> None:
        """Its plan is as it has to be."""
        bare, struct = self.plan.bare if native else None, self.struct
        struct.native = bare is not None
        if bare is not None:
            struct.descriptor, struct.ask_ns = bare.descriptor, int(bare.ask_s * 1e9)
        struct.revision, struct.step = self.plan.revision, self.plan.step

    def take(self) -> None:
        self.state, self.struct.lost = CallState.READY, 0
        former = self._plan
        self._plan = self.recipient.plans.take(self.recipient.rows, former)
        if self._plan is not former:
            self._plan.user = None

    def give(self) -> None:
        """What was asked for and not answered leaves a connection that no layer may follow on."""
        if self._plan is not None:
            if self.state is CallState.SENT or self.struct.under_way:
                self._plan.drop()
            self.struct.under_way, self.state = 0, CallState.READY
            self.recipient.plans.give(self._plan)

    def fill(self, q: Tensor, k: Tensor, v: Tensor, shifted: Tensor) -> None:
        """The payload, in Python."""
        share = self.share
        self._q.copy_(q[list(share.rows)][:, self._heads])
        for index in share.shifted:
            self._q[index].copy_(shifted[share.rows[index], self._heads])
        if share.appended:
            self._kv[:, 0].copy_(k[list(share.appended)][:, self._kv_heads])
            self._kv[:, 1].copy_(v[list(share.appended)][:, self._kv_heads])

    def send(self, layer: int, deadline: Deadline) -> None:
        """In Python, as PlanConnection's."""
        share = self.share
        self.plan.send(layer, len(share.rows), len(share.appended), [byte_view(self._payload)], deadline)

    def receive(self, layer: int, timing: Tensor, deadline: Deadline) -> None:
        """Receives in Python. Where the creditor does not know the plan any more, it is sent again, and then
        the layer."""
        out, lse = self._out.contiguous(), self._lse.contiguous()
        into = [byte_view(out), byte_view(lse)]
        try:
            reply = self.plan.receive(layer, into, deadline)
        except UnknownPlan:
            self.plan.reopen(deadline, connection=False)
            self.opened(native=bool(self.struct.native))
            self.send(layer, deadline)
            reply = self.plan.receive(layer, into, deadline)
        self._out.copy_(out)
        self._lse.copy_(lse)
        self.struct.lost = reply.lost
        timing[3:] = torch.tensor((reply.queued_us, reply.computed_us))

    def unreceive(self) -> None:
        """Leaves to `receive` what the native path has taken of an answer."""
        self.plan.unreceive(bytes(byte_view(self._unread)[: self.struct.moved]))

    def fail(self) -> None:
        """Its share has failed."""
        if self._plan is not None and (self.state is CallState.SENT or self.struct.under_way):
            self._plan.drop()
        self.struct.native = self.struct.under_way = 0
        self.state = CallState.FAILED
        self._out.zero_()
        self._lse.fill_(-torch.inf)


class LayerExchange:
    """A batch's shares; for one thread at a time. An iteration begins with `begin` and ends with `end`,
    whatever happens in between; each of its layers is `ask` and `receive`. A share that fails is empty for
    the rest of the iteration, and in `failures`."""

    def __init__(
        self,
        layout: Layout,
        shares: Sequence[tuple[Share, Sequence[Recipient]]],
        sources: Iterable[PartialSource],
        whole: Partial,
        *,
        backend: Backend,
        native: bool = True,
    ) -> None:
        """A layer's attention is in `whole` [B, query_heads, head_dim], merged from `sources`; without them
        the answers go there themselves. Only where it is `native`, which queries of the KV's dtype may be:
        else whoever asks puts answers together."""
        self._library = backend.attention.native_exchange if native else None
        self._device = backend.device
        self.whole = whole
        self.failures: dict[int, KVCommonsError] = {}  # by share
        self._shares = [share for share, _ in shares]
        each = [(number, share, one) for number, (share, some) in enumerate(shares) for one in some]
        self._structures = (STRUCTURES["kvc_call"] * max(len(each), 1))()
        self._calls = [
            _Call(layout, number, share, one, struct)
            for (number, share, one), struct in zip(each, self._structures, strict=False)
        ]
        self._layers, self._layer = layout.layers, 0
        self._step = 0
        self._deadline_s, self._deadline = 0.0, Deadline(0.0)
        self._own: NewKV | None = None
        self._instants: list[tuple[float, float, float, float, bool]] = []  # as LayerTiming has them
        self._late: dict[tuple[int, int], bool] = {}  # of shares that failed, by instant and share
        self._timings: list[LayerTiming] = []  # of layers before those
        self._kept: list[object] = []
        self._dtype = TORCH_DTYPES[layout.kv_dtype]
        struct = self._struct = STRUCTURES["kvc_layer"]()
        self._address = ctypes.addressof(struct)
        struct.calls, struct.count = ctypes.addressof(self._structures), len(self._calls)
        struct.dim, struct.kv_heads = layout.head_dim, layout.kv_heads
        struct.is_bf16 = self._dtype == torch.bfloat16
        struct.variant = self._library.kernel._index if self._library is not None else 0
        self._gather_into(struct.gather, list(sources))
        self._strides: tuple[tuple[int, ...], ...] = ()

    @property
    def native(self) -> bool:
        """Whether what lies apart is put together here, into `whole`."""
        return self._library is not None

    @property
    def answers(self) -> list[Partial]:
        """Of the shares, for whoever puts them together."""
        return [share.answer for share in self._shares]

    def begin(self, step: int, deadline_s: float, own: NewKV | None) -> None:
        """An iteration, so many steps after the recipients' rows; its layers may take so long each. What
        creditors have to know goes out at once, and is not waited for."""
        self.failures, self._late = {}, {}
        self._deadline_s, self._own = deadline_s, own
        deadline = Deadline.after(deadline_s)
        for call in self._calls:
            call.take()
        for call in self._calls:
            if call.state is CallState.FAILED:
                continue
            try:
                call.begin(step, step - self._step, deadline, native=self.native)
            except KVCommonsError as error:
                self._fail(call, error, asked=False)
        self._step = step
        self._struct.own_count = 0
        if self._library is not None and own is not None:
            struct, kv = self._struct, own.memory.tensor
            struct.own_count, struct.own = len(own.rows), own.rows.data_ptr()
            struct.own_places = own.places.data_ptr()
            struct.kv_layer_bytes = kv.stride(0) * kv.element_size()
            # Where the model's first layer would lie, if it were here.
            struct.kv = kv.data_ptr() - own.memory.layers.start * struct.kv_layer_bytes

    def ask(self, layer: int, q: Tensor, k: Tensor, v: Tensor, shifted: Tensor | None) -> None:
        """Sends each creditor its part, and writes this instance's own K and V. q and `shifted`
        [B, query_heads, head_dim], k and v [B, kv_heads, head_dim], on the device."""
        if len(self._instants) == self._layers:
            self._timings = self.take_timings()
        asks_s, struct = time.monotonic(), self._struct
        self._layer, self._deadline = layer, Deadline(asks_s + self._deadline_s)
        struct.layer, struct.timing = layer, len(self._instants)
        struct.until_ns = int((asks_s + self._deadline_s) * 1e9)
        shifted = q if shifted is None else shifted
        if self._library is not None:
            self._point_at(q, k, v, shifted)
            first = 0
            while (stopped := self._library.send(self._address, first)) >= 0:
                first = stopped + (not self._may_send_again(self._calls[stopped]))
        native, fetched = self._library is not None, None
        for call in self._calls:
            if call.state is CallState.FAILED:
                continue
            if not call.struct.native:
                native = False
                fetched = fetched or [self._device.fetch(tensor) for tensor in (q, k, v, shifted)]
                self._send(call, *fetched)
            else:
                call.state = CallState.SENT
        self._write_own(k, v)
        self._instants.append((asks_s, time.monotonic(), 0.0, 0.0, native))

    def receive(self) -> None:
        """Waits for every answer."""
        waits_s = time.monotonic()
        for call in self._calls:
            if call.state is CallState.SENT and not call.struct.native:
                self._receive(call)
        if self._library is not None:
            first = 0
            while (stopped := self._library.receive(self._address, first)) >= 0:
                self._receive_rest(self._calls[stopped])
                first = stopped + 1
        for call in self._calls:
            if call.state is CallState.SENT:
                call.state, call.plan.kept = CallState.READY, True
        asks_s, asked_s, _, _, native = self._instants[-1]
        self._instants[-1] = (asks_s, asked_s, waits_s, time.monotonic(), native)

    def lost(self) -> dict[int, dict[int, KVCommonsError]]:
        """Rows that creditors have lost, by share and index; each with why."""
        lost: dict[int, dict[int, KVCommonsError]] = {}
        for call in self._calls:
            if call.state is not CallState.READY or not call.struct.lost:
                continue
            try:
                lost.setdefault(call.number, {}).update(call.plan.lost(Deadline.after(self._deadline_s)))
            except KVCommonsError as error:
                self._fail(call, error, asked=False)
        return lost

    def take_timings(self) -> list[LayerTiming]:
        """The timings of layers since the last call; they go to the creditors' observers as well."""
        timings, self._timings = self._timings, []
        instants, self._instants = self._instants, []
        columns = [call.timings[: len(instants)].tolist() for call in self._calls]
        for index, (asks_s, asked_s, waits_s, came_s, native) in enumerate(instants):
            shares: dict[int, ShareTiming] = {}
            for call, column in zip(self._calls, columns, strict=True):
                *instants_ns, queued_us, computed_us = column[index]
                late = self._late.get((index, call.number))
                if not instants_ns[-1] or late is False:
                    continue
                began_s, waited_s, answered_s = (instant / 1e9 for instant in instants_ns)
                one = ShareTiming(
                    call.number, began_s, waited_s, answered_s, queued_us, computed_us, not late
                )
                if not late:
                    call.plan.observe(began_s, answered_s, call.sent_bytes, call.answer_bytes)
                other = shares.get(call.number)
                shares[call.number] = one if other is None else _slower(other, one)
            timings.append(LayerTiming(asks_s, asked_s, waits_s, came_s, native, list(shares.values())))
        self._late = {}
        for call in self._calls:
            if call.state is CallState.FAILED:
                call.timings.zero_()
        return timings

    def end(self) -> None:
        """Of the iteration, whether it went well or not."""
        for call in self._calls:
            call.give()

    def _point_at(self, q: Tensor, k: Tensor, v: Tensor, shifted: Tensor) -> None:
        struct, strides = self._struct, (q.stride(), k.stride(), v.stride(), shifted.stride())
        if strides != self._strides:
            assert q.dtype == k.dtype == self._dtype, "queries have the KV's dtype on the native path"
            assert all(stride[2] == 1 for stride in strides), "rows of a head lie together"
            self._strides = strides
            struct.q_row, struct.q_head, _ = strides[0]
            struct.k_row, struct.k_head, _ = strides[1]
            struct.v_row, struct.v_head, _ = strides[2]
            struct.shifted_row, struct.shifted_head, _ = strides[3]
        struct.q, struct.k, struct.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        struct.shifted = shifted.data_ptr()

    def _write_own(self, k: Tensor, v: Tensor) -> None:
        """In Python."""
        own = self._own
        if self._library is None and own is not None and len(own.rows):
            own.memory.write_rows(self._layer, own.places, torch.cat((k, v), dim=1)[own.rows])

    def _may_send_again(self, call: _Call) -> bool:
        """What could not be sent on the native path: to a connection that had gone stale it may be, once."""
        outcome, plan = TransferOutcome(call.struct.outcome), call.plan
        try:
            if outcome is TransferOutcome.GONE and not call.struct.moved and plan.kept:
                plan.reopen(self._deadline, connection=True)
                call.opened(native=True)
                return bool(call.struct.native)
            raise plan.unsent(outcome, call.struct.error)
        except KVCommonsError as error:
            self._fail(call, error)
        return False

    def _send(self, call: _Call, q: Tensor, k: Tensor, v: Tensor, shifted: Tensor) -> None:
        call.timings[self._struct.timing] = torch.tensor((time.monotonic_ns(), 0, 0, 0, 0))
        call.fill(q, k, v, shifted)
        try:
            call.send(self._layer, self._deadline)
            call.state = CallState.SENT
        except KVCommonsError as error:
            self._fail(call, error)

    def _receive(self, call: _Call) -> None:
        """In Python."""
        timing = call.timings[self._struct.timing]
        if not timing[1]:
            timing[1] = time.monotonic_ns()
        try:
            call.receive(self._layer, timing, self._deadline)
            timing[2] = time.monotonic_ns()
        except KVCommonsError as error:
            self._fail(call, error)

    def _receive_rest(self, call: _Call) -> None:
        """What the native path did not receive."""
        outcome = TransferOutcome(call.struct.outcome)
        call.struct.under_way = 0
        if outcome is TransferOutcome.OTHER:
            call.unreceive()
            self._receive(call)
        else:
            self._fail(call, call.plan.unanswered(outcome, call.struct.error))

    def _fail(self, call: _Call, error: KVCommonsError, *, asked: bool = True) -> None:
        """All of the call's share; `asked`: in a layer."""
        index = int(self._struct.timing)
        self.failures.setdefault(call.number, error)
        if asked:
            self._late[index, call.number] = isinstance(error, DeadlineExceeded)
            timing, sent = call.timings[index], call.state is CallState.SENT
            timing[2] = time.monotonic_ns()
            if not sent:  # it was waited for while it was sent to
                timing[1] = timing[0]
            began_s = float(timing[0]) / 1e9
            call.plan.observe(began_s, time.monotonic(), call.sent_bytes * sent, 0, error.code)
        for other in self._calls:
            if other.number == call.number:
                other.fail()
                other.timings[index + asked :] = 0

    def _gather_into(self, gather: Any, sources: Sequence[PartialSource]) -> None:
        """Fills a kvc_gather."""
        rows, heads = self.whole.lse.shape
        fill(gather, out=self.whole.out, lse=self.whole.lse, rows=rows, heads=heads)
        if not sources:
            return
        items: list[list[tuple[int, int]]] = [[] for _ in range(len(self.whole.lse))]
        for number, source in enumerate(sources):
            for index, row in zip(source.index, source.rows, strict=True):
                items[row].append((number, index))
        starts = [0]
        for some in items:
            starts.append(starts[-1] + len(some))
        flat = [item for some in items for item in some]
        columns = {
            "outs": [source.partial.out.data_ptr() for source in sources],
            "lses": [source.partial.lse.data_ptr() for source in sources],
            "starts": starts,
            "sources": [source for source, _ in flat],
            "indices": [index for _, index in flat],
            "parts": [0] * (2 * max(map(len, items))),
        }
        tensors = {name: torch.tensor(column, dtype=torch.int64) for name, column in columns.items()}
        self._kept += [tensors, sources]
        fill(gather, **tensors)


def _slower(one: ShareTiming, other: ShareTiming) -> ShareTiming:
    """Of two recipients of a share, asked one after the other."""
    slowest = max(one, other, key=lambda timing: timing.computed_us)
    return slowest._replace(
        began_s=one.began_s,
        waits_s=one.waits_s,
        came_s=other.came_s,
        answered=one.answered and other.answered,
    )
