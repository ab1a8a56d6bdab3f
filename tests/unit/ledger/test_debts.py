from __future__ import annotations

from services.ledger.debts import WRITE_OFF_S, CompareAndSwap, DebtLedger

ALL = {"a", "b", "c"}


def swap(creditor: str, loans: dict[str, int] | None, revision: int) -> CompareAndSwap:
    return CompareAndSwap(creditor=creditor, loans=loans, revision=revision)


def test_what_is_heard_counts_at_once_and_is_written_until_etcd_has_it() -> None:
    ledger = DebtLedger()
    ledger.heartbeat("a", {"b": 3, "c": 0})
    assert ledger.debts(ALL) == {"b": {"a": 3}}
    assert ledger.writes() == ledger.writes() == [swap("a", {"b": 3}, 0)]
    ledger.stored("a", 5, {"b": 3})
    assert ledger.writes() == []
    ledger.heartbeat("a", {"b": 3})
    assert ledger.writes() == []
    ledger.heartbeat("a", {})
    assert ledger.writes() == [swap("a", {}, 5)]
    assert ledger.debts(ALL) == {}


def test_of_two_that_write_at_once_the_other_looks_again() -> None:
    ledger = DebtLedger()
    ledger.heartbeat("a", {"b": 3})
    ledger.stored("a", 8, {"b": 2})  # another replica heard something else
    assert ledger.writes() == [swap("a", {"b": 3}, 8)]
    ledger.stored("a", 7, {"b": 1})  # late
    assert ledger.writes() == [swap("a", {"b": 3}, 8)]
    ledger.stored("a", 9, {"b": 3})
    assert ledger.writes() == []


def test_nothing_to_say_makes_no_record() -> None:
    ledger = DebtLedger()
    ledger.heartbeat("a", {})
    assert ledger.writes() == []


def test_a_listing_replaces_what_is_older_than_it() -> None:
    ledger = DebtLedger()
    ledger.stored("a", 3, {"b": 1})
    ledger.stored("b", 9, {"c": 1})
    ledger.listed(5, {"c": (4, {"a": 2})})
    assert ledger.debts(ALL) == {"c": {"b": 1}, "a": {"c": 2}}
    # A deletion that the listing did not know of yet.
    ledger.stored("c", 8, None)
    ledger.listed(6, {"c": (4, {"a": 2})})
    assert ledger.debts(ALL) == {"c": {"b": 1}}


def test_debts_of_the_dead_do_not_count_and_are_written_off_within_a_bound() -> None:
    ledger = DebtLedger()
    ledger.stored("a", 3, {"b": 1})
    ledger.stored("b", 4, {"a": 2})
    assert ledger.debts({"b"}) == {}
    assert ledger.write_offs({"b"}, 100.0) == []
    assert ledger.write_offs({"b"}, 100.0 + WRITE_OFF_S) == [swap("a", None, 3)]
    # One that was only paused comes back in time.
    assert ledger.write_offs(ALL, 101.0 + WRITE_OFF_S) == []
    assert ledger.write_offs({"b"}, 102.0 + WRITE_OFF_S) == []
    assert ledger.write_offs({"b"}, 102.0 + 2 * WRITE_OFF_S) == [swap("a", None, 3)]
    ledger.stored("a", 6, None)
    assert ledger.write_offs({"b"}, 200.0) == []
    # It was written off, and lives: its next heartbeat is a new record.
    ledger.heartbeat("a", {"b": 1})
    assert ledger.writes() == [swap("a", {"b": 1}, 0)]
