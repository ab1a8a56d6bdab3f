"""Layers on their way from a writer into DRAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcommons.errors import InvalidInput
from kvcommons.rblock.heads import HeadPart
from services.kvstore.block import Refusal, Staging
from services.kvstore.tier import BlockShape

if TYPE_CHECKING:
    from services.kvstore.blocks import BlockStore


def check_run(block_ids: Sequence[bytes]) -> None:
    """Raises InvalidInput where a block comes twice: each identity is of all tokens up to its block's end, so
    in no sequence does one come again."""
    if len(set(block_ids)) < len(block_ids):
        raise InvalidInput("a run names each block once: one comes again in this one", param="block_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPut:
    """Consecutive layers of a run of consecutive blocks of one sequence, or some heads of them.

    Objects and `checksums` are in the order of `block_ids`, those of one block in the order of `layers`.
    """

    shape: BlockShape
    tenant: str
    writer: str
    layers: range
    parent: bytes
    first_block: int
    block_ids: Sequence[bytes]
    checksums: Sequence[int]
    heads: HeadPart | None = None

    def __post_init__(self) -> None:
        if not self.block_ids or len(self.block_ids) * len(self.layers) != len(self.checksums):
            raise InvalidInput(
                "there must be as many checksums as objects, and at least one", param="checksums"
            )
        if not 0 <= self.layers.start < self.layers.stop <= self.shape.layers:
            raise InvalidInput(
                f"layers {self.layers.start} to {self.layers.stop - 1} of {self.shape.layers}", param="layer"
            )
        if not self.writer:
            raise InvalidInput("a writer has a name", param="writer")

    @property
    def block_bytes(self) -> int:
        """That come of each block."""
        return len(self.layers) * self.shape.object_bytes // (1 if self.heads is None else self.heads.parts)

    def checksums_of(self, number: int) -> Sequence[int]:
        """Of one block, layer by layer."""
        count = len(self.layers)
        return self.checksums[number * count : (number + 1) * count]


class Incoming:
    """Layers on their way in: where each block's bytes go, in their order (None: nobody wants them).

    End it by `finish` or `break_off`.
    """

    def __init__(self, store: BlockStore, put: LayerPut, places: list[Staging | Refusal]) -> None:
        self._store = store
        self._put = put
        self._places = places
        self.into: list[list[memoryview] | None] = [
            self._buffers(place) if isinstance(place, Staging) else None for place in places
        ]

    def _buffers(self, place: Staging) -> list[memoryview]:
        arena, put = self._store.arena, self._put
        if put.heads is None:
            return [arena.objects(place.slot, put.layers)]
        return put.heads.pieces([arena.object(place.slot, layer) for layer in put.layers])

    def finish(self) -> list[int]:
        """The bytes are there. Indices of blocks of which no more layers should be sent."""
        self.into.clear()
        return self._store.finish_put(self._put, self._places)

    def break_off(self) -> None:
        """The bytes will not come."""
        self.into.clear()
        self._store.break_put(self._put, self._places)
