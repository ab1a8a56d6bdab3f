from __future__ import annotations

import pytest

from kvcommons.errors import InvalidInput
from services.kvstore.policy import Lru, policy_factory

A, B, C, D = (bytes([n]) * 32 for n in range(4))


def test_the_least_recently_used_goes_first_and_of_a_run_the_deepest() -> None:
    policy = Lru()
    for block_id in (A, B, C, D):
        policy.admit(block_id)
    policy.use([A, B, C])
    assert list(policy.victims()) == [D, C, B, A]


def test_what_left_the_tier_is_no_victim_and_unknown_blocks_are_ignored() -> None:
    policy = Lru()
    policy.admit(A)
    policy.admit(B)
    policy.remove(A)
    policy.remove(A)
    policy.use([A, C])
    assert list(policy.victims()) == [B]


def test_an_unknown_policy_names_the_known_ones() -> None:
    assert isinstance(policy_factory("lru")(), Lru)
    with pytest.raises(InvalidInput, match="lru"):
        policy_factory("clairvoyant")
