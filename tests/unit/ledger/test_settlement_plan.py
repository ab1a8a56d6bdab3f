from __future__ import annotations

from services.ledger.settlement_plan import MemoryState, Recall, Swap, plan


def capacity(free: int = 0, waiting: int = 0, total: int = 80) -> MemoryState:
    return MemoryState(total_blocks=total, free_blocks=free, waiting=waiting)


FULL = {name: capacity() for name in "abcdef"}


def test_circles_that_share_nobody_are_settled_at_once() -> None:
    debts = {"a": {"b": 9}, "b": {"a": 7, "c": 5}, "c": {"b": 5}, "d": {"e": 4}, "e": {"d": 4}}
    assert plan(debts, FULL, threshold=4) == [
        Swap(legs=(("a", "b", 7), ("b", "a", 7))),
        Swap(legs=(("d", "e", 4), ("e", "d", 4))),
    ]
    assert plan(debts, FULL, threshold=4, busy={"a"}) == [
        Swap(legs=(("b", "c", 5), ("c", "b", 5))),
        Swap(legs=(("d", "e", 4), ("e", "d", 4))),
    ]
    assert plan(debts, FULL, threshold=10) == []


def test_a_creditor_in_need_calls_back_what_it_has_lent() -> None:
    debts = {"a": {"b": 20, "c": 30}, "d": {"b": 3}}
    assert plan(debts, FULL, threshold=4) == []
    needy = FULL | {"b": capacity(waiting=2)}
    # One debtor at a time: what came of it decides whether the next is asked.
    assert plan(debts, needy, threshold=4) == [Recall(creditor="b", debtor="a", blocks=20)]
    assert plan(debts, needy, threshold=4, busy={"a"}) == [Recall(creditor="b", debtor="d", blocks=3)]
    assert plan(debts, needy, threshold=4, busy={"b"}) == []
    # Its queue is not for want of memory.
    assert plan(debts, FULL | {"b": capacity(free=40, waiting=2)}, threshold=4) == []


def test_a_circle_comes_before_a_call() -> None:
    debts = {"a": {"b": 9}, "b": {"a": 7}}
    assert plan(debts, FULL | {"b": capacity(waiting=1)}, threshold=4) == [
        Swap(legs=(("a", "b", 7), ("b", "a", 7)))
    ]
