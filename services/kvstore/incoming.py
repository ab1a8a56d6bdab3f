"""A layer on its way from a writer into DRAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcommons.errors import InvalidInput
from services.kvstore.block import Staging
from services.kvstore.catalog import Refusal
from services.kvstore.tier import BlockShape

if TYPE_CHECKING:
    from services.kvstore.blocks import BlockStore


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPut:
    """One layer of a run of consecutive blocks of one sequence, objects in the order of `block_ids`."""

    shape: BlockShape
    tenant: str
    writer: str
    layer: int
    parent: bytes
    first_block: int
    block_ids: Sequence[bytes]
    checksums: Sequence[int]

    def __post_init__(self) -> None:
        if not self.block_ids or len(self.block_ids) != len(self.checksums):
            raise InvalidInput(
                "there must be as many checksums as block_ids, and at least one", param="checksums"
            )
        if not 0 <= self.layer < self.shape.layers:
            raise InvalidInput(f"layer {self.layer} of {self.shape.layers}", param="layer")
        if not self.writer:
            raise InvalidInput("a writer has a name", param="writer")


class Incoming:
    """A layer on its way in: where each object goes (None: nobody wants it).

    End it by `finish` or `break_off`.
    """

    def __init__(self, store: BlockStore, put: LayerPut, places: list[Staging | Refusal]) -> None:
        self._store = store
        self._put = put
        self._places = places
        self.into: list[memoryview | None] = [
            store.arena.object(place.slot, put.layer) if isinstance(place, Staging) else None
            for place in places
        ]

    def finish(self) -> list[int]:
        """The bytes are there. Indices of blocks of which no more layers should be sent."""
        self.into.clear()
        return self._store.finish_put(self._put, self._places)

    def break_off(self) -> None:
        """The bytes will not come."""
        self.into.clear()
        self._store.break_put(self._put, self._places)
