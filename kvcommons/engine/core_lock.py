"""The lock of a host's cores: engines that share them compute one after another, each with all of them. Two
teams of threads at once on the same cores are several times slower.

It is three bytes of a file, locked by the kernel (`lockf`), which unlocks what a process had that dies. It is
about speed alone: whoever does not get it in time computes without it.
"""

from __future__ import annotations

import enum
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcommons.errors import InvalidInput

# It is held for an iteration, or a layer of a chunk: what takes longer is stuck, or too slow to wait for.
DEADLINE_S = 1.0
# Between two looks: the kernel's own wait has no deadline.
POLL_S = 0.0005
_FLOCK = struct.Struct("hhqqi")  # Linux's struct flock: type, whence, start, length, process


class _Byte(enum.IntEnum):
    CORES = 0  # locked by whoever computes
    NEXT = 1  # by whoever computes next: nobody who has just released the cores is quicker
    URGENT = 2  # shared by those who wait and are urgent


class CoreLock:
    """One process's end; for one thread at a time. Who is urgent (an iteration in which sequences generate)
    comes before others that wait (chunks of prompts), of which each is overtaken once at most."""

    def __init__(self, path: Path, *, deadline_s: float = DEADLINE_S) -> None:
        """`path` is the same for all engines of the host; it is made where it is not there. Raises
        InvalidInput where it cannot be opened."""
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - until `close`
        except OSError as error:
            raise InvalidInput(
                f"core_lock = {str(path)!r} cannot be opened: {error.strerror}; name a file that this "
                "process may write, in a folder that is there",
                param="core_lock",
            ) from error
        self._deadline_s = deadline_s
        self._late = False  # it was not acquired the last time
        self.held = False
        self.waited_s = 0.0  # in all
        self.timeouts = 0

    def close(self) -> None:
        """An engine that could not be stopped computes without it."""
        self._file.close()

    def acquire(self, *, urgent: bool) -> bool:
        """False where it cannot be had within the deadline, and from then on until it can be had at once: who
        holds it is stuck. `release` follows in any case."""
        began_s = time.monotonic()
        try:
            self.held = self._acquire(urgent, began_s + (0 if self._late else self._deadline_s))
        finally:
            self._unlock(_Byte.NEXT)
            self._unlock(_Byte.URGENT)
            self.waited_s += time.monotonic() - began_s
        self._late = not self.held
        self.timeouts += self._late
        return self.held

    def release(self) -> None:
        self.held = False
        self._unlock(_Byte.CORES)

    @contextmanager
    def released(self) -> Iterator[None]:
        """In the middle of a chunk: there is nothing to compute, or others come first."""
        held = self.held
        if held:
            self.release()
        try:
            yield
        finally:
            if held:
                self.acquire(urgent=False)

    @property
    def wanted(self) -> bool:
        """Whether another process waits for it."""
        return self._locked(_Byte.NEXT)

    @property
    def urgently_wanted(self) -> bool:
        return self._locked(_Byte.URGENT)

    def _acquire(self, urgent: bool, until_s: float) -> bool:
        if urgent:
            self._try(_Byte.URGENT, fcntl.LOCK_SH)
        overtaken = urgent
        while self._await(_Byte.NEXT, until_s):
            while overtaken or not self.urgently_wanted:
                if self._try(_Byte.CORES):
                    if overtaken or not self.urgently_wanted:  # it may have been held up since it looked
                        return True
                    self._unlock(_Byte.CORES)
                elif time.monotonic() >= until_s:
                    return False
                else:
                    time.sleep(POLL_S)
            self._unlock(_Byte.NEXT)
            overtaken = True
            self._give_way(until_s)
        return False

    def _give_way(self, until_s: float) -> None:
        """Waits until who is urgent is the next: on a busy machine it takes a while until it looks."""
        while self.urgently_wanted and not self.wanted and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def _await(self, byte: _Byte, until_s: float) -> bool:
        while not self._try(byte):
            if time.monotonic() >= until_s:
                return False
            time.sleep(POLL_S)
        return True

    def _try(self, byte: _Byte, kind: int = fcntl.LOCK_EX) -> bool:
        """False, too, where the kernel has no locks left: no sequence ends for that."""
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, byte)
        except (OSError, ValueError):  # ValueError: it is closed
            return False
        return True

    def _locked(self, byte: _Byte) -> bool:
        """By another process. It is asked, not tried: a lock held for a moment would mislead the others."""
        mine = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        with suppress(OSError, ValueError):
            kind, *_ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, mine))
            return bool(kind != fcntl.F_UNLCK)
        return False

    def _unlock(self, byte: _Byte) -> None:
        with suppress(OSError, ValueError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


class CoreLockCollector(Collector):
    """What waiting for it cost. The lock counts by itself; a scrape reads it."""

    def __init__(self, lock: CoreLock | None) -> None:
        self._lock = lock

    def collect(self) -> Iterator[Metric]:
        lock = self._lock
        yield CounterMetricFamily(
            "kvcommons_core_lock_wait_seconds", "Iterations waited for the host's cores (core_lock).",
            value=lock.waited_s if lock else 0.0,
        )  # fmt: skip
        yield CounterMetricFamily(
            "kvcommons_core_lock_timeouts", "Iterations that went on without the host's cores.",
            value=lock.timeouts if lock else 0,
        )  # fmt: skip
