"""A history that each stage loads for its own layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from kvcommons.engine.history import Histories, Load
from kvcommons.transport.deadline import Deadline

Narrow = Callable[[int], None]
"""Told how many blocks the other stages' loads go on with."""


class StagedLoad(Load):
    """The first stage's part of a load, and what the others say of theirs: no layer counts as arrived before
    all of them are there in all other stages, for a chunk that has entered must not wait in a later one."""

    def __init__(self, own: Load, followers: Collection[int], narrow: Narrow) -> None:
        super().__init__(own.bytes)
        self._own = own
        self._narrow = narrow
        self._changed = threading.Condition()
        self._awaited = set(followers)
        self._blocks = 1 << 31  # that all others who have ended have
        self._others_s = 0.0

    @property
    def awaits_others(self) -> bool:
        return bool(self._awaited)

    @property
    def seconds(self) -> float:
        return max(self._own.seconds, self._others_s)

    @property
    def pace_s(self) -> float:
        return self._own.pace_s

    @property
    def layers_arrived(self) -> int:
        """As long as other stages wait for theirs, the last one has not."""
        arrived = self._own.layers_arrived
        return max(arrived - 1, 0) if self._awaited else arrived

    @property
    def ended(self) -> bool:
        return self._own.ended and not self._awaited

    def ended_at(self, stage: int, blocks: int) -> None:
        """Another stage has so many leading blocks, and no more will come. Any thread."""
        with self._changed:
            self._awaited.discard(stage)
            self._blocks = min(self._blocks, blocks)
            self._others_s = time.monotonic() - self._started_s
            self._changed.notify_all()

    def release(self) -> None:
        self._own.release()

    def narrow(self, blocks: int) -> None:
        self._own.narrow(blocks)
        self._narrow(blocks)

    def wait(self, layer: int, deadline: Deadline) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._awaited, deadline.left()):
                return 0
        return min(self._own.wait(layer, deadline), self._blocks)

    def arrived(self, layer: int, within_s: float = 0.0) -> bool:
        until = Deadline.after(within_s)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._awaited, until.left()):
                return False
        return self._own.arrived(layer, until.left())

    def cancel(self) -> None:
        """What the other stages are planned after this finds nothing written to the blocks any more, either:
        they carry it out in order."""
        self._own.cancel()
        self._narrow(0)


# Numbers the load and has the other stages begin theirs: (store, ids, blocks, deadline, own load).
Begin = Callable[[str, Sequence[bytes], Sequence[int], Deadline, Load], StagedLoad]


class StagedHistories(Histories):
    """Of the first stage."""

    def __init__(self, own: Histories, begin: Begin) -> None:
        self._own = own
        self._begin_others = begin

    def load(
        self,
        *,
        store: str,
        ids: Sequence[bytes],
        blocks: Sequence[int],
        deadline: Deadline,
        ahead: int | None = None,
    ) -> Load:
        """All layers at once, whatever may be loaded `ahead`: a prompt enters when it has all of them."""
        own = self._own.load(store=store, ids=ids, blocks=blocks, deadline=deadline)
        return self._begin_others(store, ids, blocks, deadline, own)
