"""How long an iteration takes, by what is in it (Mnemosyne, section 4.2). Pure: durations are passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcommons.engine.iteration_costs import UNITS, IterationCosts, IterationWork, amounts

Vector = NDArray[np.float64]

_KEPT = 0.98  # of an observation's weight, by the next one
_RECALLED = 0.01  # of an observation's weight: that costs are what they are. At first they are nothing
# A measurement counts as at most so many times what was expected of an iteration like those before, and as at
# least such a part of it, as long as the mean error says that what is expected can be believed: one pause is
# no trend, and a trend is followed.
_SURPRISE = 4.0
_BELIEVED = 0.25
_NOTHING = 1e-9  # of a moment: rounding
_KNOWN = 2  # times what was measured: so far what was learnt is believed
_FIT_EVERY = 8  # observations like those before: a fit costs more than all else of one
_LIKE = 1.1  # times what was measured, at most


class Predictor:
    """Learns what an iteration's amounts cost: least squares of relative errors, in which older iterations
    count exponentially less. In place of what is forgotten a little weight holds each cost where it is: hours
    without a prompt do not change what a chunk is expected to take.
    """

    def __init__(self) -> None:
        size = len(UNITS)
        self._each = np.eye(size)
        self._observed = 0
        self._information = np.zeros((size, size))  # of the normal equations: information @ costs = moments
        self._moments = np.zeros(size)
        self._charged = np.zeros(size, dtype=bool)  # amounts that cost something
        self.costs = IterationCosts()
        self.most = IterationWork()  # of each amount, in an iteration that is learnt from
        self.error = 0.0  # the mean absolute one, of what was measured

    @classmethod
    def of(cls, learnt: Mapping[str, Any]) -> Predictor:
        """The reverse of `learnt`: goes on where that was. Raises KeyError, TypeError or ValueError for what
        is none."""
        made, size = cls(), len(UNITS)
        made._information = np.array(learnt["information"], dtype=float).reshape(size, size)
        made._moments = np.array(learnt["moments"], dtype=float).reshape(size)
        if not (np.isfinite(made._information).all() and np.isfinite(made._moments).all()):
            raise ValueError("its numbers are not finite")
        made._observed = int(learnt["observed"])
        made.most = IterationWork(**learnt["most"])
        made.error = float(learnt["error"])
        made.costs = IterationCosts.of(learnt["costs"])
        made._charged = np.array(made.costs.of_units) > 0
        return made

    def learnt(self) -> dict[str, Any]:
        """All of it, as JSON can have it."""
        return {
            "information": self._information.tolist(),
            "moments": self._moments.tolist(),
            "costs": self.costs.by_name,
            "observed": self._observed,
            "most": asdict(self.most),
            "error": self.error,
        }

    def seconds(self, work: IterationWork) -> float:
        """0 until anything was measured."""
        return self.costs.seconds(work)

    def prompt_seconds(self, positions: range, chunk_tokens: int, stages: int = 1) -> float:
        """As of `IterationCosts`."""
        return self.costs.prompt_seconds(positions, chunk_tokens, stages)

    def knows(self, work: IterationWork) -> bool:
        """Whether what was measured is enough to say what such an iteration takes."""
        return work.within(self.most, _KNOWN)

    def learn(self, work: IterationWork, seconds: float) -> None:
        """An iteration has taken so long."""
        if seconds <= 0:
            return
        expected_s = self.seconds(work)
        if expected_s:
            kept = min(_KEPT, 1 - 1 / max(self._observed, 1))  # the mean one at first
            self.error = kept * self.error + (1 - kept) * min(abs(expected_s / seconds - 1), 1.0)
        if expected_s and self.knows(work) and self.error <= _BELIEVED:
            seconds = min(max(seconds, expected_s / _SURPRISE), _SURPRISE * expected_s)
        weight = 1 / min(seconds, max(expected_s or seconds, seconds / _SURPRISE))
        self._add(weight * np.array(amounts(work)), weight * seconds, weight)
        self._observed += 1
        news = not work.within(self.most, _LIKE)
        if news or self._observed < _FIT_EVERY or not self._observed % _FIT_EVERY:
            self.most = self.most.at_least(work)
            self._fit()

    def _add(self, row: Vector, target: float, weight: float) -> None:
        recalled = (1 - _KEPT) * _RECALLED * weight**2
        self._information *= _KEPT
        self._information += np.outer(row, row) + recalled * self._each
        self._moments = _KEPT * self._moments + target * row + recalled * np.array(self.costs.of_units)

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
        self.costs = IterationCosts(
            of_units=tuple(np.maximum(costs, 0.0).tolist()), chunks=self.most.pairs > 0
        )
