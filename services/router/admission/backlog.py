"""Prompts under way, and what they mean for the next one. Pure."""

from __future__ import annotations

from itertools import count


class PromptBacklog:
    """Prompts that were started and have no token yet, by what computing them takes. Of this router alone."""

    def __init__(self) -> None:
        self._numbers = count()
        self._seconds: dict[int, float] = {}

    def begin(self, seconds: float) -> int:
        """A prompt was started; its number, for `end`."""
        number = next(self._numbers)
        self._seconds[number] = seconds
        return number

    def end(self, number: int) -> None:
        """It has its first token, or never will; to say so again changes nothing."""
        self._seconds.pop(number, None)

    def ahead_s(self, seconds: float, *, instances: int) -> float:
        """How long a prompt of `seconds` waits for them, where so many instances compute: for shorter ones in
        all, for longer ones about as long as it takes itself (`Scheduler.spans`)."""
        return sum(min(one, seconds) for one in self._seconds.values()) / max(instances, 1)
