"""Whose chunk is computed next: a pure class, no clock and no I/O.

Jobs are admitted to memory first come, first served. Admitted jobs take turns at chunk borders: every other
chunk belongs to the oldest job, the chunks between to the one with the fewest tokens left. So a short prompt
waits for two chunks at most, however long the prompts before it are, and the oldest job always gets at least
half of the machine: nobody starves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcommons.errors import Overloaded


@dataclass(slots=True, kw_only=True)
class _Entry:
    tokens_left: int
    deadline_s: float


class JobScheduler:
    """Queue and turn order of jobs, which it knows by number.

    `max_queue` bounds the jobs that wait for memory, `max_running` those that hold it.
    """

    def __init__(self, *, max_queue: int, max_running: int) -> None:
        self._max_queue = max_queue
        self._max_running = max_running
        self._waiting: dict[int, _Entry] = {}
        self._running: dict[int, _Entry] = {}
        self._oldest_had_turn = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, job: int, *, tokens: int, deadline_s: float) -> None:
        """Queues a job of `tokens` that is worth nothing after `deadline_s`. Raises Overloaded."""
        if len(self._waiting) >= self._max_queue:
            raise Overloaded(
                f"{len(self._waiting)} prompts wait for this prefill instance, its most: retry later",
                retry_after_ms=1000,
            )
        self._waiting[job] = _Entry(tokens_left=tokens, deadline_s=deadline_s)

    def admissible(self) -> list[int]:
        """Waiting jobs in the order in which memory is to be offered to them; empty while enough run."""
        return [] if len(self._running) >= self._max_running else list(self._waiting)

    def admit(self, job: int, *, tokens_left: int) -> None:
        entry = self._waiting.pop(job)
        entry.tokens_left = tokens_left
        self._running[job] = entry

    def progress(self, job: int, *, tokens_left: int) -> None:
        """A chunk of a running job is done, or it was set back."""
        self._running[job].tokens_left = tokens_left

    def remove(self, job: int) -> None:
        """The job ended, wherever it was; unknown ones are ignored."""
        self._waiting.pop(job, None)
        self._running.pop(job, None)

    def expired(self, now_s: float) -> list[int]:
        """Jobs whose deadline has passed."""
        every = {**self._waiting, **self._running}
        return [job for job, entry in every.items() if entry.deadline_s <= now_s]

    def next(self, ready: Callable[[int], bool]) -> int | None:
        """The running job whose chunk is next, among those that are `ready` (history there, if they wait for
        any)."""
        able = [job for job in self._running if ready(job)]
        if not able:
            return None
        self._oldest_had_turn = not self._oldest_had_turn
        if self._oldest_had_turn:
            return able[0]
        return min(able, key=lambda job: self._running[job].tokens_left)
