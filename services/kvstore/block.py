"""What the store keeps in mind of a block: while its layers come in, and once it is whole."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvcommons.rblock.heads import HeadPart
from services.kvstore.policies.base import Policy
from services.kvstore.policies.floors import NO_CEILINGS, Ceilings, Floors, TenantFloors, ceiling_of
from services.kvstore.tier import BlockShape, Slot

if TYPE_CHECKING:
    from services.kvstore.loader import BlockLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrigin:
    """Where a block comes from: goes into its index entry and is not needed in memory after that."""

    tenant: str
    parent: bytes
    first_index: int


class Refusal(Enum):
    """Why a layer is not taken."""

    STORED = "stored"  # the block is there already
    DUPLICATE = "duplicate"  # one of these layers of it is
    NO_ROOM = "no room"  # DRAM is full of blocks that cannot go


class Space:
    """The blocks of one model."""

    __slots__ = ("blocks", "disk_policy", "dram_policy", "shape", "stagings")

    def __init__(
        self,
        shape: BlockShape,
        new_policy: Callable[[], Policy[bytes]],
        floors: Floors,
        ceilings: Ceilings = NO_CEILINGS,
    ) -> None:
        self.shape = shape
        self.dram_policy = self._policy(new_policy(), floors, ceilings.dram_bytes)
        self.disk_policy = self._policy(new_policy(), floors, ceilings.disk_bytes)
        self.blocks: dict[bytes, Block] = {}
        self.stagings: dict[bytes, dict[str, Staging]] = {}  # by block, then by writer

    def policy(self, *, disk: bool) -> TenantFloors[bytes]:
        """Of a tier."""
        return self.disk_policy if disk else self.dram_policy

    def pinned(self, block_id: bytes, *, disk: bool) -> bool:
        """Whether somebody keeps this block's slot in a tier."""
        block = self.blocks[block_id]
        return bool(block.disk_pins if disk else block.pins)

    def _policy(
        self, policy: Policy[bytes], floors: Floors, ceilings: Mapping[str, int]
    ) -> TenantFloors[bytes]:
        return TenantFloors(
            policy, self._tenant, floors, lambda tenant: ceiling_of(tenant, ceilings) < math.inf
        )

    def _tenant(self, block_id: bytes) -> str:
        return self.blocks[block_id].tenant


class Staging:
    """A block of which not all layers have come. Layers of two writers never meet in one.

    Each has its own. What comes is counted in units: a layer, or a part of the heads of one where its writer
    has several ranks.
    """

    __slots__ = (
        "block_id",
        "checksums",
        "dropped",
        "missing",
        "origin",
        "parts",
        "receiving",
        "slot",
        "space",
        "touched_s",
        "writer",
    )

    def __init__(
        self,
        space: Space,
        block_id: bytes,
        writer: str,
        origin: BlockOrigin,
        slot: Slot,
        now_s: float,
        parts: int,
    ) -> None:
        self.space = space
        self.parts = parts  # of the heads of a layer, which come by themselves
        self.block_id = block_id
        self.writer = writer
        self.origin = origin
        self.slot = slot
        self.checksums = [0] * space.shape.layers
        self.missing = set(range(space.shape.layers * parts))  # units that have not come
        self.receiving: set[int] = set()  # units of which bytes are under way into the slot, or are summed up
        self.touched_s = now_s
        self.dropped = False  # given up while bytes were still under way


def units(layers: range, heads: HeadPart | None) -> list[int]:
    """Of these layers, as a staging counts them."""
    if heads is None:
        return list(layers)
    return [layer * heads.parts + heads.number for layer in layers]


class Block:
    """A whole block. There are many: it holds what every request needs, the rest is in the index.

    `pins` keep its DRAM slot, `disk_pins` its disk slot, though it be detached (no longer to be found). One
    that is `passing` is in DRAM as long as it is pinned, and its tier's policy does not know of it.
    """

    __slots__ = (
        "block_id",
        "checksums",
        "detached",
        "disk",
        "disk_pins",
        "dram",
        "generation",
        "load",
        "origin",
        "passing",
        "pins",
        "space",
        "tenant",
        "unindexed",
    )

    def __init__(self, space: Space, block_id: bytes, generation: int, tenant: str) -> None:
        self.tenant = sys.intern(tenant)
        self.space = space
        self.block_id = block_id
        self.generation = generation
        self.dram: Slot | None = None
        self.disk: Slot | None = None
        self.checksums: tuple[int, ...] | None = None  # known while it is in DRAM
        self.origin: BlockOrigin | None = None  # until it is on disk
        self.load: BlockLoad | None = None  # while it comes from disk
        self.pins = 0
        self.disk_pins = 0
        self.passing = False
        self.detached = False
        self.unindexed = False  # detached, and its index entry is deleted

    @property
    def in_dram(self) -> bool:
        """Whole, not on its way there."""
        return self.dram is not None and self.load is None


@dataclass(slots=True, kw_only=True)
class Doomed:
    """A disk copy whose index entry has to go before its slot may be used again."""

    model: bytes
    block_id: bytes
    slot: Slot
    block: Block | None  # a detached block, whose readers may still have the slot pinned


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    hits_dram: int = 0
    hits_disk: int = 0
    misses: int = 0
    prefetched: int = 0
    evictions_dram: int = 0
    evictions_disk: int = 0
    corrupt: int = 0
    forgotten: int = 0
    expired: int = 0
    read_errors: int = 0
    write_failures: int = 0
    refused: int = 0
    abandoned: int = 0
    put_bytes: int = 0
    sent_bytes: int = 0
    disk_read_bytes: int = 0
    scrubbed_bytes: int = 0
    disk_written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds, and what happened in it."""

    dram_blocks: int
    dram_capacity_blocks: int
    disk_blocks: int
    disk_capacity_blocks: int
    dram_used_bytes: int
    dram_capacity_bytes: int
    disk_used_bytes: int
    disk_capacity_bytes: int
    pending_writes: int
    staging: int
    counters: Counters
