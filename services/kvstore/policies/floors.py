"""A floor and a ceiling for each tenant, put around any policy: what one tenant stores cannot evict all that
another has, nor be more than it may have."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic

from services.kvstore.policies.base import K, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """`share` of a tier is divided among the tenants that have blocks in it, by their weights (1 where none
    is given). A tenant's part is its floor; the rest of the tier is anybody's."""

    share: float = 0.5
    weights: Mapping[str, float] = field(default_factory=dict)

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


NO_FLOORS = Floors(share=0.0)
OTHERS = "*"  # in the settings: each tenant that is not named


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Bytes that a tenant's blocks of all models may take in each tier; a tenant that is not named, and where
    there is no OTHERS, has no bound."""

    dram_bytes: Mapping[str, int] = field(default_factory=dict)
    disk_bytes: Mapping[str, int] = field(default_factory=dict)


NO_CEILINGS = Ceilings()


def ceiling_of(tenant: str, ceilings: Mapping[str, int]) -> float:
    """In bytes; infinity where there is none."""
    return ceilings.get(tenant, ceilings.get(OTHERS, math.inf))


class TenantFloors(Generic[K]):
    """A policy of one tier that spares the blocks of a tenant with no more than its floor.

    A victim of `policy` that is spared is put aside: it is out of `policy`, in the order in which it would
    have gone, until it is used again. So each is passed over once, not at every eviction. Once its tenant has
    more than the floor, what was put aside is the first to go. The floors add up to no more than the share of
    the tier, so some tenant always has more than its own, unless its blocks are all pinned: then what was put
    aside goes too.

    Of a tenant with a ceiling the blocks are kept in the order of their use, too: what is too much goes by
    that order, for a policy's knows no tenants, and all others' blocks would be passed over."""

    def __init__(
        self,
        policy: Policy[K],
        tenant_of: Callable[[K], str],
        floors: Floors,
        has_ceiling: Callable[[str], bool] = lambda tenant: False,
    ) -> None:
        """`tenant_of` is asked once for each block, when it is admitted."""
        self.policy = policy
        self._has_ceiling = has_ceiling
        self._by_use: dict[str, OrderedDict[K, None]] = {}  # of tenants with a ceiling, the oldest first
        self._tenant_of = tenant_of
        self._floors = floors
        self._tenants: dict[K, str] = {}  # of the blocks in the tier
        self._blocks: Counter[str] = Counter()
        self._weights = 0.0  # of the tenants in it, together
        self._aside: dict[str, OrderedDict[K, None]] = {}

    def expect(self, job: int, run: Sequence[K]) -> None:
        self._take_back(run)
        self.policy.expect(job, run)

    def forget(self, job: int, run: Sequence[K]) -> None:
        self.policy.forget(job, run)

    def move(self, job: int, to: int, run: Sequence[K]) -> None:
        self.policy.move(job, to, run)

    def use(self, job: int, run: Sequence[K], hits: int) -> None:
        self._take_back(run)
        self._note_use(run)
        self.policy.use(job, run, hits)

    def admit(self, block: K, after: K | None = None) -> None:
        if block not in self._tenants:
            tenant = self._tenants[block] = self._tenant_of(block)
            self._blocks[tenant] += 1
            if self._blocks[tenant] == 1:
                self._weights += self._floors.weight(tenant)
            if self._has_ceiling(tenant):
                self._by_use.setdefault(tenant, OrderedDict())[block] = None
        self._forget_aside(block)
        self.policy.admit(block, after)

    def remove(self, block: K) -> None:
        tenant = self._tenants.pop(block, None)
        if tenant is not None:
            self._forget_aside(block, tenant)
            self._blocks[tenant] -= 1
            if not self._blocks[tenant]:
                del self._blocks[tenant]
                self._weights -= self._floors.weight(tenant)
            if tenant in self._by_use:
                del self._by_use[tenant][block]
                if not self._by_use[tenant]:
                    del self._by_use[tenant]
        self.policy.remove(block)

    def victim(self, pinned: Callable[[K], bool]) -> K | None:
        for tenant, aside in self._aside.items():
            if self._above_floor(tenant):
                for block in aside:
                    if not pinned(block):
                        return block
        while (victim := self.policy.victim(pinned)) is not None:
            tenant = self._tenants[victim]
            if self._above_floor(tenant):
                return victim
            self.policy.remove(victim)
            self._aside.setdefault(tenant, OrderedDict())[victim] = None
        # What the policy lets go after pinned blocks only (a prompt's beginning), then what was put aside.
        above = (block for block, tenant in self._tenants.items() if self._above_floor(tenant))
        spared = (block for blocks in self._aside.values() for block in blocks)
        return next((block for block in chain(above, spared) if not pinned(block)), None)

    def blocks_under_ceilings(self) -> dict[str, int]:
        """How many blocks each tenant with a ceiling has here."""
        return {tenant: len(blocks) for tenant, blocks in self._by_use.items()}

    def oldest(self, tenant: str, pinned: Callable[[K], bool]) -> K | None:
        """Which block of a tenant with a ceiling goes where it has too many; None where all are pinned."""
        return next((block for block in self._by_use.get(tenant, ()) if not pinned(block)), None)

    def floor(self, tenant: str) -> float:
        """In blocks. A tier is full when somebody asks: what is in it is what there is room for."""
        if len(self._blocks) < 2:
            return 0.0
        return self._floors.share * len(self._tenants) * self._floors.weight(tenant) / self._weights

    def _above_floor(self, tenant: str) -> bool:
        return self._blocks[tenant] > self.floor(tenant)

    def _note_use(self, run: Sequence[K]) -> None:
        """A run's end goes before its beginning, without which it is of no use."""
        if self._by_use:
            for block in reversed(run):
                tenant = self._tenants.get(block)
                if tenant in self._by_use:
                    self._by_use[tenant].move_to_end(block)

    def _take_back(self, run: Sequence[K]) -> None:
        if self._aside:
            for block in reversed(run):
                if self._forget_aside(block):
                    self.policy.admit(block)

    def _forget_aside(self, block: K, tenant: str | None = None) -> bool:
        """Whether it was put aside."""
        tenant = tenant or self._tenants.get(block)
        aside = self._aside.get(tenant) if tenant is not None else None
        if aside is None or block not in aside:
            return False
        del aside[block]
        if not aside:
            assert tenant is not None
            del self._aside[tenant]
        return True
