"""Whose turn it is: a queue without I/O."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K")


class TurnQueue(Generic[K]):
    """Who computes next on one replica: first come, first served."""

    def __init__(self) -> None:
        self._running = False
        self._waiting: deque[K] = deque()

    def ask(self, who: K) -> bool:
        """Whether it may begin now; else it waits for `ended` to name it."""
        if self._running:
            self._waiting.append(who)
            return False
        self._running = True
        return True

    def ended(self) -> K | None:
        """Who runs is done. Who begins now."""
        assert self._running
        if self._waiting:
            return self._waiting.popleft()
        self._running = False
        return None

    def leave(self, who: K) -> bool:
        """Gives up waiting. False: it was named already, and is the one that runs."""
        if who not in self._waiting:
            return False
        self._waiting.remove(who)
        return True
