"""Random eviction: the measure of what a policy's knowledge is worth."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Generic

from services.kvstore.policies.base import K, QueueBlind

_DRAWS = 16  # before the blocks are gone through in order, for one that is not pinned


class Chance(QueueBlind, Generic[K]):
    """Each block is as likely to go as any other. The random source is passed in."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._blocks: list[K] = []
        self._place: dict[K, int] = {}

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        """Makes no difference."""

    def admit(self, block: K, after: K | None = None) -> None:
        if block not in self._place:
            self._place[block] = len(self._blocks)
            self._blocks.append(block)

    def remove(self, block: K) -> None:
        place = self._place.pop(block, None)
        if place is None:
            return
        last = self._blocks.pop()
        if place < len(self._blocks):
            self._blocks[place] = last
            self._place[last] = place

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        for _ in range(_DRAWS if self._blocks else 0):
            block = self._source.choice(self._blocks)
            if not pinned(block):
                return block
        return next((block for block in self._blocks if not pinned(block)), None)
