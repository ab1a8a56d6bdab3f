"""A lock that is granted in the order in which it was asked for, and its queue without I/O."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvcommons.errors import DeadlineExceeded
from kvcommons.transport.deadline import Deadline

K = TypeVar("K")


class FairQueue(Generic[K]):
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


class FairLock:
    """The lock of a replica of the model: one slice at a time, first come, first served. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: FairQueue[threading.Event] = FairQueue()

    @contextmanager
    def within(self, deadline: Deadline) -> Iterator[None]:
        """Raises DeadlineExceeded."""
        granted = threading.Event()
        with self._lock:
            mine = self._queue.ask(granted)
        if not mine and not granted.wait(deadline.left()):
            with self._lock:
                mine = not self._queue.leave(granted)
            if not mine:
                raise DeadlineExceeded("other batches computed on the model until the deadline")
        try:
            yield
        finally:
            with self._lock:
                successor = self._queue.ended()
            if successor is not None:
                successor.set()
