"""S3-FIFO: three plain queues (Yang and others, SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic

from services.kvstore.policies.base import K, QueueBlind

_USES_MAX = 3


class S3Fifo(QueueBlind, Generic[K]):
    """New blocks wait in a small queue; who is used there, or is remembered, gets into the main one.

    `small_share`: of the tier. In the main queue a used block goes round again, once for each use. As many
    identities of blocks that went out of the small queue are remembered as blocks are in the main one.
    """

    def __init__(self, *, small_share: float = 0.1) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()  # block -> uses
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._share = small_share

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        for block in run[:hits]:
            for queue in (self._small, self._main):
                if block in queue:
                    queue[block] = min(_USES_MAX, queue[block] + 1)

    def admit(self, block: K, after: K | None = None) -> None:
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def remove(self, block: K) -> None:
        if self._small.pop(block, None) is not None:
            self._ghosts[block] = None
            while len(self._ghosts) > len(self._main) + 1:
                self._ghosts.popitem(last=False)
        self._main.pop(block, None)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        passed: set[K] = set()
        total = len(self._small) + len(self._main)
        while len(passed) < total:
            main = not self._small or (self._main and len(self._small) <= self._share * total)
            queue = self._main if main else self._small
            block, uses = next(iter(queue.items()))
            if pinned(block):
                passed.add(block)
                queue.move_to_end(block)
                if all(other in passed for other in queue):
                    return self._other_victim(pinned)
            elif main and uses:
                self._main[block] = uses - 1
                self._main.move_to_end(block)
            elif uses:
                del self._small[block]
                self._main[block] = 0
            else:
                return block
        return None

    def _other_victim(self, pinned: Callable[[K], bool]) -> K | None:
        """One queue is all in use: whatever is not."""
        both = (*self._small, *self._main)
        return next((block for block in both if not pinned(block)), None)
