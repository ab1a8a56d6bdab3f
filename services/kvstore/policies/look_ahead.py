"""The queue's knowledge put above any policy: AttentionStore's scheduler-aware eviction (§3.3.2)."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Generic

from services.kvstore.policies.base import K, Policy


class LookAhead(Generic[K]):
    """Blocks that a queued job will use are exempt; the others go as `blind` says.

    Where all are exempt, the one whose next use is furthest goes, of a run the deepest first. `blind` never
    sees exempt blocks: they are admitted to it when the last job that wants them is served.
    """

    def __init__(self, blind: Policy[K]) -> None:
        self._blind = blind
        self._held: set[K] = set()
        self._jobs: dict[K, list[int]] = {}  # of the queued jobs' blocks: who wants it, soonest first
        self._depth: dict[K, int] = {}
        self._exempt: list[tuple[int, int, int, K]] = []  # heap, furthest use and deepest first
        self._queued: set[int] = set()
        self._pushes = 0

    def expect(self, job: int, run: Sequence[K]) -> None:
        self._queued.add(job)
        for depth, block in enumerate(run):
            jobs = self._jobs.get(block)
            if jobs is None:
                jobs = self._jobs[block] = []
                if block in self._held:
                    self._blind.remove(block)
            insort(jobs, job)
            self._depth[block] = depth
            if jobs[0] == job and block in self._held:
                self._push(block)

    def forget(self, job: int, run: Sequence[K]) -> None:
        if job not in self._queued:
            return
        self._queued.discard(job)
        for block in reversed(run):
            jobs = self._jobs.get(block)
            if jobs is None or job not in jobs:
                continue
            jobs.remove(job)
            if not jobs:
                del self._jobs[block]
                del self._depth[block]
                if block in self._held:
                    self._blind.admit(block)
            elif block in self._held:
                self._push(block)

    def move(self, job: int, to: int, run: Sequence[K]) -> None:
        if job not in self._queued:
            return
        self._queued.discard(job)
        self._queued.add(to)
        for block in run:
            jobs = self._jobs[block]
            jobs.remove(job)
            insort(jobs, to)
            if block in self._held:
                self._push(block)

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        self.forget(job, run)
        self._blind.use(job, run, hits)

    def admit(self, block: K, after: K | None = None) -> None:
        self._held.add(block)
        if block in self._jobs:
            self._push(block)
        else:
            self._blind.admit(block)

    def remove(self, block: K) -> None:
        if block in self._held:
            self._held.discard(block)
            self._blind.remove(block)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        found = self._blind.victim(pinned)
        return self._furthest(pinned) if found is None else found

    def _push(self, block: K) -> None:
        self._pushes += 1
        heapq.heappush(self._exempt, (-self._jobs[block][0], -self._depth[block], self._pushes, block))
        if len(self._exempt) > 4 * len(self._held) + 64:
            self._exempt = [entry for entry in self._exempt if self._stands(entry)]
            heapq.heapify(self._exempt)

    def _stands(self, entry: tuple[int, int, int, K]) -> bool:
        """Whether an entry of the heap still says what is the case."""
        jobs = self._jobs.get(entry[3])
        return jobs is not None and jobs[0] == -entry[0] and entry[3] in self._held

    def _furthest(self, pinned: Callable[[K], bool]) -> K | None:
        passed, found = [], None
        while self._exempt:
            entry = self._exempt[0]
            if self._stands(entry):
                if not pinned(entry[3]):
                    found = entry[3]
                    break
                passed.append(entry)
            heapq.heappop(self._exempt)
        for entry in passed:
            heapq.heappush(self._exempt, entry)
        return found
