"""A holder with sequences of its own serves layer after layer as its budget grants."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvcommons.backend.choice import choose
from kvcommons.holder.allowance import Allowance, new_allowance
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.layer_head import LayerReply
from tests.backends import COMPILED
from tests.clock import Clock
from tests.contract.plan_cases import TRACE, rig, row
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not COMPILED, reason="there is no compiled kernel")


def allowance() -> Allowance:
    return new_allowance(choose().attention.native_exchange)


def test_what_is_served_natively_counts_for_the_budget(socket_folder: Path) -> None:
    budget = AttentionBudget(10.0, allowance(), clock=Clock())
    with rig(socket_folder, budget=budget) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))])
        step = made.follow(peer, 0)
        budget.idle()
        budget.iterated(1.0)
        assert budget.left_s == pytest.approx(9.0)
        step = made.follow(peer, step)
        spent_s = 9.0 - budget.left_s
        assert 0 < spent_s <= sum(one.seconds for one in made.observed)
        with made.computing():
            peer.send(peer.layer(0, step))
            wait_until(lambda: made.data.attention.allowance.outstanding > 1)
            time.sleep(0.1)
        peer.receive()
        assert 9.0 - budget.left_s >= spent_s + 0.1, "to wait for the cores counts too"
        left_s = budget.left_s
        with budget.waiting():
            made.follow(peer, step)
        assert budget.left_s == left_s


@pytest.mark.parametrize("trace", ["", TRACE])
def test_what_is_not_granted_waits(socket_folder: Path, trace: str) -> None:
    """For time to pass, which an iteration grants between its layers; all get through while the own
    iteration waits."""
    clock = Clock()
    budget = AttentionBudget(1e-6, allowance(), clock=clock)
    with rig(socket_folder, budget=budget) as made:
        peer = made.peer()
        peer.open([row(made.lend(30))], trace=trace)
        for step in range(3):
            with budget.waiting():
                for layer in (0, 1, 2):
                    peer.ask(peer.layer(layer, step))
            clock.now_s += 1.0
            budget.iterated(20.0)
            peer.ask(peer.layer(0, step))
            budget.between_layers(gives_way=False)
            assert peer.refused(peer.layer(1, step, deadline_ms=30)) == "deadline_exceeded"
            peer.send(peer.layer(1, step))
            wait_until(lambda: budget.allowance.outstanding)
            clock.now_s += 1.0
            budget.between_layers(gives_way=False)
            assert isinstance(peer.receive()[0], LayerReply)
        budget.idle()
        for layer in (0, 1, 2):
            peer.ask(peer.layer(layer, 3))
