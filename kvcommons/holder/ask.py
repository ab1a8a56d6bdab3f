"""One message of a batch to one holder, from layer to layer of many iterations: see asking.py."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcommons.attention.memory import TORCH_DTYPES, byte_view
from kvcommons.attention.native import ask as native
from kvcommons.attention.partial import Partial
from kvcommons.errors import KVCommonsError
from kvcommons.pb import data_pb2
from kvcommons.rblock.layout import Layout
from kvcommons.transport.client import DataClient, Held
from kvcommons.transport.deadline import Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipient:
    """Who is asked for a partial, or for some heads of it, and in which words."""

    client: DataClient
    wording: data_pb2.AttendLayer
    query_heads: slice | None = None  # None: all
    kv_heads: slice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """To one creditor, which may be several recipients. `rows` of the batch in the message's order, those of
    them (by index) whose query is shifted, and the rows whose K and V go along; where the answer goes: out
    [rows, query_heads, head_dim] and lse [rows, query_heads]."""

    recipients: Sequence[Recipient]
    rows: Sequence[int]
    shifted: Sequence[int]
    appended: Sequence[int]
    answer: Partial


class Ask:
    """A message to one recipient: what the native code writes it from, and its connection."""

    def __init__(self, ask: native.Ask, layout: Layout, message: Message, recipient: Recipient) -> None:
        self._held = Held(recipient.client)
        self._ask = ask
        self._failure: KVCommonsError | None = None  # to connect anew
        heads, last, _ = (recipient.query_heads or slice(None)).indices(layout.query_heads)
        kv_heads, kv_last, _ = (recipient.kv_heads or slice(None)).indices(layout.kv_heads)
        rows, size = len(message.rows), TORCH_DTYPES[layout.kv_dtype].itemsize
        queries = rows * (last - heads)
        appended = 2 * len(message.appended) * (kv_last - kv_heads)
        self._asked_bytes = (queries * 4 + appended * size) * layout.head_dim
        self._answered_bytes = queries * (layout.head_dim + 1) * 4
        self._out, self._lse = message.answer.out[:, heads:last], message.answer.lse[:, heads:last]
        self.told = torch.zeros((layout.layers, len(native.TOLD)), dtype=torch.int64)
        shifted = set(message.shifted)
        numbers = [~row if i in shifted else row for i, row in enumerate(message.rows)]
        room = max(self._asked_bytes, self._answered_bytes + native.REPLY_AHEAD)
        self._kept = [
            torch.tensor(numbers, dtype=torch.int64),
            torch.tensor(message.appended, dtype=torch.int64),
            torch.empty(room, dtype=torch.uint8),
            torch.empty(16 * (2 * rows + 2), dtype=torch.uint8),
        ]
        ask.rows, ask.appended, ask.payload, ask.parts = (tensor.data_ptr() for tensor in self._kept)
        ask.told = self.told.data_ptr()
        ask.out, ask.lse = self._out.data_ptr(), self._lse.data_ptr()
        ask.out_row, ask.lse_row = self._out.stride(0), self._lse.stride(0)
        ask.row_count, ask.appended_count = rows, len(message.appended)
        ask.first_head, ask.heads = heads, last - heads
        ask.first_kv_head, ask.kv_heads = kv_heads, kv_last - kv_heads

    def word(self, wording: data_pb2.AttendLayer, trace: bytes) -> None:
        """For an iteration; `trace` is DataRequest.traceparent, serialised."""
        ask, segments = self._ask, wording.SerializeToString()
        room = native.HEAD_ROOM + len(trace)
        self._worded = ctypes.create_string_buffer(bytes(room) + segments)
        self._trace = ctypes.create_string_buffer(trace)
        ask.head, ask.head_room, ask.segments_bytes = ctypes.addressof(self._worded), room, len(segments)
        ask.trace, ask.trace_bytes = ctypes.addressof(self._trace), len(trace)

    def open(self, deadline: Deadline) -> bool:
        """Whether its connection has a socket of its own."""
        bare = self._held.open(deadline)
        if bare is None:
            return False
        self._ask.descriptor, self._ask.ask_ns = bare.descriptor, int(bare.ask_s * 1e9)
        return True

    def reopen(self, deadline: Deadline, *, used: bool) -> bool:
        """Whether it may be sent again, on a new connection."""
        if self._ask.outcome != native.GONE or self._ask.moved:
            return False
        try:
            bare = self._held.reopen(deadline, used=used)
        except KVCommonsError as error:
            self._failure = error
            return False
        if bare is not None:
            self._ask.descriptor = bare.descriptor
        return bare is not None

    @property
    def under_way(self) -> bool:
        return bool(self._ask.under_way)

    @property
    def unread(self) -> bool:
        """Sent, and nothing was received yet."""
        return bool(self._ask.under_way) and self._ask.outcome == native.DONE

    def check_sent(self, turn: int) -> None:
        """Raises why it was not."""
        if self._failure is not None:
            raise self._failure
        if self._ask.outcome != native.DONE:
            raise self._held.unsent(self._error(), self._began_s(turn))

    def check_answered(self, turn: int, deadline: Deadline) -> None:
        """After it was received, or was not; raises why it was not."""
        ask = self._ask
        if ask.outcome == native.OTHER:
            self._read(turn, deadline)
        elif ask.outcome != native.DONE:
            raise self._held.unanswered(self._error(), self._began_s(turn), self._asked_bytes)
        else:
            began_s, came_s = self._began_s(turn), float(self.told[turn, 3]) / 1e9
            self._held.observe(began_s, came_s, self._asked_bytes, self._answered_bytes)

    def take_told(self, turns: int) -> list[list[int]]:
        """Of layers that went well, as kvc_told; the client's observer is told of them."""
        rows: list[list[int]] = self.told[:turns].tolist()
        for row in rows:
            self._held.observe(row[0] / 1e9, row[3] / 1e9, self._asked_bytes, self._answered_bytes)
        return rows

    def cancel(self) -> None:
        """Nobody waits for the answer. What was sent in part leaves a connection that no request may follow
        on."""
        if self._ask.under_way or self._ask.outcome != native.DONE:
            self._ask.under_way = 0
            self._held.drop()

    def end(self) -> None:
        """Gives the connection back."""
        self.cancel()
        self._ask.outcome, self._failure = native.DONE, None
        self._held.give_back()

    def _read(self, turn: int, deadline: Deadline) -> None:
        """An answer that is an error, or that says that the peer leaves."""
        ask = self._ask
        received = ctypes.string_at(ask.payload, ask.moved)
        ask.under_way = 0
        call = self._held.answered(received, deadline, self._began_s(turn), self._asked_bytes)
        out, lse = self._out.contiguous(), self._lse.contiguous()
        reply = call.finish([byte_view(out), byte_view(lse)]).attend_layer
        self._out.copy_(out)
        self._lse.copy_(lse)
        self.told[turn, 4:] = torch.tensor([reply.queued_us, reply.computed_us])

    def _error(self) -> OSError | None:
        """None: it was late."""
        code = self._ask.error
        return None if self._ask.outcome == native.LATE else OSError(code, os.strerror(code))

    def _began_s(self, turn: int) -> float:
        return float(self.told[turn, 0]) / 1e9
