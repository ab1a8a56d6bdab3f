"""The structures of ask.h, and what is called with them."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

from kvcommons.attention.native.library import Kernel, chosen

# wire.h: how a transfer ended.
DONE, LATE, GONE, OTHER = 0, 1, 2, 4
# Where an ask's head is written to, before its segments, beside what `trace` takes: a frame's header, and
# what changes from layer to layer.
HEAD_ROOM = 64
# What may come of an answer before it is known whose business it is.
REPLY_AHEAD = 64

TOLD = ("began", "sending", "waits", "came", "queued_us", "computed_us")  # kvc_told, int64 each
TURN = ("asks", "asked", "waits", "came")  # kvc_turn


class Ask(ctypes.Structure):
    """`kvc_ask`."""

    _fields_ = (
        ("head", c_void_p), ("trace", c_void_p), ("rows", c_void_p), ("appended", c_void_p),
        ("payload", c_void_p), ("out", c_void_p), ("lse", c_void_p), ("told", c_void_p), ("parts", c_void_p),
        ("head_room", c_int64), ("segments_bytes", c_int64), ("trace_bytes", c_int64), ("row_count", c_int64),
        ("appended_count", c_int64), ("first_head", c_int64), ("heads", c_int64), ("first_kv_head", c_int64),
        ("kv_heads", c_int64), ("out_row", c_int64), ("lse_row", c_int64), ("descriptor", c_int64),
        ("ask_ns", c_int64), ("moved", c_int64), ("outcome", c_int32), ("error", c_int32),
        ("under_way", c_int32), ("reply_head", c_int32), ("long_wait", c_int32),
    )  # fmt: skip


class Gather(ctypes.Structure):
    """`kvc_gather`."""

    _fields_ = (
        ("outs", c_void_p), ("lses", c_void_p), ("starts", c_void_p), ("sources", c_void_p),
        ("indices", c_void_p), ("out", c_void_p), ("lse", c_void_p), ("parts", c_void_p), ("rows", c_int64),
        ("heads", c_int64),
    )  # fmt: skip


class Layers(ctypes.Structure):
    """`kvc_layers`."""

    _fields_ = (
        ("asks", c_void_p), ("turns", c_void_p), ("q", c_void_p), ("shifted", c_void_p), ("k", c_void_p),
        ("v", c_void_p), ("kv", c_void_p), ("own", c_void_p), ("own_places", c_void_p), ("gather", Gather),
        ("q_row", c_int64), ("q_head", c_int64), ("shifted_row", c_int64), ("shifted_head", c_int64),
        ("k_row", c_int64), ("k_head", c_int64), ("v_row", c_int64), ("v_head", c_int64), ("count", c_int64),
        ("dim", c_int64), ("kv_heads", c_int64), ("own_count", c_int64), ("kv_layer_bytes", c_int64),
        ("layer", c_int64), ("turn", c_int64), ("deadline_ns", c_int64), ("until_ns", c_int64),
        ("is_bf16", c_int32), ("variant", c_int32),
    )  # fmt: skip


class Library:
    """What ask.cpp offers, each with the address of a `Layers`."""

    def __init__(self, kernel: Kernel) -> None:
        library = kernel._library
        self.variant = kernel._index
        self.ask_all: Any = library.kvc_ask_all  # layer, turn -> how many could not be asked
        self.ask_again: Any = library.kvc_ask_again  # number -> whether it failed
        self.receive_all: Any = library.kvc_receive_all  # -> the first that failed, or -1
        self.receive_one: Any = library.kvc_receive_one  # number -> whether it failed
        self.ask_all.argtypes = (c_void_p, c_int64, c_int64)
        self.ask_again.argtypes = self.receive_one.argtypes = (c_void_p, c_int64)
        self.receive_all.argtypes = (c_void_p,)
        for call in (self.ask_all, self.ask_again, self.receive_all, self.receive_one):
            call.restype = c_int64


def find() -> Library | None:
    """None: there is no compiled kernel, or the environment asks for torch's operators."""
    kernel = chosen()
    return None if kernel is None else _library(kernel)


@functools.cache
def _library(kernel: Kernel) -> Library:
    return Library(kernel)
