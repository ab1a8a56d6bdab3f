"""Which holders are slow: what iterations waited for each, beside its peers and beside the deadline. Pure.

A holder that is dead loses its sequences at once. One that is slow (its machine swaps, its cores are somebody
else's) answers, and so holds up every iteration of every sequence that has KV there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

ANSWERS_MIN = 8  # between two looks, before anything is said of a holder
WAITED_S_MIN = 0.5  # or so long was waited for fewer
BEYOND = 5.0  # times what peers let wait is far beyond them
WAIT_S_MIN = 0.005  # for an answer, on average: less is noise
PEER_WAIT_S = 0.0005  # as are differences below this among the quick
DEADLINE_SHARE = 0.25  # of an iteration's deadline, that the answers of all layers may take
LOOKS = 2  # in a row that a holder has to be beyond its peers
PROBATION_S = 30.0  # a slow holder is borrowed from again after it
REMEMBERED_S = 30.0  # how long what a holder let wait counts as a peer's


@dataclass(frozen=True, slots=True)
class _Mean:
    """What a holder let wait for an answer, on average, when so many blocks were owed to it."""

    seconds: float
    owed: int
    at_s: float


@dataclass(slots=True)
class _Pace:
    waited_s: float = 0.0
    answers: int = 0
    mean: _Mean | None = None
    looks: int = 0
    slow_until_s: float = 0.0


class Slowness:
    """Of holders by name. Thread-safe: the engine tells, others look."""

    def __init__(self, *, layers: int, deadline_s: float, clock: Callable[[], float]) -> None:
        """`deadline_s` is an iteration's, for the answers of all `layers`."""
        self._wait_s_max = deadline_s * DEADLINE_SHARE / layers
        self._clock = clock
        self._paces: dict[str, _Pace] = {}
        self._lock = threading.Lock()

    def waited(self, holder: str, seconds: float, answered: bool) -> None:
        """An iteration had nothing left to do but wait so long for one layer's attention there. A holder that
        let the deadline pass is slow at once."""
        with self._lock:
            pace = self._paces.setdefault(holder, _Pace())
            pace.waited_s += seconds
            pace.answers += 1
            if not answered:
                pace.slow_until_s = self._clock() + PROBATION_S

    def look(self, owed: Mapping[str, int]) -> list[str]:
        """Call it every second or so with the blocks that are owed to each holder: who reads more may take
        longer. Who is slow, those included that were found so before."""
        with self._lock:
            now_s = self._clock()
            looked_at = [
                holder
                for holder, pace in self._paces.items()
                if pace.answers >= ANSWERS_MIN or pace.waited_s >= WAITED_S_MIN
            ]
            for holder in looked_at:
                pace = self._paces[holder]
                # Of one whose sequences have ended since, what was owed then.
                blocks = owed.get(holder) or (pace.mean.owed if pace.mean is not None else 0)
                pace.mean = _Mean(pace.waited_s / pace.answers, blocks, now_s)
                pace.waited_s, pace.answers = 0.0, 0
            for holder in looked_at:
                pace = self._paces[holder]
                pace.looks = pace.looks + 1 if self._beyond(holder, now_s) else 0
                if pace.looks >= LOOKS:
                    pace.slow_until_s = now_s + PROBATION_S
            return [holder for holder in self._paces if self._slow(holder)]

    def slow(self, holder: str) -> bool:
        with self._lock:
            return self._slow(holder)

    def _slow(self, holder: str) -> bool:
        pace = self._paces.get(holder)
        return pace is not None and self._clock() < pace.slow_until_s

    def _beyond(self, holder: str, now_s: float) -> bool:
        """Its peers may have answered a while ago: their sequences end earlier than those that a slow holder
        holds up."""
        mine = self._paces[holder].mean
        assert mine is not None
        if mine.seconds > self._wait_s_max:
            return True
        peers = [
            max(pace.mean.seconds, PEER_WAIT_S) * max(1.0, mine.owed / max(pace.mean.owed, 1))
            for name, pace in self._paces.items()
            if name != holder and pace.mean is not None and now_s - pace.mean.at_s <= REMEMBERED_S
        ]
        return bool(peers) and mine.seconds > max(WAIT_S_MIN, BEYOND * median(peers))
