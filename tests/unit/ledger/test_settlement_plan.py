from __future__ import annotations

from services.ledger.settlement_plan import Recall, Room, Transfer, plan


def room(free: int = 0, waiting: int = 0, total: int = 80) -> Room:
    return Room(total_blocks=total, free_blocks=free, waiting=waiting)


FULL = {name: room() for name in "abcdef"}


def test_circles_that_share_nobody_are_settled_at_once() -> None:
    debts = {"a": {"b": 9}, "b": {"a": 7, "c": 5}, "c": {"b": 5}, "d": {"e": 4}, "e": {"d": 4}}
    assert plan(debts, FULL, threshold=4) == [
        Transfer(legs=(("a", "b", 7), ("b", "a", 7))),
        Transfer(legs=(("d", "e", 4), ("e", "d", 4))),
    ]
    assert plan(debts, FULL, threshold=4, busy={"a"}) == [
        Transfer(legs=(("b", "c", 5), ("c", "b", 5))),
        Transfer(legs=(("d", "e", 4), ("e", "d", 4))),
    ]
    assert plan(debts, FULL, threshold=10) == []


def test_blocks_come_home_where_there_is_room_without_a_circle() -> None:
    debts = {"a": {"b": 20, "c": 30}}
    assert plan(debts, FULL | {"a": room(free=35)}, threshold=4) == [Transfer(legs=(("a", "c", 25),))]
    assert plan(debts, FULL | {"a": room(free=90, total=80)}, threshold=4) == [
        Transfer(legs=(("a", "c", 30),))
    ]
    # Not for less than the threshold, unless it is all that is owed; and not before those that wait.
    assert plan(debts, FULL | {"a": room(free=13)}, threshold=4) == []
    assert plan({"a": {"b": 2}}, FULL | {"a": room(free=13)}, threshold=4) == [
        Transfer(legs=(("a", "b", 2),))
    ]
    assert plan(debts, FULL | {"a": room(free=35, waiting=1)}, threshold=4) == []


def test_a_creditor_in_need_is_served_first_and_calls_back_what_has_no_room_at_home() -> None:
    debts = {"a": {"b": 20, "c": 30}}
    needy = FULL | {"b": room(waiting=2)}
    assert plan(debts, needy | {"a": room(free=35)}, threshold=4) == [Transfer(legs=(("a", "b", 20),))]
    assert plan(debts, needy, threshold=4) == [Recall(creditor="b", debtor="a", blocks=20)]
    assert plan(debts, needy, threshold=4, busy={"b"}) == []
