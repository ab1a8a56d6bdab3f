"""What other threads ask of an engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

Command = Callable[[], None]


def reply(answer: Future[T], value: T) -> None:
    """Once, unless whoever asked has left meanwhile."""
    if answer.set_running_or_notify_cancel():
        answer.set_result(value)


class Mailbox:
    """Commands in the order in which they were posted. Thread-safe; one thread takes them."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def posted(self) -> bool:
        """Whether `take` has something to give, or was closed."""
        return bool(self._commands) or self._closed

    def post(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def close(self) -> None:
        """`take` gives None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, wait_s: float | None) -> deque[Command] | None:
        """What was posted; waits so long for something (None: for ever, until there is). None once it is
        closed."""
        with self._changed:
            if wait_s != 0:
                self._changed.wait_for(lambda: self.posted, wait_s)
            if self._closed:
                return None
            commands, self._commands = self._commands, deque()
            return commands

    def rest(self) -> deque[Command]:
        """What was posted and never taken, once it is closed."""
        with self._changed:
            commands, self._commands = self._commands, deque()
            return commands

    def put_back(self, commands: Iterable[Command]) -> None:
        """Commands that were taken and not carried out: they are the next ones."""
        with self._changed:
            self._commands.extendleft(reversed(list(commands)))
