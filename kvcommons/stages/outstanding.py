"""What the first stage of a group waits for from the others. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Work = TypeVar("Work")  # an iteration, as whoever asks knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Blocks of a chunk, and the stages that may still read or write them."""

    blocks: tuple[int, ...]
    using: set[int]


class OutstandingWork(Generic[Work]):
    """Of one epoch: iterations that have left the first stage and not the last one, and blocks of sequences
    that some stage may still read or write, whatever has become of the sequence."""

    def __init__(self, followers: Collection[int], *, iterations_max: int) -> None:
        """`followers`: numbers of the stages behind the first."""
        self._followers = frozenset(followers)
        self._iterations_max = iterations_max
        self._under_way = deque[tuple[float, Work]]()  # since when, oldest first
        self._blocks: dict[int, tuple[int, ...]] = {}  # by sequence
        self._using: dict[int, set[int]] = {}  # stages, by sequence
        self._delivering: dict[int, set[int]] = {}  # likewise
        self._windows: dict[int, dict[int, _Window]] = {}  # by sequence, and first position

    @property
    def full(self) -> bool:
        """Whether one more iteration would only wait, and hold up whoever comes next."""
        return len(self._under_way) >= self._iterations_max

    @property
    def iterations(self) -> int:
        return len(self._under_way)

    def late(self, now_s: float, iteration_s: float) -> bool:
        """Whether one has been under way for longer than any should be."""
        return bool(self._under_way) and now_s - self._under_way[0][0] > iteration_s

    @property
    def sequences(self) -> list[int]:
        """Whose blocks are held."""
        return list(self._using)

    def passed_on(self, now_s: float, iteration: Work) -> None:
        self._under_way.append((now_s, iteration))

    def done(self, iterations: int) -> list[Work]:
        """So many of them, the oldest first. Raises ValueError for more than there are."""
        if iterations > len(self._under_way):
            raise ValueError(f"{iterations} iterations are done, of {len(self._under_way)} under way")
        return [self._under_way.popleft()[1] for _ in range(iterations)]

    def begin(self, sequence: int, blocks: Sequence[int], *, delivers: bool = True) -> None:
        """The caller holds a reference on each of these blocks until `ended` gives them back. `delivers`:
        whether stages send its KV elsewhere, and say so."""
        assert sequence not in self._using, "a sequence begins once"
        self._blocks[sequence] = tuple(blocks)
        self._using[sequence] = set(self._followers)
        self._delivering[sequence] = set(self._followers if delivers else ())

    def grow(self, sequence: int, blocks: Sequence[int]) -> None:
        """More blocks at its end, on which the caller holds a reference, too."""
        self._blocks[sequence] += tuple(blocks)

    def begun(self, sequence: int) -> bool:
        return sequence in self._using

    def open_window(self, sequence: int, first: int, blocks: Sequence[int]) -> bool:
        """Blocks of the chunk from this position on, which are its only while it is under way; the caller
        holds a reference on each. False where it is known already, and another reference would be too
        many."""
        windows = self._windows.setdefault(sequence, {})
        if first in windows:
            return False
        windows[first] = _Window(blocks=tuple(blocks), using=set(self._followers))
        return True

    def left_window(self, sequence: int, first: int, stage: int) -> tuple[int, ...]:
        """Blocks that no stage uses any more: the chunk's, once nothing of it is under way in any."""
        windows = self._windows.get(sequence, {})
        window = windows.get(first)
        if window is None:
            return ()
        window.using.discard(stage)
        return () if window.using else windows.pop(first).blocks

    def delivered(self, sequence: int, stage: int) -> bool:
        """Whether that was still waited for: a stage says it once."""
        waiting = self._delivering.get(sequence, set())
        if stage not in waiting:
            return False
        waiting.remove(stage)
        return True

    def ended(self, sequence: int, stage: int) -> tuple[int, ...]:
        """Blocks that no stage uses any more: the sequence's, once all stages have ended it."""
        using = self._using.get(sequence)
        if using is None:
            return ()
        using.discard(stage)
        if using:
            return ()
        return self._forget(sequence)

    def abandon(self) -> tuple[list[int], list[tuple[int, int]]]:
        """The epoch is over: all blocks that were held, and (sequence, stage) of deliveries that will not be
        reported."""
        undelivered = [
            (sequence, stage) for sequence, stages in self._delivering.items() for stage in sorted(stages)
        ]
        blocks = [block for sequence in list(self._using) for block in self._forget(sequence)]
        self._under_way.clear()
        return blocks, undelivered

    def _forget(self, sequence: int) -> tuple[int, ...]:
        del self._using[sequence], self._delivering[sequence]
        windows = self._windows.pop(sequence, {}).values()
        return self._blocks.pop(sequence) + tuple(block for window in windows for block in window.blocks)
