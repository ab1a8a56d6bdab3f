"""Blocks set aside for settlements: a swap of debts needs room where nobody has any (Infinite-LLM, section
4.5). Pure: the clock is passed in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcommons.errors import CapacityExhausted, InvalidInput
from kvcommons.holder.locked import locked
from kvcommons.rblock.allocator import BlockAllocator

# Memory that nobody renews is free again after this, whoever took it.
LEASE_S_MAX = 600.0


@dataclass(slots=True, kw_only=True)
class _Pledge:
    blocks: list[int]
    expires_s: float


class Pledges:
    """By settlement, each under a lease. Thread-safe."""

    def __init__(self, allocator: BlockAllocator, clock: Callable[[], float]) -> None:
        self._allocator = allocator
        self._clock = clock
        self._lock = threading.RLock()
        self._pledges: dict[str, _Pledge] = {}

    @property
    @locked
    def blocks(self) -> int:
        """Of all settlements."""
        return sum(len(pledge.blocks) for pledge in self._pledges.values())

    @locked
    def pledge(self, settlement: str, blocks: int, *, lease_s: float) -> int:
        """Sets free blocks aside for a settlement, as many as there are up to `blocks`; how many it has.
        Asked again it renews the lease and takes no more."""
        check_lease(lease_s)
        pledge = self._pledges.get(settlement)
        if pledge is None:
            allocated = self._allocator.allocate(min(blocks, self._allocator.free))
            pledge = self._pledges[settlement] = _Pledge(blocks=allocated, expires_s=0.0)
        pledge.expires_s = self._clock() + lease_s
        return len(pledge.blocks)

    @locked
    def pledged(self, settlement: str) -> int:
        """Blocks set aside for it; 0 where it is not known."""
        pledge = self._pledges.get(settlement)
        return 0 if pledge is None else len(pledge.blocks)

    @locked
    def draw(self, settlement: str, blocks: int) -> list[int]:
        """Takes blocks out of what is set aside; the caller has their references. Raises CapacityExhausted,
        and takes none then."""
        pledge = self._pledges.get(settlement)
        if pledge is None or len(pledge.blocks) < blocks:
            raise CapacityExhausted(f"settlement {settlement} has no {blocks} blocks set aside here")
        drawn, pledge.blocks = pledge.blocks[:blocks], pledge.blocks[blocks:]
        return drawn

    @locked
    def refill(self, settlement: str, blocks: Sequence[int]) -> None:
        """Puts drawn blocks back; they are free where the settlement has ended."""
        pledge = self._pledges.get(settlement)
        if pledge is None:
            self._allocator.release(blocks)
        else:
            pledge.blocks += blocks

    @locked
    def claim(self, settlement: str, blocks: Sequence[int]) -> bool:
        """Takes these references over for a settlement, those that are a block's last ones; the others are
        given back. False, and nothing done, where it is not known."""
        pledge = self._pledges.get(settlement)
        if pledge is None:
            return False
        pledge.blocks += self._allocator.claim(blocks)
        return True

    @locked
    def redeem(self, settlement: str) -> None:
        """The settlement has ended: what is set aside is free."""
        pledge = self._pledges.pop(settlement, None)
        if pledge is not None:
            self._allocator.release(pledge.blocks)

    @locked
    def expire(self, grace_s: float = 0.0) -> None:
        """Redeems what nobody has renewed within `grace_s` of its end."""
        by_s = self._clock() - grace_s
        for name in [name for name, pledge in self._pledges.items() if pledge.expires_s <= by_s]:
            self.redeem(name)


def check_lease(lease_s: float) -> None:
    """Raises InvalidInput."""
    if not 0 < lease_s <= LEASE_S_MAX:
        raise InvalidInput(
            f"a lease takes at least a millisecond, and at most {LEASE_S_MAX:g} s: renew it", param="lease_ms"
        )
