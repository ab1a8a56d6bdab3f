"""Belady's optimum: knows every use to come. For the replay only."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from services.kvstore.policies.base import K, QueueBlind

NEVER = 1 << 62


class Belady(QueueBlind, Generic[K]):
    """The block whose next use is furthest goes first (Belady, 1966).

    `uses`: the jobs that use each block, in their order. With `deepest_first`, of blocks whose next use is
    the same the deepest goes: nothing then does better where only runs from the first block count. Without
    it, the rule is the textbook's, which takes any.
    """

    def __init__(self, uses: Mapping[K, Sequence[int]], *, deepest_first: bool) -> None:
        self._uses = uses
        self._seen: dict[K, int] = {}  # how many of its uses are over
        self._next: dict[K, int] = {}  # of the blocks in the tier
        self._depth: dict[K, int] = {}
        self._heap: list[tuple[int, int, int, K]] = []
        self._deepest_first = deepest_first
        self._pushes = 0

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        for depth, block in enumerate(run):
            self._seen[block] = self._seen.get(block, 0) + 1
            self._depth[block] = depth
            if block in self._next:
                self.admit(block)

    def admit(self, block: K, after: K | None = None) -> None:
        uses, seen = self._uses[block], self._seen.get(block, 0)
        self._next[block] = uses[seen] if seen < len(uses) else NEVER
        depth = self._depth.get(block, 0) if self._deepest_first else 0
        self._pushes += 1
        heapq.heappush(self._heap, (-self._next[block], -depth, self._pushes, block))
        if len(self._heap) > 4 * len(self._next) + 64:
            self._heap = [entry for entry in self._heap if self._next.get(entry[3]) == -entry[0]]
            heapq.heapify(self._heap)

    def remove(self, block: K) -> None:
        self._next.pop(block, None)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        passed, found = [], None
        while self._heap:
            entry = self._heap[0]
            if self._next.get(entry[3]) == -entry[0]:
                if not pinned(entry[3]):
                    found = entry[3]
                    break
                passed.append(entry)
            heapq.heappop(self._heap)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
