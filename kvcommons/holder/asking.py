"""Partials asked for layer by layer without the interpreter: a batch's messages to its creditors, whose rows,
connections and answers stay where they are from one layer to the next.

Where a layer's KV lies apart, Python took as long as the kernel (300 µs): the weights that are read between
two layers drive its code out of the caches. Here a layer is two calls. What goes wrong is Python's as before:
errors, and answers that are not as they should be, are the transport's to explain.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcommons.attention.memory import TORCH_DTYPES, BlockMemory
from kvcommons.attention.native import ask as native
from kvcommons.attention.partial import Partial
from kvcommons.errors import KVCommonsError
from kvcommons.holder.ask import Ask, Message
from kvcommons.pb import data_pb2
from kvcommons.rblock.layout import Layout
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.deadline import Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Of a partial, what lies at `index` belongs to `rows` of the batch."""

    partial: Partial
    index: Sequence[int]
    rows: Sequence[int]


class Told(NamedTuple):
    """Of a message in one layer; instants of the monotonic clock. Of several recipients, the slowest's."""

    began_s: float
    waits_s: float
    came_s: float
    queued_us: int
    computed_us: int


class Turn(NamedTuple):
    """One layer: when it was asked for, when it was waited for, and what is told of each message."""

    asks_s: float
    asked_s: float
    waits_s: float
    came_s: float
    told: Sequence[Told]


def serves(layout: Layout, device: torch.device) -> bool:
    """Whether a model's messages can be sent so: it computes in the dtype that its KV has."""
    return device.type == "cpu" and layout.kv_dtype in TORCH_DTYPES and native.find() is not None


class Asks:
    """A batch's messages; for one thread at a time. An iteration begins with `begin` and ends with `end`,
    whatever happens in between; of each of its layers `ask` and `receive` come first, and where one of them
    says no, `call` has what is left of every message."""

    def __init__(
        self, layout: Layout, messages: Sequence[Message], sources: Iterable[Source], whole: Partial
    ) -> None:
        """A layer's attention is in `whole` [B, query_heads, head_dim], merged from `sources`; without them
        the answers go there themselves. `serves` has been asked."""
        library = native.find()
        assert library is not None
        self._library = library
        self.whole = whole
        self._messages = messages
        recipients = [(message, one) for message in messages for one in message.recipients]
        self._structures = (native.Ask * len(recipients))()
        self._asks = [
            Ask(structure, layout, message, recipient)
            for structure, (message, recipient) in zip(self._structures, recipients, strict=True)
        ]
        self._of: list[list[Ask]] = []  # each message's
        for message in messages:
            first = sum(map(len, self._of))
            self._of.append(self._asks[first : first + len(message.recipients)])
        self._turns = torch.zeros((layout.layers, len(native.TURN)), dtype=torch.int64)
        self._turn = 0
        self._taken: list[Turn] = []  # of layers before those
        self._kept: list[object] = []
        self._dtype = TORCH_DTYPES[layout.kv_dtype]
        self._layers = native.Layers(
            asks=ctypes.addressof(self._structures), turns=self._turns.data_ptr(),
            gather=self._gather(list(sources)), count=len(self._asks), dim=layout.head_dim,
            kv_heads=layout.kv_heads, kv_layer_bytes=0, is_bf16=self._dtype == torch.bfloat16,
            variant=library.variant,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layers)
        self._strides: tuple[tuple[int, ...], ...] = ()
        self._opened = False

    def begin(
        self,
        wordings: Iterable[data_pb2.AttendLayer],
        deadline_s: float,
        own: tuple[BlockMemory, Tensor, Tensor] | None,
    ) -> None:
        """An iteration: what each recipient is asked for in it, and how long a layer may take. `own`: whose K
        and V are this instance's to keep, where (BlockMemory.rows_of), and of which rows."""
        traceparent = current_traceparent()
        trace = data_pb2.DataRequest(traceparent=traceparent).SerializeToString() if traceparent else b""
        for ask, wording in zip(self._asks, wordings, strict=True):
            ask.word(wording, trace)
        layers = self._layers
        layers.deadline_ns = int(deadline_s * 1e9)
        layers.own_count = 0
        if own is not None:
            memory, places, rows = own
            self._own = places, rows
            layers.own_count, layers.own, layers.own_places = len(rows), rows.data_ptr(), places.data_ptr()
            layers.kv = memory.tensor.data_ptr()
            layers.kv_layer_bytes = memory.tensor.stride(0) * memory.tensor.element_size()

    @property
    def opened(self) -> bool:
        """Whether this iteration has its connections."""
        return self._opened

    def open(self, deadline: Deadline) -> dict[int, KVCommonsError] | None:
        """Takes connections. The messages that cannot be sent; None where a connection has no socket of its
        own, so that nothing can."""
        failed: dict[int, KVCommonsError] = {}
        for number, asks in enumerate(self._of):
            try:
                if not all(ask.open(deadline) for ask in asks):
                    self.end()
                    return None
            except KVCommonsError as error:
                failed[number] = error
        self._opened = not failed
        return failed

    def ask(self, layer: int, q: Tensor, k: Tensor, v: Tensor, shifted: Tensor | None) -> bool:
        """Sends every message, and writes this instance's own K and V. q and `shifted` [B, query_heads,
        head_dim], k and v [B, kv_heads, head_dim]. False where a message could not be sent."""
        layers = self._layers
        shifted = q if shifted is None else shifted
        strides = q.stride(), k.stride(), v.stride(), shifted.stride()
        if strides != self._strides:
            assert q.dtype == k.dtype == self._dtype, "serves was asked for another dtype"
            assert all(stride[2] == 1 for stride in strides), "rows of a head lie together"
            self._strides = strides
            layers.q_row, layers.q_head, _ = strides[0]
            layers.k_row, layers.k_head, _ = strides[1]
            layers.v_row, layers.v_head, _ = strides[2]
            layers.shifted_row, layers.shifted_head, _ = strides[3]
        layers.q, layers.k, layers.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        layers.shifted = shifted.data_ptr()
        if self._turn == len(self._turns):
            self._taken = self.take_turns()  # with those before
        failed = self._library.ask_all(self._address, layer, self._turn)
        return not failed or self._repeated()

    def receive(self) -> bool:
        """Waits for every answer; the layer's attention is in `whole` then."""
        if self._library.receive_all(self._address) >= 0:
            return False
        self._turn += 1
        return True

    @property
    def deadline(self) -> Deadline:
        """Of the layer that was asked for last."""
        return Deadline(self._layers.until_ns / 1e9)

    def call(self, number: int) -> Call:
        """A message of that layer."""
        return Call(self, number)

    def take_turns(self) -> list[Turn]:
        """Layers that went well since they were taken last; what observes the clients is told of them."""
        count, self._turn = self._turn, 0
        taken, self._taken = self._taken, []
        if not count:
            return taken
        rows = self._turns[:count].tolist()
        told = [_told([ask.take_told(count) for ask in asks]) for asks in self._of]
        return taken + [
            Turn(asks / 1e9, asked / 1e9, waits / 1e9, came / 1e9, of_all)
            for (asks, asked, waits, came), *of_all in zip(rows, *told, strict=True)
        ]

    @property
    def asking_s(self) -> float:
        """What it took to send the last layer."""
        row = self._turns[self._turn]
        return float(row[1] - row[0]) / 1e9

    def end(self) -> None:
        """Gives connections back, and closes those whose answers nobody waits for."""
        self._opened = False
        for ask in self._asks:
            ask.end()

    def _repeated(self) -> bool:
        """Whether all is well with them that were sent to connections that had gone stale, once more."""
        for number, ask in enumerate(self._asks):
            if not ask.under_way and ask.reopen(self.deadline, used=self._turn > 0 or bool(self._taken)):
                self._library.ask_again(self._address, number)
        return all(ask.under_way for ask in self._asks)

    def _gather(self, sources: Sequence[Source]) -> native.Gather:
        heads = self.whole.lse.shape[1]
        gather = native.Gather(
            out=self.whole.out.data_ptr(),
            lse=self.whole.lse.data_ptr(),
            rows=len(self.whole.lse),
            heads=heads,
        )
        if not sources:
            return gather
        items: list[list[tuple[int, int]]] = [[] for _ in range(len(self.whole.lse))]
        for number, source in enumerate(sources):
            for index, row in zip(source.index, source.rows, strict=True):
                items[row].append((number, index))
        starts = [0]
        for some in items:
            starts.append(starts[-1] + len(some))
        flat = [item for some in items for item in some]
        columns = (
            [source.partial.out.data_ptr() for source in sources],
            [source.partial.lse.data_ptr() for source in sources],
            starts,
            [source for source, _ in flat],
            [index for _, index in flat],
        )
        tensors = [torch.tensor(column, dtype=torch.int64) for column in columns]
        parts = torch.empty(2 * max(map(len, items)), dtype=torch.int64)
        self._kept += [*tensors, parts, sources]
        gather.parts = parts.data_ptr()
        gather.outs, gather.lses, gather.starts, gather.sources, gather.indices = (
            tensor.data_ptr() for tensor in tensors
        )
        return gather


class Call:
    """A message that was sent, or was not: what is left of it is Python's. A PendingAttention."""

    def __init__(self, asks: Asks, number: int) -> None:
        self._asks = asks
        self._message = asks._messages[number]
        self._parts = asks._of[number]
        self._first = asks._asks.index(self._parts[0])
        self._turn = asks._turn

    def check_sent(self) -> None:
        """Raises why it was not."""
        try:
            for part in self._parts:
                part.check_sent(self._turn)
        except BaseException:
            self.cancel()
            raise

    @property
    def told(self) -> Told:
        """Of what has come of it."""
        return _told([[part.told[self._turn].tolist()] for part in self._parts])[0]

    def finish_told(self) -> tuple[Partial, data_pb2.AttendLayerReply]:
        asks = self._asks
        try:
            for number, part in enumerate(self._parts, self._first):
                if part.unread:
                    asks._library.receive_one(asks._address, number)
                part.check_answered(self._turn, asks.deadline)
        except BaseException:
            self.cancel()
            raise
        told = self.told
        reply = data_pb2.AttendLayerReply(queued_us=told.queued_us, computed_us=told.computed_us)
        return self._message.answer, reply

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()


def _told(columns: Sequence[Sequence[Sequence[int]]]) -> list[Told]:
    """Of a message's recipients, as kvc_told; of the message, turn by turn."""
    told = []
    for rows in zip(*columns, strict=True):
        _, _, _, _, queued_us, computed_us = rows[0] if len(rows) == 1 else max(rows, key=_computed_us)
        told.append(Told(rows[0][0] / 1e9, rows[0][2] / 1e9, rows[-1][3] / 1e9, queued_us, computed_us))
    return told


def _computed_us(row: Sequence[int]) -> int:
    return row[5]
