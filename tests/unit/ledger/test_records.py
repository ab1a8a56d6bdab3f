"""Where the stack's session records are: what follows on what."""

from __future__ import annotations

import itertools

import pytest

from services.ledger.records import next_place

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
