"""A clock that stands still until a test sets it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
