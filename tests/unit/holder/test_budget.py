from __future__ import annotations

import threading

import pytest

from kvcommons.errors import DeadlineExceeded
from kvcommons.holder.budget import AttentionBudget
from kvcommons.transport.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def soon() -> Deadline:
    return Deadline.after(10)


def spend(budget: AttentionBudget, clock: Clock, seconds: float, deadline: Deadline | None = None) -> None:
    with budget.turn(deadline or soon()):
        clock.now_s += seconds


def test_others_get_what_own_iterations_leave_of_the_objective() -> None:
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    budget.iterated(0.06)
    assert budget.left_s == pytest.approx(0.04)
    spend(budget, clock, 0.03)
    spend(budget, clock, 0.02)
    with pytest.raises(DeadlineExceeded, match="bring the KV home"):
        spend(budget, clock, 0.01, Deadline.after(0.01))
    # The iteration that others made longer does not count as an own one of that length.
    budget.iterated(0.11)
    assert budget.left_s == pytest.approx(0.04)


def test_one_request_an_iteration_gets_through_however_busy_the_holder_is() -> None:
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    for _ in range(3):
        budget.iterated(0.5)
        spend(budget, clock, 0.01, Deadline.after(0.01))
        with pytest.raises(DeadlineExceeded):
            spend(budget, clock, 0.01, Deadline.after(0.01))


def test_what_was_computed_while_nothing_ran_here_makes_no_own_iteration_short() -> None:
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    budget.iterated(0.02)
    budget.idle()
    spend(budget, clock, 5.0)
    budget.iterated(0.09)
    assert budget.left_s == pytest.approx(0.01)


def test_no_bound_while_no_own_sequence_runs() -> None:
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    spend(budget, clock, 5.0)
    spend(budget, clock, 5.0, Deadline.after(0.01))
    budget.iterated(0.5)
    spend(budget, clock, 0.01)
    budget.idle()
    spend(budget, clock, 5.0, Deadline.after(0.01))


@pytest.mark.parametrize("event", ["iterated", "idle"])
def test_who_waits_goes_on_with_the_next_iteration(event: str) -> None:
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    budget.iterated(0.2)
    spend(budget, clock, 0.01)
    got = threading.Event()

    def wait() -> None:
        with budget.turn(soon()):
            got.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not got.wait(0.05)
    if event == "iterated":
        budget.iterated(0.2)
    else:
        budget.idle()
    assert got.wait(10)
    waiting.join(10)


def test_two_that_owe_each_other_do_not_wait_for_each_other() -> None:
    """While an own iteration waits for a partial it admits others, however many there were."""
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    budget.iterated(0.5)
    spend(budget, clock, 0.01)
    with budget.waiting():
        for _ in range(3):
            spend(budget, clock, 1.0, Deadline.after(0.01))
    with pytest.raises(DeadlineExceeded):
        spend(budget, clock, 0.01, Deadline.after(0.01))


def admitted(budget: AttentionBudget) -> bool:
    """As requests that are served without the interpreter are (serve.cpp)."""
    told = budget.allowance
    if not told.bounded or told.waiting or told.spent_ns < told.limit_ns:
        return True
    return told.spent_ns == told.fresh_ns and not told.under_way and not told.others


def test_both_kinds_of_requests_share_the_budget() -> None:
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    assert admitted(budget)
    budget.iterated(0.06)
    budget.allowance.spent_ns += 30_000_000
    assert budget.left_s == pytest.approx(0.01)
    assert admitted(budget)
    spend(budget, clock, 0.02)
    assert not admitted(budget)
    with budget.waiting():
        assert admitted(budget)
    # As long as an own iteration that took 0.06: what was spent natively is no more its own than the rest.
    budget.iterated(0.11)
    assert budget.left_s == pytest.approx(0.04)
    assert admitted(budget)
    budget.allowance.spent_ns += 50_000_000
    assert not admitted(budget)
    with pytest.raises(DeadlineExceeded):
        spend(budget, clock, 0.01, Deadline.after(0.01))
    budget.idle()
    assert admitted(budget)


def test_one_request_of_either_kind_gets_through() -> None:
    clock = Clock()
    budget = AttentionBudget(0.1, clock)
    budget.iterated(0.5)
    assert admitted(budget)
    with budget.turn(soon()):
        assert not admitted(budget)
        clock.now_s += 0.01
    assert not admitted(budget)
    budget.iterated(0.5)
    budget.allowance.under_way += 1
    assert not admitted(budget)
    with pytest.raises(DeadlineExceeded):
        spend(budget, clock, 0.01, Deadline.after(0.01))
    budget.allowance.under_way -= 1
    spend(budget, clock, 0.01, Deadline.after(0.01))
