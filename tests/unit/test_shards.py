"""Rendezvous hashing: who owns what, and how little moves."""

from __future__ import annotations

import random

import pytest

from kvcommons.shards import ShardView, decode_view, encode_view, newest, owners, session_key

SHARDS = ("a", "b", "c", "d")
KEYS = [session_key("tenant", f"session-{number}") for number in range(4000)]


def test_the_order_of_the_shards_does_not_matter() -> None:
    shuffled = list(SHARDS)
    random.Random(1).shuffle(shuffled)
    assert all(owners(key, SHARDS) == owners(key, shuffled) for key in KEYS)


def test_every_shard_has_its_share() -> None:
    homes = [owners(key, SHARDS)[0] for key in KEYS]
    for shard in SHARDS:
        assert homes.count(shard) == pytest.approx(len(KEYS) / 4, rel=0.15)


def test_two_copies_lie_on_two_shards_where_there_are_two() -> None:
    assert all(len(set(owners(key, SHARDS))) == 2 for key in KEYS)
    assert owners(KEYS[0], ("a",)) == ("a",)


def test_a_shard_that_leaves_moves_only_its_share() -> None:
    """No pair without it changes, and the survivor of a pair answers from then on."""
    left = SHARDS[1:]
    for key in KEYS:
        before, after = owners(key, SHARDS), owners(key, left)
        if "a" not in before:
            assert after == before
        else:
            assert after[0] == next(shard for shard in before if shard != "a")


def test_a_shard_that_joins_moves_only_its_share() -> None:
    moved = sum(owners(key, SHARDS)[0] != owners(key, (*SHARDS, "e"))[0] for key in KEYS)
    assert moved == pytest.approx(len(KEYS) / 5, rel=0.15)
    assert all(
        "e" in owners(key, (*SHARDS, "e")) or owners(key, (*SHARDS, "e")) == owners(key, SHARDS)
        for key in KEYS
    )


def test_a_session_s_key_cannot_reach_into_another_tenant() -> None:
    assert session_key("ab", "c") != session_key("a", "bc")


def test_holders_are_the_owners_and_whoever_will_be_one() -> None:
    view = ShardView(epoch=7, serving=("a", "b"), joining=("c",))
    for key in KEYS:
        holders = view.holders(key)
        assert holders[:2] == owners(key, ("a", "b"))
        assert ("c" in holders) == ("c" in owners(key, ("a", "b", "c")))
        assert view.home(key) == holders[0]


def test_a_view_survives_its_message() -> None:
    view = ShardView(epoch=3, serving=("a", "b"), joining=("c",), settled=False)
    assert decode_view(encode_view(view)) == view
    assert decode_view(type(encode_view(view))()) is None
    assert newest([None, view, ShardView(epoch=2, serving=("z",))]) == view
