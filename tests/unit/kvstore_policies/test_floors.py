"""What one tenant stores cannot evict all that another has, whichever policy orders the blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.policies.base import nothing_pinned
from services.kvstore.policies.catalogue import CATALOGUE
from services.kvstore.policies.floors import NO_FLOORS, Floors, TenantFloors
from services.kvstore.policies.recency import Lru
from tests.unit.kvstore_policies.driving import maker

Block = tuple[str, int]  # tenant, number


def tenant_of(block: Block) -> str:
    return block[0]


class Tier:
    """Of `room` blocks: what comes evicts what the policy says."""

    def __init__(self, policy: Callable[[], Any], floors: Floors, capacity: int) -> None:
        self.policy = TenantFloors[Block](policy(), tenant_of, floors)
        self.capacity = capacity
        self.blocks: set[Block] = set()
        self.jobs = 0

    def serve(self, run: list[Block], pinned: Callable[[Block], bool] = nothing_pinned) -> list[Block]:
        """Uses a run, and stores what is not there of it; what went."""
        gone = []
        hits = next((depth for depth, block in enumerate(run) if block not in self.blocks), len(run))
        for block in run:
            if block in self.blocks:
                continue
            while len(self.blocks) >= self.capacity:
                victim = self.policy.victim(lambda one: one in run or pinned(one))
                if victim is None:
                    break
                self.check(victim, lambda one: one in run or pinned(one))
                self.blocks.remove(victim)
                self.policy.remove(victim)
                gone.append(victim)
            if len(self.blocks) < self.capacity:
                self.blocks.add(block)
                self.policy.admit(block)
        self.jobs += 1
        self.policy.use(self.jobs, run, hits)
        return gone

    def check(self, victim: Block, pinned: Callable[[Block], bool]) -> None:
        assert victim in self.blocks
        assert not pinned(victim)
        counts = Counter(map(tenant_of, self.blocks))
        if counts[victim[0]] <= self.policy.floor(victim[0]):
            above = [block for block in self.blocks if counts[block[0]] > self.policy.floor(block[0])]
            assert all(map(pinned, above)), "a tenant at its floor gave a block that another could have given"

    def of(self, tenant: str) -> list[int]:
        return sorted(number for owner, number in self.blocks if owner == tenant)


def blocks(tenant: str, count: int, first: int = 0) -> list[Block]:
    return [(tenant, number) for number in range(first, first + count)]


def flood(tier: Tier, tenant: str, count: int) -> None:
    for block in blocks(tenant, count, 1000):
        tier.serve([block])


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_flood_leaves_the_floor(name: str) -> None:
    tier = Tier(maker(name), Floors(share=0.5), 100)
    for start in range(0, 60, 6):
        tier.serve(blocks("ann", 6, start))
    flood(tier, "bob", 500)
    assert 25 <= len(tier.of("ann")) <= 60
    assert len(tier.blocks) == 100


def test_without_floors_it_leaves_nothing() -> None:
    tier = Tier(Lru, NO_FLOORS, 100)
    tier.serve(blocks("ann", 60))
    flood(tier, "bob", 500)
    assert tier.of("ann") == []


def test_weights_divide_the_floors_among_those_who_are_there() -> None:
    tier = Tier(Lru, Floors(share=0.6, weights={"ann": 2.0, "nobody": 50.0}), 90)
    tier.serve(blocks("ann", 40))
    tier.serve(blocks("cyd", 40))
    flood(tier, "bob", 500)
    # 54 blocks for three tenants, of whom one counts twice.
    assert (len(tier.of("ann")), len(tier.of("cyd"))) == (27, 13)
    assert tier.of("ann") == list(range(27)), "of a run the deepest go first"


def test_above_the_floor_the_policy_decides_alone() -> None:
    tier = Tier(Lru, Floors(share=0.5), 100)
    tier.serve(blocks("ann", 80))
    gone = tier.serve(blocks("bob", 50))
    assert gone == [("ann", number) for number in range(79, 49, -1)]


def test_who_comes_back_goes_on_with_what_was_spared() -> None:
    """And loses that first, not what it uses, once it has more than the floor."""
    tier = Tier(Lru, Floors(share=0.5), 100)
    tier.serve(blocks("ann", 50))
    flood(tier, "bob", 300)
    assert tier.of("ann") == list(range(25))
    assert tier.serve(blocks("ann", 10)) == []
    gone = tier.serve(blocks("ann", 10, 100))
    assert {tenant for tenant, _ in gone} == {"ann", "bob"}
    assert tier.of("ann")[:10] == list(range(10)), "what was used a moment ago stays"


def test_a_tenant_with_a_ceiling_loses_its_own_by_use_whatever_the_policy_says() -> None:
    policy = TenantFloors[Block](Lru(), tenant_of, NO_FLOORS, {"ann", "cyd"}.__contains__)
    for block in [*blocks("ann", 4), *blocks("bob", 3)]:
        policy.admit(block)
    assert policy.blocks_under_ceilings() == {"ann": 4}
    policy.use(1, [("ann", 0), ("ann", 1)], 2)
    assert policy.oldest("bob", nothing_pinned) is None, "bob has no bound"
    gone = []
    while (victim := policy.oldest("ann", lambda block: block == ("ann", 3))) is not None:
        policy.remove(victim)
        gone.append(victim)
    assert gone == [("ann", 2), ("ann", 1), ("ann", 0)], "of a run the end goes first, and nothing pinned"
    policy.remove(("ann", 3))
    assert policy.blocks_under_ceilings() == {}


def test_a_tenant_that_is_gone_has_no_floor() -> None:
    tier = Tier(Lru, Floors(share=1.0), 40)
    tier.serve(blocks("ann", 20))
    tier.serve(blocks("bob", 20))
    for block in blocks("ann", 20):
        tier.blocks.remove(block)
        tier.policy.remove(block)
    flood(tier, "bob", 60)
    assert len(tier.of("bob")) == 40


@pytest.mark.parametrize("name", CATALOGUE)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(1, 6), st.booleans()), max_size=60
    ),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    weight=st.sampled_from([0.2, 1.0, 4.0]),
)
def test_who_has_no_more_than_the_floor_is_spared(
    name: str, steps: list[tuple[str, int, int, bool]], share: float, weight: float
) -> None:
    tier = Tier(maker(name), Floors(share=share, weights={"a": weight}), 12)
    for tenant, first, count, pins in steps:
        run = [(tenant, first * 10 + depth) for depth in range(count)]
        tier.serve(run, lambda block, pins=pins: pins and block[1] % 3 == 0)
        assert len(tier.blocks) <= 12
    # Whatever was put aside can go: nothing is lost to the tier.
    while tier.blocks:
        victim = tier.policy.victim(nothing_pinned)
        assert victim in tier.blocks
        tier.blocks.remove(victim)
        tier.policy.remove(victim)
    assert tier.policy.victim(nothing_pinned) is None
