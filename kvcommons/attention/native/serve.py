"""Requests for partials that are served without the interpreter (serve.h): layer after layer, iteration after
iteration, what follows an answered request straight from its connection's socket.
"""

from __future__ import annotations

import ctypes
import enum
import threading
import time
from collections.abc import Sequence
from ctypes import byref, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.attention.native.library import Kernel, _Batch

# Requests that are told of at once, at most: it keeps the next one waiting for 0.4 ms.
_TOOK_MAX = 64


class Outcome(enum.IntEnum):
    """Why no more is served; of wire.h."""

    DONE = 0  # so many were served that somebody should be told
    LATE = 1  # nothing came for a while
    GONE = 2  # the peer's end, or a failure
    CHANGED = 3  # it was ended
    OTHER = 4  # something came that does not follow; it is still in the socket


class Stage(enum.IntEnum):
    """Where a request failed."""

    NONE = 0
    RECEIVING = 1
    QUEUING = 2
    SENDING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """What a request says of a segment, but for what moves on; see AttendSegment in data.proto."""

    handle: int
    epoch: int
    generation: int
    first_block: int
    append: bool
    reach: int  # tokens that its blocks take, from first_block on


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """By one call."""

    outcome: Outcome
    stage: Stage
    requests: list[tuple[Layers, float]]  # answered, and the seconds from a head to its answer's end
    failed_s: float  # of one that was not
    received_bytes: int  # of its payload


class Turn:
    """To compute, for one request at a time, natively served or not: more threads than cores are three times
    slower."""

    def __init__(self, kernel: Kernel | None) -> None:
        """Without a kernel there are only the latter."""
        self.word = c_int32(0)
        self._lock: threading.Lock | None = None
        if kernel is None:
            self._lock = threading.Lock()
            return
        self.library = kernel._library
        self.library.kvc_take_turn.argtypes = (c_void_p, c_int64)
        # For what takes no time: to give the interpreter's lock away may take a switch of threads.
        self.at_once = ctypes.PyDLL(kernel._library._name)
        self.at_once.kvc_take_turn.argtypes = (c_void_p, c_int64)

    def take(self, timeout_s: float) -> bool:
        """Whether it has come in time."""
        if self._lock is not None:
            return self._lock.acquire(timeout=timeout_s)
        if self.at_once.kvc_take_turn(byref(self.word), 0):
            return True
        until_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        return bool(self.library.kvc_take_turn(byref(self.word), until_ns))

    def give(self) -> None:
        if self._lock is not None:
            self._lock.release()
        else:
            self.at_once.kvc_give_turn(byref(self.word))


class Allowance(ctypes.Structure):
    """`kvc_allowance` of serve.h: what others may have of the cores, as both sides count it."""

    spent_ns: int
    under_way: int
    others: int
    limit_ns: int
    fresh_ns: int
    bounded: int
    waiting: int

    _fields_ = (
        ("spent_ns", c_int64), ("under_way", c_int64), ("others", c_int64), ("limit_ns", c_int64),
        ("fresh_ns", c_int64), ("bounded", c_int32), ("waiting", c_int32),
    )  # fmt: skip


class _Row(ctypes.Structure):
    """`kvc_row` of serve.h."""

    _fields_ = (
        ("handle", c_uint64), ("epoch", c_uint64), ("generation", c_uint64), ("first_block", c_uint64),
        ("appends", c_uint64), ("reach", c_int64),
    )  # fmt: skip


class _Layers(ctypes.Structure):
    """`kvc_plan` of serve.h."""

    _fields_ = (
        ("batch", _Batch), ("rows", c_void_p), ("lengths", c_void_p), ("positions", c_void_p),
        ("windows", c_void_p), ("appended", c_void_p), ("stay", c_void_p), ("layers", c_int64),
        ("layer_bytes", c_int64), ("appended_bytes", c_int64),
    )  # fmt: skip


class _Serving(ctypes.Structure):
    """`kvc_serving` of serve.h."""

    _fields_ = (
        ("plans", c_void_p), ("turn", c_void_p), ("allowance", c_void_p), ("took_ns", c_void_p),
        ("took_plan", c_void_p), ("count", c_int64), ("took_max", c_int64), ("ask_ns", c_int64),
        ("quiet_ns", c_int64), ("operation_ns", c_int64), ("took", c_int64), ("received", c_int64),
        ("failed_ns", c_int64), ("descriptor", c_int32), ("brief", c_int32), ("stage", c_int32),
    )  # fmt: skip


class Layers:
    """Requests over the same rows, one a segment: all layers of an iteration, and of later ones, where each
    row is as many tokens on. For the thread that makes it; `end` is for any."""

    def __init__(
        self,
        turn: Turn,
        kernel: Kernel,
        kv: Tensor,
        rows: Sequence[ServedRow],
        tables: Tensor,
        columns: Tensor,
        *,
        windows: Sequence[int | None],
        scale: float,
        q: Tensor,
        appended: Tensor,
        answer: Tensor,
    ) -> None:
        """kv [layers, blocks, 2, kv_heads, block_tokens, D]; tables [B, nb], as long as the rows reach;
        columns [3, B]: lengths, positions of the first keys and of the queries, of the iteration that was
        answered; memory of a request and its answer: q [B, H, D] and answer [B * H * (D + 1)] float32,
        appended [rows that append, 2 * kv_heads, D]. All contiguous."""
        layers, _, _, kv_heads, block_tokens, dim = kv.shape
        count, heads, _ = q.shape
        columns = columns.clone()  # they move on
        lengths, first_positions, positions = columns
        windows_ = torch.tensor([window or 0 for window in windows], dtype=torch.int64)
        described = (_Row * count)()
        for one, row in zip(described, rows, strict=True):
            one.handle, one.epoch, one.generation = row.handle, row.epoch, row.generation
            one.first_block, one.appends, one.reach = row.first_block, row.append, row.reach
        self._stay = c_int32(0)
        self._kept = (kv, tables, columns, windows_, described, q, appended, answer)
        self._turn = turn
        batch = _Batch(
            q=q.data_ptr(), kv=kv.data_ptr(), tables=tables.data_ptr(), lengths=lengths.data_ptr(),
            first_positions=first_positions.data_ptr(), query_positions=positions.data_ptr(),
            out=answer.data_ptr(), lse=answer.data_ptr() + 4 * q.numel(), parallel=kernel._parallel,
            q_row=q.stride(0), q_head=q.stride(1), batch=count, heads=heads, kv_heads=kv_heads, dim=dim,
            block_tokens=block_tokens, table_width=tables.shape[1], threads=torch.get_num_threads(),
            scale=scale, q_is_bf16=False, kv_is_bf16=kv.dtype == torch.bfloat16, variant=kernel._index,
        )  # fmt: skip
        self._call = _Layers(
            batch=batch, rows=ctypes.addressof(described), lengths=lengths.data_ptr(),
            positions=positions.data_ptr(), windows=windows_.data_ptr(), appended=appended.data_ptr(),
            stay=ctypes.addressof(self._stay), layers=layers, layer_bytes=kv[0].nbytes,
            appended_bytes=appended.nbytes,
        )  # fmt: skip
        self.received_bytes = q.nbytes + appended.nbytes  # of each request
        self.sent_bytes = answer.nbytes

    def begin(self) -> None:
        """Again, after an end."""
        self._stay.value = 0

    def end(self) -> bool:
        """No request is begun from now on; whether none is under way."""
        return bool(self._turn.at_once.kvc_end(byref(self._stay)))


class Serving:
    """Of a connection's requests, those that are for one of these."""

    def __init__(
        self, turn: Turn, plans: Sequence[Layers], allowance: Allowance | None, *, operation_s: float
    ) -> None:
        """`operation_s` bounds each request, whatever its own deadline. What `allowance` does not admit does
        not follow."""
        self._library, self._plans = turn.library, plans
        pointers = (c_void_p * len(plans))(*[ctypes.addressof(plan._call) for plan in plans])
        self._took_ns, self._took_plan = (c_int64 * _TOOK_MAX)(), (c_int32 * _TOOK_MAX)()
        self._kept = (turn, pointers, allowance)
        self._call = _Serving(
            plans=ctypes.addressof(pointers), turn=ctypes.addressof(turn.word),
            allowance=ctypes.addressof(allowance) if allowance is not None else None,
            took_ns=ctypes.addressof(self._took_ns), took_plan=ctypes.addressof(self._took_plan),
            count=len(plans), took_max=_TOOK_MAX, operation_ns=int(operation_s * 1e9), brief=True,
        )  # fmt: skip

    def serve(self, descriptor: int, *, ask_s: float, quiet_s: float) -> Served:
        """What comes from a socket that does not block. After DONE and LATE without a failure it can go on;
        after a failure the socket is of no more use, unless the request was QUEUING: it is to be answered
        then."""
        call = self._call
        call.descriptor, call.ask_ns, call.quiet_ns = descriptor, int(ask_s * 1e9), int(quiet_s * 1e9)
        outcome = Outcome(self._library.kvc_serve(byref(call)))
        took = zip(self._took_plan[: call.took], self._took_ns[: call.took], strict=True)
        return Served(
            outcome=outcome,
            stage=Stage(call.stage),
            requests=[(self._plans[index], took_ns / 1e9) for index, took_ns in took],
            failed_s=call.failed_ns / 1e9,
            received_bytes=call.received,
        )
