"""Where the threads compute that OpenMP has for a thread of ours."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Parallel = ctypes.CFUNCTYPE(None, _Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
# Threads that have computed so lately are where they should be.
_AWAKE_S = 0.005


def parallel_address() -> int | None:
    """Of GOMP_parallel in the OpenMP that torch has loaded, whatever that is called."""
    try:
        with_its_own = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(with_its_own.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


class Team:
    """A thread and those that compute with it, each on a core of its own when work begins.

    A kernel may wake threads that have slept on one core, as those of virtual machines do that let the other
    cores rest, and they share it for tens of milliseconds. Only a team that has a thread for each core that
    the process may use is placed: which cores are left to a smaller one, others decide.
    """

    def __init__(
        self,
        parallel: int | None,
        *,
        cores: Callable[[], set[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parallel`: as `parallel_address` has it. `cores`: that the calling thread may use."""
        self._parallel = None if parallel is None else _Parallel(parallel)
        self._cores = cores or _usable
        self._clock = clock
        self._worked_s: float | None = None
        self._body = _Body(self._take_core)
        self._untaken: list[int] = []

    def begin(self) -> None:
        """It computes from here on; called by the thread whose team it is."""
        rested = self._worked_s is None or self._clock() - self._worked_s > _AWAKE_S
        if not rested or self._parallel is None:
            return
        cores, threads = self._cores(), torch.get_num_threads()
        if threads > 1 and len(cores) == threads:
            self._untaken = list(cores)
            self._parallel(self._body, None, threads, 0)
            # It is put there and not kept there: threads that it starts would be, too.
            os.sched_setaffinity(0, cores)

    def end(self) -> None:
        """It has computed."""
        self._worked_s = self._clock()

    def _take_core(self, _: object) -> None:
        """On each of its threads."""
        os.sched_setaffinity(0, {self._untaken.pop()})


def _usable() -> set[int]:
    """None where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
