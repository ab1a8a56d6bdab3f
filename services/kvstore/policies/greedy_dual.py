"""GDSF: greedy dual with size and frequency (Cherkasova, 1998)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Generic

from services.kvstore.policies.base import K, QueueBlind

_ATTENTION_DEPTH = 256  # blocks of context at which attention costs as much as all the rest of a block


class GreedyDual(QueueBlind, Generic[K]):
    """Priority is uses × cost / size, above the priority of what went last: old fame fades.

    All blocks of a model have one size. Cost is what computing the block again would take: a constant, and
    attention over all blocks before it.
    """

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._cost: dict[K, float] = {}
        self._priority: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._floor = 0.0
        self._pushes = 0

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        for depth in range(len(run) - 1, -1, -1):
            block = run[depth]
            if block in self._uses:
                self._uses[block] += depth < hits
                self._cost[block] = 1.0 + depth / _ATTENTION_DEPTH
                self._rank(block)

    def admit(self, block: K, after: K | None = None) -> None:
        self._uses.setdefault(block, 1)
        self._cost.setdefault(block, 1.0)
        self._rank(block)

    def remove(self, block: K) -> None:
        if self._uses.pop(block, None) is not None:
            del self._cost[block]
            self._floor = max(self._floor, self._priority.pop(block))

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        passed, found = [], None
        while self._heap:
            entry = self._heap[0]
            if self._priority.get(entry[2]) == entry[0]:
                if not pinned(entry[2]):
                    found = entry[2]
                    break
                passed.append(entry)
            heapq.heappop(self._heap)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def _rank(self, block: K) -> None:
        self._priority[block] = self._floor + self._uses[block] * self._cost[block]
        self._pushes += 1
        heapq.heappush(self._heap, (self._priority[block], self._pushes, block))
        if len(self._heap) > 4 * len(self._uses) + 64:
            self._heap = [entry for entry in self._heap if self._priority.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
