"""How much of its time a creditor computes for others: what its own time between tokens leaves.

Attention for others shares the cores with the creditor's own iterations. Without a bound, lending memory
would cost its own users their objective (TBT: time between tokens). The bound is a share of time, not of an
iteration: a debtor gets its partials while a long chunk is computed, not once the chunk has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvcommons.holder.allowance import Allowance, PlainAllowance

_KEPT = 0.8  # of the average of own iterations, by the next one
# Of the creditor's time, however long its own iterations are: less would let debtors run past their deadline,
# which costs them the KV that they have here.
SHARE_MIN = 0.25


class TimeBucket:
    """A token bucket whose tokens are seconds. They come in at a share of the time that passes, and a
    computation may begin as long as any are there. What is saved is bounded by what comes in within
    `period_s`, and so is the debt that a long computation leaves: the next one begins after a period at the
    latest."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self.share = 1.0
        self.level_s = period_s

    def pass_time(self, seconds: float) -> None:
        self.level_s = min(self.level_s + self.share * seconds, self._bound_s)

    def spend(self, seconds: float) -> None:
        self.level_s = max(self.level_s - seconds, -self._bound_s)

    def fill(self) -> None:
        self.level_s = self._bound_s

    @property
    def _bound_s(self) -> float:
        return self.share * self._period_s


class AttentionBudget:
    """Grants others the share of time that own iterations leave of the objective. There is no limit while no
    own sequence runs, nor while an iteration waits for other holders itself: two that owe each other must
    not wait for each other's next iteration. Thread-safe."""

    def __init__(
        self,
        tbt_s: float,
        allowance: Allowance | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tbt_s`: the objective. `allowance`: what is granted, to be spent where it is; None: by Python."""
        self.allowance = allowance or PlainAllowance()
        self._tbt_s = tbt_s
        self._clock = clock
        self._lock = threading.Lock()
        self._bucket = TimeBucket(tbt_s)
        self._renewed_s = clock()
        self._spent_s = self.allowance.spent_s  # as of then
        self._others_s = 0.0  # of the iteration under way, what others computed beside it
        self._own_s = 0.0  # of an iteration, on the average
        self._waiting = 0
        self._bounded = False
        self._renew()

    @property
    def left_s(self) -> float:
        """That others may compute now, without more time passing."""
        with self._lock:
            self._renew()
            return self._left_s()

    def iterated(self, seconds: float) -> None:
        """An own iteration has ended, which took so long, attention for others included; the next one
        begins."""
        with self._lock:
            self._renew()
            # What is longer than the objective leaves nothing, however much longer it is.
            own_s = min(max(seconds - self._others_s, 0.0), self._tbt_s)
            if self._bounded:
                self._own_s = _KEPT * self._own_s + (1 - _KEPT) * own_s
            else:  # nobody knows what of the others' was in it: most came before, while nothing ran here
                self._own_s = min(seconds, self._tbt_s)
            self._bounded = True
            self._others_s = 0.0
            self._bucket.share = max(1 - self._own_s / self._tbt_s, SHARE_MIN)
            self._renew()

    def between_layers(self, *, gives_way: bool) -> None:
        """An own iteration stands between two of its layers. Where it `gives_way`, those that wait and may
        begin compute first."""
        if not self.allowance.outstanding and not self.allowance.exhausted:
            return
        with self._lock:
            self._renew()
            left_s = self._left_s()
        if not gives_way or left_s <= 0:
            return
        self.allowance.give_way(left_s)
        with self._lock:
            others_s = self._others_s
            self._renew()
            self._others_s = others_s  # they were not beside the iteration

    def idle(self) -> None:
        """No own sequence runs."""
        with self._lock:
            self._bounded = False
            self._renew()
            self._others_s = 0.0

    def waiting(self) -> Waiting:
        """While the own iteration waits for a partial: the cores are free."""
        return Waiting(self)

    def _left_s(self) -> float:
        return self._bucket.level_s if self._bounded else self._tbt_s

    def _renew(self) -> None:
        """Grants what has come in since this was called last."""
        now_s, spent_s = self._clock(), self.allowance.spent_s
        if self._bounded:
            self._bucket.spend(spent_s - self._spent_s)
            self._bucket.pass_time(now_s - self._renewed_s)
        else:
            self._bucket.fill()
        self._others_s += spent_s - self._spent_s
        self._renewed_s, self._spent_s = now_s, spent_s
        until_s = spent_s + self._bucket.level_s if self._bounded and not self._waiting else None
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
            budget._renew()
