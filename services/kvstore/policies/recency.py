"""Policies that order by time: least recently used, first in first out, and LRU of two segments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from services.kvstore.policies.base import K, QueueBlind


def first_free(blocks: Iterable[K], pinned: Callable[[K], bool]) -> K | None:
    """The first that is not pinned."""
    return next((block for block in blocks if not pinned(block)), None)


class Fifo(QueueBlind, Generic[K]):
    """The block that came first goes first, used or not."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # a dict finds its first entry slowly

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        """Makes no difference."""

    def admit(self, block: K, after: K | None = None) -> None:
        self._order[block] = None

    def remove(self, block: K) -> None:
        self._order.pop(block, None)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        return first_free(self._order, pinned)


class Lru(Fifo[K]):
    """Least recently used first; of a run that was used together, the deepest first."""

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        for block in reversed(run):
            if block in self._order:
                self._order.move_to_end(block)


class SegmentedLru(QueueBlind, Generic[K]):
    """Two LRU lists: a block is on probation until it is used again, and protected then.

    Protected are at most `protected_share` of the blocks in the tier; who falls out is on probation again
    (Karedla, Love and Wherry, 1994).
    """

    def __init__(self, *, protected_share: float = 0.8) -> None:
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()
        self._share = protected_share

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        for depth in range(len(run) - 1, -1, -1):
            block = run[depth]
            if block in self._protected:
                self._protected.move_to_end(block)
            elif block not in self._probation:
                continue
            elif depth < hits:
                del self._probation[block]
                self._protected[block] = None
            else:
                self._probation.move_to_end(block)
        free = self._share * (len(self._probation) + len(self._protected))
        while len(self._protected) > free:
            self._probation[self._protected.popitem(last=False)[0]] = None

    def admit(self, block: K, after: K | None = None) -> None:
        self._probation[block] = None

    def remove(self, block: K) -> None:
        self._probation.pop(block, None)
        self._protected.pop(block, None)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        found = first_free(self._probation, pinned)
        return first_free(self._protected, pinned) if found is None else found
