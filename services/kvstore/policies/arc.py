"""ARC: recency and frequency weighed against each other as it goes (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic

from services.kvstore.policies.base import K, QueueBlind
from services.kvstore.policies.recency import first_free


class Arc(QueueBlind, Generic[K]):
    """Two LRU lists, of blocks used once and of those used more often, each with a list of who left it.

    A block that comes back from the first list's past makes that list longer, and the other way round.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[K, None] = OrderedDict()
        self._often: OrderedDict[K, None] = OrderedDict()
        self._once_gone: OrderedDict[K, None] = OrderedDict()
        self._often_gone: OrderedDict[K, None] = OrderedDict()
        self._target = 0.0  # blocks of `_once`

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        for depth in range(len(run) - 1, -1, -1):
            block = run[depth]
            if block in self._often:
                self._often.move_to_end(block)
            elif block in self._once:
                if depth < hits:
                    del self._once[block]
                    self._often[block] = None
                else:
                    self._once.move_to_end(block)

    def admit(self, block: K, after: K | None = None) -> None:
        held = len(self._once) + len(self._often)
        if block in self._once_gone:
            step = max(1.0, len(self._often_gone) / len(self._once_gone))
            self._target = min(float(held), self._target + step)
            del self._once_gone[block]
            self._often[block] = None
        elif block in self._often_gone:
            step = max(1.0, len(self._once_gone) / len(self._often_gone))
            self._target = max(0.0, self._target - step)
            del self._often_gone[block]
            self._often[block] = None
        else:
            self._once[block] = None

    def remove(self, block: K) -> None:
        held = len(self._once) + len(self._often)
        for lived, gone in ((self._once, self._once_gone), (self._often, self._often_gone)):
            if block in lived:
                del lived[block]
                gone[block] = None
            while len(gone) > held:
                gone.popitem(last=False)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        first, second = self._once, self._often
        if len(self._once) <= self._target:
            first, second = second, first
        found = first_free(first, pinned)
        return first_free(second, pinned) if found is None else found
