"""What others may have of a holder's cores: one computation at a time, within what its owner grants.

The owner decides how much is granted (AttentionBudget); whoever computes for others only spends it, on the
native path or in Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from kvcommons.attention.native.exchange import Library, NativeAllowance
from kvcommons.errors import DeadlineExceeded
from kvcommons.transport.deadline import Deadline

BUSY = "the holder was busy until the deadline: spread the load over more holders"
EXHAUSTED = (
    "the holder's own sequences left no time for others until the deadline: bring the KV home, or spread "
    "it over more holders"
)


class Allowance(Protocol):
    """Thread-safe. At first there is no limit."""

    @property
    def spent_s(self) -> float:
        """By computations that counted and have ended, from when they had been granted to their end: to wait
        for the cores counts."""

    @property
    def exhausted(self) -> bool:
        """Whether no computation may begin."""

    @property
    def outstanding(self) -> int:
        """Computations that wait to begin, or are under way."""

    def grant(self, until_s: float | None, *, counts: bool) -> None:
        """Computations may begin while less than `until_s` is spent; None: always. Those that begin from now
        on are counted, or are not."""

    def take(self, timeout_s: float) -> int:
        """Waits until the cores are free and something of what was granted is left; what `give` takes. 0: it
        has not come in time."""

    def give(self, permit: int) -> None:
        """The computation has ended."""

    def give_way(self, timeout_s: float) -> None:
        """Waits until no computation is under way and none that may begin waits, so long at most."""


class PlainAllowance:
    """Without the compiled kernel, where Python computes everything."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._held = False
        self._outstanding = 0
        self._counts = False
        self._granted_s: float | None = None
        self._spent_s = 0.0
        self._began_s: dict[int, float | None] = {}  # of those under way; None: it does not count
        self._number = 0

    @property
    def spent_s(self) -> float:
        return self._spent_s

    @property
    def exhausted(self) -> bool:
        return self._granted_s is not None and self._spent_s >= self._granted_s

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def grant(self, until_s: float | None, *, counts: bool) -> None:
        with self._changed:
            self._granted_s, self._counts = until_s, counts
            self._changed.notify_all()

    def take(self, timeout_s: float) -> int:
        until = Deadline.after(timeout_s)
        with self._changed:
            asked_s = self._clock()
            self._outstanding += 1
            while self._held or self.exhausted:
                was_exhausted = self.exhausted
                if not self._changed.wait(until.left()) and until.passed():
                    self._outstanding -= 1
                    self._changed.notify_all()
                    return 0
                if was_exhausted:
                    asked_s = self._clock()
            self._held = True
            self._number += 1
            self._began_s[self._number] = asked_s if self._counts else None
            return self._number

    def give(self, permit: int) -> None:
        with self._changed:
            began_s = self._began_s.pop(permit)
            if began_s is not None:
                self._spent_s += self._clock() - began_s
            self._held = False
            self._outstanding -= 1
            self._changed.notify_all()

    def give_way(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._outstanding or (self.exhausted and not self._held), timeout_s
            )


def new_allowance(library: Library | None) -> Allowance:
    """`library`: an attention backend's `native_exchange`, whose layers spend it too."""
    return PlainAllowance() if library is None else NativeAllowance(library)


@contextmanager
def computing(allowance: Allowance, deadline: Deadline) -> Iterator[None]:
    """A computation for others. Raises DeadlineExceeded."""
    permit = allowance.take(deadline.left())
    if not permit:
        raise DeadlineExceeded(refusal(allowance))
    try:
        yield
    finally:
        allowance.give(permit)


def refusal(allowance: Allowance) -> str:
    """Why a computation has not begun in time."""
    return EXHAUSTED if allowance.exhausted else BUSY
