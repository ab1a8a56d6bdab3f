"""What is granted to others, and that both kinds of allowances are spent alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvcommons.attention.native import exchange
from kvcommons.attention.native.exchange import NativeAllowance
from kvcommons.errors import DeadlineExceeded
from kvcommons.holder.allowance import Allowance, PlainAllowance, computing
from kvcommons.holder.budget import AttentionBudget
from kvcommons.transport.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def soon() -> Deadline:
    return Deadline.after(10)


def with_clock(tbt_s: float) -> tuple[AttentionBudget, Clock]:
    clock = Clock()
    return AttentionBudget(tbt_s, PlainAllowance(clock)), clock


def spend(budget: AttentionBudget, clock: Clock, seconds: float, deadline: Deadline | None = None) -> None:
    with computing(budget.allowance, deadline or soon()):
        clock.now_s += seconds


def test_others_get_what_own_iterations_leave_of_the_objective() -> None:
    budget, clock = with_clock(0.1)
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
    budget, clock = with_clock(0.1)
    for _ in range(3):
        budget.iterated(0.5)
        spend(budget, clock, 0.01, Deadline.after(0.01))
        with pytest.raises(DeadlineExceeded):
            spend(budget, clock, 0.01, Deadline.after(0.01))


def test_what_was_computed_while_nothing_ran_here_makes_no_own_iteration_short() -> None:
    budget, clock = with_clock(0.1)
    budget.iterated(0.02)
    budget.idle()
    spend(budget, clock, 5.0)
    budget.iterated(0.09)
    assert budget.left_s == pytest.approx(0.01)


def test_no_bound_while_no_own_sequence_runs() -> None:
    budget, clock = with_clock(0.1)
    spend(budget, clock, 5.0)
    spend(budget, clock, 5.0, Deadline.after(0.01))
    budget.iterated(0.5)
    spend(budget, clock, 0.01)
    budget.idle()
    spend(budget, clock, 5.0, Deadline.after(0.01))


@pytest.mark.parametrize("event", ["iterated", "idle"])
def test_who_waits_goes_on_with_the_next_iteration(event: str) -> None:
    budget, clock = with_clock(0.1)
    budget.iterated(0.2)
    spend(budget, clock, 0.01)
    got = threading.Event()

    def wait() -> None:
        with computing(budget.allowance, soon()):
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
    budget, clock = with_clock(0.1)
    budget.iterated(0.5)
    spend(budget, clock, 0.01)
    with budget.waiting():
        for _ in range(3):
            spend(budget, clock, 1.0, Deadline.after(0.01))
    with pytest.raises(DeadlineExceeded):
        spend(budget, clock, 0.01, Deadline.after(0.01))


def native() -> Allowance:
    library = exchange.find()
    if library is None:
        pytest.skip("there is no compiled kernel")
    return NativeAllowance(library)


@pytest.fixture(params=[PlainAllowance, native])
def allowance(request: pytest.FixtureRequest) -> Allowance:
    make: Callable[[], Allowance] = request.param
    return make()


def test_one_computation_at_a_time(allowance: Allowance) -> None:
    taken = allowance.take(0)
    assert taken
    assert not allowance.take(0.01)
    threading.Timer(0.02, lambda: allowance.give(taken)).start()
    again = allowance.take(10)
    assert again
    allowance.give(again)


def test_what_is_granted_is_spent_by_what_counts(allowance: Allowance) -> None:
    for counts in (False, True):
        allowance.grant(allowance.spent_s + 1e-3, counts=counts)
        with computing(allowance, soon()):
            time.sleep(2e-3)
        assert allowance.exhausted == counts
    with (
        pytest.raises(DeadlineExceeded, match="bring the KV home"),
        computing(allowance, Deadline.after(0.01)),
    ):
        pass
    waits = threading.Thread(target=lambda: allowance.give(allowance.take(10)))
    waits.start()
    allowance.grant(None, counts=False)
    waits.join(5)
    assert not waits.is_alive()
    assert not allowance.exhausted
