"""The time, passed in wherever something depends on it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """For spans of time."""

    def now_ms(self) -> int:
        """For what is stored: milliseconds since 1970."""


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def now_ms(self) -> int:
        return int(time.time() * 1000)
