"""Which blocks belong to whom: segments by handle, their owners, leases and pins. Pure: the clock is passed
in.

A handle is never used again, and the epoch names one life of one process: what a segment's former owner, or
an owner from before a restart, asks for is refused (StaleEpoch) and reaches no block. A segment that is
released while an operation is under way on it keeps its blocks until that operation has ended (`pin`,
`unpin`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcommons.errors import CapacityExhausted, InvalidInput, StaleEpoch
from kvcommons.rblock.allocator import BlockAllocator


def new_epoch() -> int:
    """Of a process that starts now: later than any before it on this machine, uint64, never 0."""
    return time.time_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRef:
    handle: int
    epoch: int


@dataclass(slots=True, kw_only=True, eq=False)
class Segment:
    """A run of a sequence's tokens, in whole blocks. Changed by its table only."""

    handle: int
    owner: str  # instance id of the debtor; the holder's own for its own sequences
    sequence: str
    first_position: int  # logical, shift included: of the first token
    blocks: list[int]  # physical, in order
    expires_s: float | None  # on the table's clock; None: no lease (the holder's own)
    pins: int = 0
    released: bool = False


class SegmentTable:
    """Over a BlockAllocator, on each of whose blocks a segment holds one reference. Not thread-safe: `Holder`
    is."""

    def __init__(self, allocator: BlockAllocator, *, epoch: int, lend_blocks_max: int) -> None:
        """At most `lend_blocks_max` blocks are lent (segments with a lease) at any time."""
        self._allocator = allocator
        self.epoch = epoch
        self.lend_blocks_max = lend_blocks_max
        self._segments: dict[int, Segment] = {}
        self._next_handle = 1

    @property
    def segments(self) -> Sequence[Segment]:
        return list(self._segments.values())

    @property
    def lent_blocks(self) -> int:
        return sum(
            len(segment.blocks) for segment in self._segments.values() if segment.expires_s is not None
        )

    @property
    def lendable_blocks(self) -> int:
        """How many more could be lent now."""
        return max(0, min(self._allocator.free, self.lend_blocks_max - self.lent_blocks))

    def lend(
        self, owner: str, sequence: str, blocks: int, *, first_position: int, lease_s: float, now_s: float
    ) -> SegmentRef:
        """A segment for another instance. Raises CapacityExhausted, and changes nothing then."""
        if not owner:
            raise InvalidInput("a reservation needs an owner", param="owner")
        _check_lease(lease_s)
        return self._add(owner, sequence, self._borrowable(blocks), first_position, now_s + lease_s)

    def adopt(self, owner: str, sequence: str, blocks: Sequence[int], *, first_position: int) -> SegmentRef:
        """A segment without a lease over blocks that are in use already; takes a reference of its own on
        each."""
        self._allocator.retain(blocks)
        return self._add(owner, sequence, list(blocks), first_position, None)

    def grow(self, ref: SegmentRef, blocks: int, *, owner: str, lease_s: float, now_s: float) -> None:
        """Appends `blocks` new blocks and renews the lease. Raises StaleEpoch, CapacityExhausted."""
        segment = self.find(ref)
        if segment.owner != owner or segment.expires_s is None:
            raise InvalidInput(
                f"segment {ref.handle} belongs to {segment.owner}, not to {owner}", param="owner"
            )
        _check_lease(lease_s)
        segment.blocks += self._borrowable(blocks)
        segment.expires_s = now_s + lease_s

    def extend(self, ref: SegmentRef, blocks: Sequence[int]) -> None:
        """As `adopt`, for more blocks of a segment without a lease. Raises StaleEpoch."""
        segment = self.find(ref)
        assert segment.expires_s is None, "a lent segment grows by `grow`"
        self._allocator.retain(blocks)
        segment.blocks += blocks

    def find(self, ref: SegmentRef) -> Segment:
        """Raises StaleEpoch for a handle of another life of the holder, and for one that is not known any
        more."""
        if ref.epoch != self.epoch:
            raise StaleEpoch(
                f"segment {ref.handle} is of another life of this holder: its KV is gone, recompute it"
            )
        segment = self._segments.get(ref.handle)
        if segment is None:
            raise StaleEpoch(
                f"segment {ref.handle} was released, or its lease ran out: its KV is gone, recompute it"
            )
        return segment

    def pin(self, ref: SegmentRef) -> Segment:
        """As `find`; the blocks stay the segment's until `unpin`, even if it is released meanwhile."""
        segment = self.find(ref)
        segment.pins += 1
        return segment

    def unpin(self, segment: Segment) -> None:
        assert segment.pins, "unpinned more often than pinned"
        segment.pins -= 1
        if segment.released and not segment.pins:
            self._allocator.release(segment.blocks)

    def release(self, refs: Iterable[SegmentRef]) -> None:
        """Segments that are not known (any more) are passed over: whoever releases may ask twice."""
        for ref in refs:
            if ref.epoch == self.epoch and ref.handle in self._segments:
                self._drop(ref.handle)

    def renew(self, owner: str, refs: Iterable[SegmentRef], *, lease_s: float, now_s: float) -> list[int]:
        """Sets the leases anew; returns the handles that this holder does not have (any more), or not from
        `owner`."""
        _check_lease(lease_s)
        unknown = []
        for ref in refs:
            segment = self._segments.get(ref.handle) if ref.epoch == self.epoch else None
            if segment is None or segment.owner != owner or segment.expires_s is None:
                unknown.append(ref.handle)
            else:
                segment.expires_s = now_s + lease_s
        return unknown

    def expire(self, now_s: float) -> list[Segment]:
        """Releases what nobody has renewed in time; returns it for the log."""
        over = [s for s in self._segments.values() if s.expires_s is not None and s.expires_s <= now_s]
        for segment in over:
            self._drop(segment.handle)
        return over

    def _add(
        self, owner: str, sequence: str, blocks: list[int], first_position: int, expires_s: float | None
    ) -> SegmentRef:
        handle = self._next_handle
        self._next_handle += 1
        self._segments[handle] = Segment(
            handle=handle,
            owner=owner,
            sequence=sequence,
            first_position=first_position,
            blocks=blocks,
            expires_s=expires_s,
        )
        return SegmentRef(handle=handle, epoch=self.epoch)

    def _borrowable(self, blocks: int) -> list[int]:
        if not blocks:
            raise InvalidInput("a reservation is of at least one block", param="blocks")
        room = self.lend_blocks_max - self.lent_blocks
        if blocks > room:
            raise CapacityExhausted(
                f"{blocks} blocks are wanted, {max(room, 0)} more may be lent: ask another holder or retry"
            )
        return self._allocator.allocate(blocks)

    def _drop(self, handle: int) -> None:
        segment = self._segments.pop(handle)
        segment.released = True
        if not segment.pins:
            self._allocator.release(segment.blocks)


def _check_lease(lease_s: float) -> None:
    if lease_s <= 0:
        raise InvalidInput("a lease takes at least a millisecond", param="lease_ms")
