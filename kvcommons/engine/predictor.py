"""How long an iteration takes, by what is in it (Mnemosyne, section 4.2). Pure: durations are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, truediv

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

# Rows up to here cost more each, or less, than those beyond: few wait for weights, many for arithmetic.
_FEW_ROWS = 32
# What an amount is counted in. Where observations do not tell amounts apart, an iteration's time is put down
# to those of which it has most.
_UNITS = {
    "iterations": 1.0,
    "few_rows": 64.0,
    "more_rows": 64.0,
    "pairs": float(1 << 18),
    "read_bytes": float(1 << 24),
    "exchanges": 1.0,
    "away_bytes": float(1 << 24),
}
_KEPT = 0.98  # of an observation's weight, by the next one
_RECALLED = 0.01  # of an observation's weight: that costs are what they are. At first they are nothing
# A measurement counts as at most so many times what was expected of an iteration like those before, and as at
# least such a part of it: one pause is no trend, and a trend is followed within a few.
_SURPRISE = 4.0
_NOTHING = 1e-9  # of a moment: rounding
_KNOWN = 2  # times what was measured: so far what was learnt is believed
_FIT_EVERY = 8  # observations like those before: a fit costs more than all else of one
_LIKE = 1.1  # times what was measured, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """What is in an iteration, or in a part of one."""

    rows: float = 0  # through the matrices
    pairs: float = 0  # of chunks: a token, and one that it attends to
    read_bytes: int = 0  # KV of sequences that generate, here
    exchanges: int = 0  # 1: other holders are asked in each layer
    away_bytes: int = 0  # KV that the slowest of them reads

    @classmethod
    def of_chunk(cls, positions: range, *, exchanges: int = 0) -> IterationWork:
        """Each row attends to all before it, and to itself."""
        pairs = len(positions) * (positions.start + positions.stop + 1) // 2
        return cls(rows=len(positions), pairs=pairs, exchanges=exchanges)

    def beside(self, other: IterationWork) -> IterationWork:
        """Both in one iteration."""
        return IterationWork(
            rows=self.rows + other.rows,
            pairs=self.pairs + other.pairs,
            read_bytes=self.read_bytes + other.read_bytes,
            exchanges=max(self.exchanges, other.exchanges),
            away_bytes=max(self.away_bytes, other.away_bytes),
        )

    def at_least(self, other: IterationWork) -> IterationWork:
        """Of each amount the larger one."""
        return IterationWork(
            **{name: max(getattr(self, name), getattr(other, name)) for name in self.__slots__}
        )

    def within(self, other: IterationWork, times: float) -> bool:
        """Whether no amount is larger than so many times the other's."""
        return all(mine <= times * its for mine, its in zip(_counts(self), _counts(other), strict=True))


_counts = attrgetter(*IterationWork.__slots__)


class Predictor:
    """Seconds of an iteration: a sum over its amounts, of which none costs less than nothing.

    Least squares of relative errors, in which older iterations count exponentially less. In place of what is
    forgotten a little weight holds each cost where it is: hours without a prompt do not change what a chunk
    is expected to take.
    """

    def __init__(self) -> None:
        size = len(_UNITS)
        self._each = np.eye(size)
        self._observed = 0
        self._information = np.zeros((size, size))  # of the normal equations: information @ costs = moments
        self._moments = np.zeros(size)
        self._charged = np.zeros(size, dtype=bool)  # amounts that cost something
        self._costs = (0.0,) * size
        self.most = IterationWork()  # of each amount, in an iteration that is learnt from
        self.error = 0.0  # the mean absolute one, of what was measured

    @property
    def costs(self) -> Mapping[str, float]:
        """Seconds of one of each amount."""
        named = zip(_UNITS.items(), self._costs, strict=True)
        return {name: cost / unit for (name, unit), cost in named}

    def seconds(self, work: IterationWork) -> float:
        """0 until anything was measured."""
        return sum(cost * amount for cost, amount in zip(self._costs, _amounts(work), strict=True))

    def prompt_seconds(self, positions: range, chunk_tokens: int) -> float:
        """Of these of a prompt, in as many chunks as they take; 0 until a chunk was measured."""
        if not positions or not self.most.pairs:
            return 0.0
        chunks, whole = -(-len(positions) // chunk_tokens), IterationWork.of_chunk(positions)
        return chunks * self.seconds(replace(whole, rows=whole.rows / chunks, pairs=whole.pairs / chunks))

    def knows(self, work: IterationWork) -> bool:
        """Whether what was measured is enough to say what such an iteration takes."""
        return work.within(self.most, _KNOWN)

    def learn(self, work: IterationWork, seconds: float) -> None:
        """An iteration has taken so long."""
        if seconds <= 0:
            return
        expected_s = self.seconds(work)
        if expected_s:
            error = min(abs(expected_s / seconds - 1), 1.0)
            self.error = _KEPT * self.error + (1 - _KEPT) * error
        if expected_s and self.knows(work):
            seconds = min(max(seconds, expected_s / _SURPRISE), _SURPRISE * expected_s)
        weight = 1 / min(seconds, expected_s or seconds)
        self._add(weight * np.array(_amounts(work)), weight * seconds, weight)
        self._observed += 1
        news = not work.within(self.most, _LIKE)
        if news or self._observed < _FIT_EVERY or not self._observed % _FIT_EVERY:
            self.most = self.most.at_least(work)
            self._fit()

    def _add(self, row: Vector, target: float, weight: float) -> None:
        recalled = (1 - _KEPT) * _RECALLED * weight**2
        self._information *= _KEPT
        self._information += np.outer(row, row) + recalled * self._each
        self._moments = _KEPT * self._moments + target * row + recalled * np.array(self._costs)

    def _fit(self) -> None:
        """The costs, none below zero, whose squared error is least: by Murty's principal pivoting, from those
        that were charged last."""
        charged, costs = self._charged, np.zeros(len(self._moments))
        for _ in range(1 << len(costs)):  # more it never takes
            costs[:] = 0.0
            costs[charged] = np.linalg.solve(
                self._information[np.ix_(charged, charged)], self._moments[charged]
            )
            pull = self._moments - self._information @ costs  # of those that are not charged
            wrong = np.where(charged, costs < 0, pull > _NOTHING * np.abs(self._moments))
            if not wrong.any():
                break
            last = np.flatnonzero(wrong)[-1]
            charged[last] = not charged[last]
        self._costs = tuple(np.maximum(costs, 0.0).tolist())


def _amounts(work: IterationWork) -> tuple[float, ...]:
    """In their units."""
    few = min(work.rows, _FEW_ROWS)
    amounts = (1, few, work.rows - few, work.pairs, work.read_bytes, work.exchanges, work.away_bytes)
    return tuple(map(truediv, amounts, _UNITS.values()))
