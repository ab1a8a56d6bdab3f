"""What is granted to others, and that both kinds of allowances are spent alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvcommons.attention.native.exchange import NativeAllowance
from kvcommons.backend.choice import choose
from kvcommons.errors import DeadlineExceeded
from kvcommons.holder.allowance import Allowance, PlainAllowance, computing
from kvcommons.holder.budget import AttentionBudget
from kvcommons.transport.deadline import Deadline
from tests.clock import Clock


def soon() -> Deadline:
    return Deadline.after(10)


def with_clock(tbt_s: float) -> tuple[AttentionBudget, Clock]:
    clock = Clock()
    return AttentionBudget(tbt_s, PlainAllowance(clock), clock), clock


def spend(budget: AttentionBudget, clock: Clock, seconds: float, deadline: Deadline | None = None) -> None:
    with computing(budget.allowance, deadline or soon()):
        clock.now_s += seconds


def refused(budget: AttentionBudget) -> bool:
    return not budget.allowance.take(0)


def busy(budget: AttentionBudget, own_s: float) -> None:
    """Own iterations take so long on the average, and nothing of the share is left."""
    for _ in range(50):
        budget.iterated(own_s)


def test_others_get_the_share_of_time_that_own_iterations_leave_of_the_objective() -> None:
    budget, clock = with_clock(0.1)
    budget.iterated(0.06)
    assert budget.left_s == pytest.approx(0.04)
    spend(budget, clock, 0.03)  # meanwhile 0.012 come in
    spend(budget, clock, 0.02)  # and 0.008
    assert budget.left_s == pytest.approx(0.01)
    spend(budget, clock, 0.04)  # it leaves a debt, of 0.014
    assert budget.left_s == pytest.approx(-0.014)
    with pytest.raises(DeadlineExceeded, match="bring the KV home"):
        spend(budget, clock, 0.01, Deadline.after(0.01))
    # The iteration that others made longer does not count as an own one of that length.
    budget.iterated(0.15)
    clock.now_s += 1.0
    assert budget.left_s == pytest.approx(0.04)


def test_nobody_starves_however_busy_the_holder_is() -> None:
    budget, clock = with_clock(0.1)
    busy(budget, 5.0)
    spend(budget, clock, 3.0)  # a debt is bounded, too
    assert refused(budget)
    clock.now_s += 0.1001
    assert budget.left_s > 0
    spend(budget, clock, 0.001)


def test_what_was_computed_while_nothing_ran_here_makes_no_own_iteration_short() -> None:
    budget, clock = with_clock(0.1)
    budget.iterated(0.02)
    budget.idle()
    spend(budget, clock, 5.0)
    budget.iterated(0.06)
    assert budget.left_s == pytest.approx(0.04)


def test_no_bound_while_no_own_sequence_runs() -> None:
    budget, clock = with_clock(0.1)
    spend(budget, clock, 5.0)
    spend(budget, clock, 5.0, Deadline.after(0.01))
    budget.iterated(0.5)
    spend(budget, clock, 0.5)
    assert refused(budget)
    budget.idle()
    spend(budget, clock, 5.0, Deadline.after(0.01))


@pytest.mark.parametrize("event", ["iterated", "between_layers", "idle"])
def test_who_waits_goes_on_when_time_has_passed(event: str) -> None:
    """An own iteration that takes long grants what has come in between two of its layers."""
    budget, clock = with_clock(0.1)
    busy(budget, 0.2)
    spend(budget, clock, 0.1)
    got = threading.Event()

    def wait() -> None:
        with computing(budget.allowance, soon()):
            got.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not budget.allowance.outstanding:
        time.sleep(0.001)
    budget.between_layers(gives_way=False)
    assert not got.wait(0.02), "no time has passed"
    clock.now_s += 0.2
    if event == "iterated":
        budget.iterated(0.2)
    elif event == "idle":
        budget.idle()
    else:
        budget.between_layers(gives_way=False)
    assert got.wait(10)
    waiting.join(10)


def test_between_two_layers_a_chunk_gives_way_to_those_that_may_begin() -> None:
    budget, _ = with_clock(20.0)
    budget.iterated(1.0)
    taken = budget.allowance.take(0)
    began, ended = threading.Event(), threading.Event()

    def wait() -> None:
        again = budget.allowance.take(10)
        began.set()
        assert ended.wait(10)
        budget.allowance.give(again)

    waits = threading.Thread(target=wait)
    waits.start()
    while budget.allowance.outstanding < 2:
        time.sleep(0.001)
    passed = threading.Event()

    def layer() -> None:
        budget.between_layers(gives_way=True)
        passed.set()

    goes_on = threading.Thread(target=layer)
    goes_on.start()
    assert not passed.wait(0.02), "one computes, another waits"
    budget.allowance.give(taken)
    assert began.wait(10)
    assert not passed.wait(0.02), "the other one computes"
    ended.set()
    assert passed.wait(10)
    waits.join(10)
    goes_on.join(10)


def test_two_that_owe_each_other_do_not_wait_for_each_other() -> None:
    """While an own iteration waits for a partial it admits others, however many there were."""
    budget, clock = with_clock(0.1)
    budget.iterated(0.5)
    spend(budget, clock, 0.04)
    with budget.waiting():
        for _ in range(3):
            spend(budget, clock, 0.001, Deadline.after(0.01))
    assert refused(budget)


def native() -> Allowance:
    library = choose().attention.native_exchange
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


def test_who_gives_way_waits_for_those_that_may_begin_and_for_no_others(allowance: Allowance) -> None:
    allowance.give_way(10)
    taken = allowance.take(0)
    assert allowance.outstanding == 1
    threading.Timer(0.02, lambda: allowance.give(taken)).start()
    allowance.give_way(10)
    assert allowance.outstanding == 0
    allowance.grant(allowance.spent_s, counts=True)
    waits = threading.Thread(target=lambda: allowance.give(allowance.take(10)))
    waits.start()
    while not allowance.outstanding:
        time.sleep(0.001)
    allowance.give_way(10)  # nothing is granted: who waits is not waited for
    assert allowance.outstanding == 1
    allowance.grant(None, counts=True)
    waits.join(10)
    assert allowance.outstanding == 0
