"""A holder with sequences of its own serves layer after layer as its budget admits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvcommons.attention.native import library
from kvcommons.holder.budget import AttentionBudget
from tests.contract.following_cases import Row, eventually, rig

pytestmark = pytest.mark.skipif(library.chosen() is None, reason="there is no compiled kernel")


def test_what_is_served_natively_counts_for_the_budget(socket_folder: Path) -> None:
    budget = AttentionBudget(10.0)
    with rig(socket_folder, budget=budget) as made:
        peer = made.peer()
        row = made.follow(peer, Row(ref=made.lend(30), position=4, length=5))
        budget.idle()
        budget.iterated(1.0)
        assert budget.left_s == pytest.approx(9.0)
        row = made.follow(peer, row)
        spent_s = 9.0 - budget.left_s
        assert 0 < spent_s <= sum(one.seconds for one in made.observed)
        with made.computing():
            peer.send(peer.frame(0, [row]))
            eventually(lambda: peer.unread() == 0)
            time.sleep(0.1)
        peer.receive()
        assert 9.0 - budget.left_s >= spent_s + 0.1, "to wait for the cores counts too"
        budget.iterated(2.0)
        assert budget.left_s > 8.5, "the iteration that others made longer"
        with budget.waiting():
            left_s = budget.left_s
            made.follow(peer, row)
            assert budget.left_s == left_s


def test_what_the_budget_does_not_admit_waits(socket_folder: Path) -> None:
    """For the next iteration; one request always gets through, and all do while the own iteration waits."""
    budget = AttentionBudget(0.1)
    with rig(socket_folder, budget=budget) as made:
        peer = made.peer()
        row = Row(ref=made.lend(30), position=4, length=5)
        for _ in range(3):
            with budget.waiting():
                row = made.follow(peer, row)
            budget.iterated(20.0)
            peer.ask(peer.frame(0, [row]))
            assert peer.refused(peer.frame(1, [row], deadline_ms=30)) == "deadline_exceeded"
            peer.send(peer.frame(1, [row]))
            time.sleep(0.02)
            budget.iterated(20.0)
            assert peer.receive()[0].HasField("attend_layer")
        budget.idle()
        made.follow(peer, row)
