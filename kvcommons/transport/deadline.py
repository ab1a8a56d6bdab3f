"""A point in time by which an operation ends, one way or the other."""

from __future__ import annotations

import math
import time

from kvcommons.errors import DeadlineExceeded

_MS_MAX = 2**32 - 1


class Deadline:
    """An instant on the monotonic clock. Handed down through all waits of an operation, so that their sum is
    bounded."""

    __slots__ = ("_at_s",)

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds, never below 0."""
        return self.left_at(time.monotonic())

    def left_at(self, now_s: float) -> float:
        """Seconds, where the monotonic clock shows `now_s`."""
        return max(0.0, self._at_s - now_s)

    def left_ms(self) -> int:
        """Whole milliseconds, rounded up, as a request carries it (uint32)."""
        return min(_MS_MAX, math.ceil(self.left() * 1000))

    def passed(self) -> bool:
        return time.monotonic() >= self._at_s

    def check(self, what: str = "the operation") -> None:
        """Raises DeadlineExceeded once the instant has passed; `what` did not finish."""
        if self.passed():
            raise DeadlineExceeded(f"{what} did not finish within its deadline")

    def within(self, seconds: float) -> Deadline:
        """This deadline, or `seconds` from now, whichever comes first."""
        return Deadline(min(self._at_s, time.monotonic() + seconds))
