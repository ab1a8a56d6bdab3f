"""How much a creditor computes for others: what its own time between tokens leaves.

Attention for others shares the cores with the creditor's own iterations. Without a bound, lending memory
would cost its own users their objective (TBT: time between tokens)."""

from __future__ import annotations

import threading

from kvcommons.holder.allowance import Allowance, new_allowance

_KEPT = 0.8  # of the average of own iterations, by the next one
# Of every iteration, however long it is: one computation begins, so that nobody starves.
_LEAST_S = 1e-6


class AttentionBudget:
    """Grants seconds of attention for others in an own iteration: the objective, less what the iteration
    takes by itself. There is no limit while no own sequence runs, nor while an iteration waits for other
    holders itself: two that owe each other must not wait for each other's next iteration. Thread-safe."""

    def __init__(self, tbt_s: float, allowance: Allowance | None = None) -> None:
        """`tbt_s`: the objective."""
        self.allowance = allowance or new_allowance()
        self._tbt_s = tbt_s
        self._lock = threading.Lock()
        self._own_s = 0.0  # of an iteration, on the average
        self._spent_before_s = 0.0  # this iteration
        self._waiting = 0
        self._bounded = False
        self._begin()

    @property
    def left_s(self) -> float:
        """In this iteration."""
        with self._lock:
            return self._tbt_s - self._own_s - self._spent_s() if self._bounded else self._tbt_s

    def iterated(self, seconds: float) -> None:
        """An own iteration has ended, which took so long, attention for others included; the next one
        begins."""
        with self._lock:
            if self._bounded:
                own_s = max(seconds - self._spent_s(), 0.0)
                self._own_s = _KEPT * self._own_s + (1 - _KEPT) * own_s
            else:  # nobody knows what of the others' was in it: most came before, while nothing ran here
                self._own_s = seconds
            self._bounded = True
            self._begin()

    def idle(self) -> None:
        """No own sequence runs."""
        with self._lock:
            self._bounded = False
            self._begin()

    def waiting(self) -> Waiting:
        """While the own iteration waits for a partial: the cores are free."""
        return Waiting(self)

    def _begin(self) -> None:
        """An iteration."""
        self._spent_before_s = self.allowance.spent_s
        self._grant()

    def _spent_s(self) -> float:
        return self.allowance.spent_s - self._spent_before_s

    def _grant(self) -> None:
        until_s = None
        if self._bounded and not self._waiting:
            until_s = self._spent_before_s + max(self._tbt_s - self._own_s, _LEAST_S)
        self.allowance.grant(until_s, counts=not self._waiting)


class Waiting:
    """A context, entered in every layer; it nests."""

    __slots__ = ("_budget",)

    def __init__(self, budget: AttentionBudget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._add(1)

    def __exit__(self, *of: object) -> None:
        self._add(-1)

    def _add(self, count: int) -> None:
        budget = self._budget
        with budget._lock:
            budget._waiting += count
            budget._grant()
