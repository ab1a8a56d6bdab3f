"""How much a creditor computes for others: what its own time between tokens leaves.

Attention for others shares the cores with the creditor's own iterations. Without a bound, lending memory
would cost its own users their objective (TBT: time between tokens)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvcommons.attention.native.serve import Allowance
from kvcommons.errors import DeadlineExceeded
from kvcommons.transport.deadline import Deadline

_KEPT = 0.8  # of the average of own iterations, by the next one


class AttentionBudget:
    """Seconds of attention for others in an own iteration: the objective, less what the iteration takes by
    itself. Always one request, so that nobody starves; without limit while no own sequence runs, and while an
    iteration waits for other holders itself: two that owe each other must not wait for each other's next
    iteration. Thread-safe."""

    def __init__(self, tbt_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`tbt_s`: the objective."""
        self._tbt_s = tbt_s
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queued = 0  # requests that wait
        self._own_s = 0.0  # of an iteration, on the average
        # In this iteration, for others, by Python; and what had been natively, before it began.
        self._spent_s, self._spent_before_ns = 0.0, 0
        self._under_way = 0
        # For requests that are served without the interpreter.
        self.allowance = Allowance()
        self._waiting = 0
        self._bounded = False
        self._publish()

    @property
    def left_s(self) -> float:
        """In this iteration."""
        with self._changed:
            return self._left_s()

    def iterated(self, seconds: float) -> None:
        """An own iteration has ended, which took so long, attention for others included; the next one
        begins."""
        with self._changed:
            if self._bounded:
                own_s = max(seconds - self._all_spent_s(), 0.0)
                self._own_s = _KEPT * self._own_s + (1 - _KEPT) * own_s
            else:  # nobody knows what of the others' was in it: most came before, while nothing ran here
                self._own_s = seconds
            self._bounded = True
            self._begin()

    def idle(self) -> None:
        """No own sequence runs."""
        with self._changed:
            self._bounded = False
            self._begin()

    def waiting(self) -> Waiting:
        """While the own iteration waits for a partial: the cores are free."""
        return Waiting(self)

    @contextmanager
    def turn(self, deadline: Deadline) -> Iterator[None]:
        """For one request. Waits for an iteration that has seconds left; raises DeadlineExceeded."""
        with self._changed:
            self._queued += 1
            try:
                admitted = self._changed.wait_for(self._admits, deadline.left())
            finally:
                self._queued -= 1
            if not admitted:
                raise DeadlineExceeded(
                    "the holder's own sequences left no time for others until the deadline: bring the KV "
                    "home, or spread it over more holders"
                )
            self._under_way += 1
            self._publish()
            counts = not self._waiting
        began_s = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                if counts:
                    self._spent_s += self._clock() - began_s
                self._publish()
                self._changed.notify_all()

    def _begin(self) -> None:
        """An iteration."""
        self._spent_s, self._spent_before_ns = 0.0, self.allowance.spent_ns
        self._publish()
        self._changed.notify_all()

    def _all_spent_s(self) -> float:
        return self._spent_s + (self.allowance.spent_ns - self._spent_before_ns) / 1e9

    def _left_s(self) -> float:
        return self._tbt_s - self._own_s - self._all_spent_s() if self._bounded else self._tbt_s

    def _admits(self) -> bool:
        if not self._bounded or self._waiting:
            return True
        under_way = self._under_way or self.allowance.under_way
        return self._left_s() > 0 or (not self._all_spent_s() and not under_way)

    def _publish(self) -> None:
        """The same, for requests that Python does not see. Nobody has to be told of those: what they spend
        admits no other."""
        allowance, before_ns = self.allowance, self._spent_before_ns
        allowance.others = self._under_way
        allowance.limit_ns = before_ns + int((self._tbt_s - self._own_s - self._spent_s) * 1e9)
        allowance.fresh_ns = -1 if self._spent_s else before_ns
        allowance.bounded = self._bounded


class Waiting:
    """A context, entered in every layer: it costs nobody anything where no request waits."""

    __slots__ = ("_budget",)

    def __init__(self, budget: AttentionBudget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        budget = self._budget
        with budget._lock:
            budget._waiting += 1
            budget.allowance.waiting = budget._waiting
            if budget._queued:
                budget._changed.notify_all()

    def __exit__(self, *of: object) -> None:
        budget = self._budget
        with budget._lock:
            budget._waiting -= 1
            budget.allowance.waiting = budget._waiting
