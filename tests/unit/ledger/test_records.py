"""Where the stack's session records are: what follows on what."""

from __future__ import annotations

import itertools

import pytest

from services.ledger.records import PlaceChoice, next_place

A, B, D, E = "folder a", "folder b", "database d:5432/kv", "database e:5432/kv"


@pytest.mark.parametrize(
    ("stored", "present", "lost", "expected"),
    [
        pytest.param("", {}, (), "", id="nobody has come"),
        pytest.param("", {A}, (), A, id="the first one"),
        pytest.param("", {A, B}, (), A, id="two at once"),
        pytest.param("", {A, D}, (), D, id="what an operator named goes before a folder"),
        pytest.param(A, {B}, (), A, id="no folder stands in for another one"),
        pytest.param(A, {A, B, D}, (), A, id="whoever is there stays"),
        pytest.param(A, {A, B}, (A,), A, id="and is not lost"),
        pytest.param(A, {B}, (A,), B, id="what is lost is followed"),
        pytest.param(A, {}, (A,), A, id="by somebody who is there"),
        pytest.param(A, {B, D}, (), D, id="records moved to a database"),
        pytest.param(D, {B}, (), D, id="no folder stands in for a database"),
        pytest.param(D, {B}, (D,), B, id="unless it is given up"),
        pytest.param(D, {E}, (), E, id="a database moved"),
        pytest.param(D, {D, E}, (), D, id="while one setting after the other is changed"),
    ],
)
def test_what_follows(stored: str, present: set[str], lost: tuple[str, ...], expected: str) -> None:
    assert next_place(stored, present, lost) == expected


def test_no_folder_ever_follows_by_itself() -> None:
    for stored in (A, D):
        for size in range(4):
            for present in itertools.combinations((A, B, D, E), size):
                after = next_place(stored, present, ())
                assert after == stored or after.startswith("database ")


def test_what_is_there_for_the_time_of_one_heartbeat_does_not_follow() -> None:
    """A forged one while a kvstore begins anew would disable all sessions for good."""
    choice = PlaceChoice((), lease_s=10)
    assert choice.next("", {A}, 0) == A, "the first one does not wait"
    assert choice.next(A, {A, E}, 100) == A
    assert choice.next(A, {E}, 110) == A, "as long as its lease"
    assert choice.next(A, set(), 119) == A
    assert choice.next(A, {E}, 121) == A, "its time begins anew"
    assert choice.next(A, {D, E}, 140) == A
    assert choice.next(A, {D, E}, 141) == E, "whoever stands follows, without the one that has just come"
