"""In which order blocks found at start should go. Decisions only.

A block is of use only with all blocks before it. In a running store whoever uses a block uses those before it
too, so they are as new as it is; an index entry says only when its block was stored, and the beginning of a
long conversation was stored first. So a block counts as new as the newest that continues it, and of equally
new ones the deepest goes first: what is left of a prompt is its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Stored(Protocol):
    """What an index entry says of a block. `first_index` is its depth, `parent` empty at depth 0."""

    @property
    def block_id(self) -> bytes: ...

    @property
    def parent(self) -> bytes: ...

    @property
    def first_index(self) -> int: ...

    @property
    def created_ms(self) -> int: ...


def by_worth(blocks: Iterable[Stored]) -> Sequence[bytes]:
    """The identities, those to go first in front."""
    deepest_first = sorted(blocks, key=lambda block: -block.first_index)
    newest_ms = {block.block_id: block.created_ms for block in deepest_first}
    for block in deepest_first:  # those that continue a block come before it
        if block.parent in newest_ms:
            newest_ms[block.parent] = max(newest_ms[block.parent], newest_ms[block.block_id])
    deepest_first.sort(key=lambda block: newest_ms[block.block_id])  # stable
    return [block.block_id for block in deepest_first]
