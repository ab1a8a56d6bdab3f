"""Rendezvous hashing: which kvstore is whose home, and how little moves."""

from __future__ import annotations

import random

import pytest

from kvcommons.homes import homes_of, session_key

KVSTORES = ("a", "b", "c", "d")
KEYS = [session_key("tenant", f"session-{number}") for number in range(4000)]


def test_the_order_of_the_kvstores_does_not_matter() -> None:
    shuffled = list(KVSTORES)
    random.Random(1).shuffle(shuffled)
    assert all(homes_of(key, KVSTORES) == homes_of(key, shuffled) for key in KEYS)


def test_every_kvstore_has_its_share() -> None:
    homes = [homes_of(key, KVSTORES)[0] for key in KEYS]
    for name in KVSTORES:
        assert homes.count(name) == pytest.approx(len(KEYS) / 4, rel=0.15)


def test_a_kvstore_that_leaves_moves_only_its_share() -> None:
    left = KVSTORES[1:]
    for key in KEYS:
        assert homes_of(key, left) == [name for name in homes_of(key, KVSTORES) if name != "a"]


def test_a_kvstore_that_comes_moves_only_its_share() -> None:
    moved = sum(homes_of(key, KVSTORES)[0] != homes_of(key, (*KVSTORES, "e"))[0] for key in KEYS)
    assert moved == pytest.approx(len(KEYS) / 5, rel=0.15)


def test_a_session_s_key_cannot_reach_into_another_tenant() -> None:
    assert session_key("ab", "c") != session_key("a", "bc")
