"""The attention exchange on the native path: what creditor.cpp and debtor.cpp offer, and their outcomes."""

from __future__ import annotations

import ctypes
import enum
import functools
import time
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

from kvcommons.attention.native import library
from kvcommons.attention.native.library import Kernel
from kvcommons.attention.native.structures import STRUCTURES


class TransferOutcome(enum.IntEnum):
    """How a transfer, or serving, has ended (frames.h)."""

    DONE = 0  # all was moved; or so many layers were served that they are to be reported
    LATE = 1  # the wait's end came first; or no layer came for a while
    GONE = 2  # the peer's end, or a failure
    CHANGED = 3  # a segment of a plan was changed by somebody else
    OTHER = 4  # something came that Python has to look at


class ServingStage(enum.IntEnum):
    """Where serving a layer failed."""

    NONE = 0
    RECEIVING = 1
    QUEUING = 2
    SENDING = 3


class Library:
    """The functions, each with the address of its structure. `at_once` has those that take no time: to give
    the interpreter's lock away for them may take a switch of threads."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.serves = library.serves  # whether layers over such KV can be the kernel's
        whole, at_once = kernel._library, ctypes.PyDLL(kernel._library._name)
        self.serve: Any = whole.kvc_serve  # kvc_serving -> TransferOutcome
        self.take: Any = whole.kvc_take  # kvc_allowance, until_ns -> what `give` takes; 0: too late
        self.try_take: Any = at_once.kvc_take
        self.give: Any = at_once.kvc_give
        self.grant: Any = at_once.kvc_grant  # kvc_allowance, granted_ns, counts
        self.give_way: Any = whole.kvc_give_way  # kvc_allowance, until_ns
        self.end_access: Any = at_once.kvc_end_access  # kvc_plan.access -> whether no layer is under way
        self.send: Any = whole.kvc_send  # kvc_layer, first -> the first that could not be sent, or -1
        self.receive: Any = whole.kvc_receive  # kvc_layer, first -> the first that failed, or -1
        for call in (self.take, self.try_take, self.send, self.receive):
            call.argtypes, call.restype = (c_void_p, c_int64), c_int64
        for call in (self.serve, self.end_access):
            call.argtypes, call.restype = (c_void_p,), c_int32
        for call in (self.give, self.give_way):
            call.argtypes, call.restype = (c_void_p, c_int64), None
        self.grant.argtypes, self.grant.restype = (c_void_p, c_int64, c_int32), None


@functools.cache
def of(kernel: Kernel) -> Library:
    return Library(kernel)


class NativeAllowance:
    """kvcommons.holder.allowance's, which layers on the native path spend too. Thread-safe."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._struct = STRUCTURES["kvc_allowance"](granted_ns=_NS_MAX)
        self.address = ctypes.addressof(self._struct)

    @property
    def spent_s(self) -> float:
        return float(self._struct.spent_ns) / 1e9

    @property
    def exhausted(self) -> bool:
        return bool(self._struct.spent_ns >= self._struct.granted_ns)

    @property
    def outstanding(self) -> int:
        return int(self._struct.outstanding)

    def grant(self, until_s: float | None, *, counts: bool) -> None:
        granted_ns = _NS_MAX if until_s is None else int(until_s * 1e9)
        self._library.grant(self.address, granted_ns, counts)

    def take(self, timeout_s: float) -> int:
        permit = self._library.try_take(self.address, 0)
        if not permit:
            permit = self._library.take(self.address, time.monotonic_ns() + int(timeout_s * 1e9))
        return int(permit)

    def give(self, permit: int) -> None:
        self._library.give(self.address, permit)

    def give_way(self, timeout_s: float) -> None:
        self._library.give_way(self.address, time.monotonic_ns() + int(timeout_s * 1e9))


_NS_MAX = (1 << 63) - 1
