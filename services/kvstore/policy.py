"""Which block goes first when a tier is full. Decisions only: no I/O, no clock.

One policy object serves one model in one tier. The caller tells it what happens to blocks and asks for
victims; a block that is pinned is passed over by the caller. The trace replay drives the same classes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvcommons.errors import InvalidInput


class Policy(Protocol):
    """Order of eviction."""

    def admit(self, block_id: bytes) -> None:
        """The block came into the tier."""

    def use(self, block_ids: Sequence[bytes]) -> None:
        """A run of blocks, in the order of its sequence, was used; those not in the tier are ignored."""

    def remove(self, block_id: bytes) -> None:
        """The block left the tier (or was never in it)."""

    def victims(self) -> Iterator[bytes]:
        """Blocks in the order in which they should go. Invalid once the policy is changed."""


class Lru:
    """Least recently used first; of a run that was used together, the deepest first.

    A block is of use only with all blocks before it, so the end of a run is worth less than its beginning.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, block_id: bytes) -> None:
        self._order[block_id] = None
        self._order.move_to_end(block_id)

    def use(self, block_ids: Sequence[bytes]) -> None:
        for block_id in reversed(block_ids):
            if block_id in self._order:
                self._order.move_to_end(block_id)

    def remove(self, block_id: bytes) -> None:
        self._order.pop(block_id, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru}


def policy_factory(name: str) -> Callable[[], Policy]:
    """The class behind a `policy` setting. Raises InvalidInput for an unknown one."""
    if name not in POLICIES:
        raise InvalidInput(f"policy {name!r} is not one of {', '.join(POLICIES)}", param="policy")
    return POLICIES[name]
