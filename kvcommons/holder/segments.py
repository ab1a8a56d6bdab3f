"""Which blocks belong to whom: segments by handle, their owners, leases and pins. Pure: the clock is passed
in.

A handle is never used again, and the epoch names one life of one process: what a segment's former owner, or
an owner from before a restart, asks for is refused (StaleEpoch) and reaches no block. A segment that is
released while an operation is under way on it keeps its blocks until that operation has ended (`pin`,
`unpin`).

Within one handle generations tell accesses apart. `freeze` begins one, which the owner names: the leading
blocks are not written any more, so that they can be copied elsewhere while accesses of the generation before
go on. `trim` ends that: the frozen blocks are given back once the older accesses under way have ended, and
new ones of an older generation are refused. The blocks that stay keep their indices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcommons.errors import CapacityExhausted, Conflict, InvalidInput, StaleEpoch
from kvcommons.holder.pledges import Pledges, check_lease
from kvcommons.holder.segment import Parting, Pin, Segment
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.telemetry.events import unobserved


def new_epoch() -> int:
    """Of a process that starts now: later than any before it on this machine, uint64, never 0."""
    return time.time_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRef:
    """Two references of different generations are equal: they name one segment."""

    handle: int
    epoch: int
    generation: int = field(default=0, compare=False)


class SegmentTable:
    """Over a BlockAllocator, on each of whose blocks a segment holds one reference. Not thread-safe: `Holder`
    is."""

    def __init__(self, allocator: BlockAllocator, *, epoch: int, lend_blocks_max: int) -> None:
        """At most `lend_blocks_max` blocks are lent (segments with a lease) at any time."""
        self._allocator = allocator
        self.epoch = epoch
        self.lend_blocks_max = lend_blocks_max
        self._segments: dict[int, Segment] = {}
        self._lent: Counter[int] = Counter()  # physical block to how many segments with a lease have it
        self.pledges = Pledges(allocator)
        self._next_handle = 1
        self._next_pin = 1

    @property
    def segments(self) -> Sequence[Segment]:
        return list(self._segments.values())

    @property
    def lent_blocks(self) -> int:
        """Blocks with a lease; one that several segments share counts once."""
        return len(self._lent)

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
        check_lease(lease_s)
        return self._add(owner, sequence, self._borrowable(blocks), first_position, now_s + lease_s)

    def own(
        self, owner: str, sequence: str, blocks: Sequence[int], *, first_position: int, shared_blocks: int = 0
    ) -> SegmentRef:
        """A segment without a lease over blocks that are in use already; takes a reference of its own on
        each. `shared_blocks` leading ones are others' too, and are not written to."""
        self._allocator.retain(blocks)
        ref = self._add(owner, sequence, list(blocks), first_position, None)
        self._segments[ref.handle].shared = shared_blocks
        return ref

    def grow(self, ref: SegmentRef, blocks: int, *, owner: str, lease_s: float, now_s: float) -> None:
        """Appends blocks until there are `blocks`, trimmed ones included, and renews the lease: an owner that
        does not know whether its segment has grown asks again. Raises StaleEpoch, CapacityExhausted."""
        segment = self._owned(ref, owner)
        check_lease(lease_s)
        if segment.expires_s is None:
            raise InvalidInput(f"segment {ref.handle} has no lease: its holder grows it", param="owner")
        if blocks < 1:
            raise InvalidInput("a reservation is of at least one block", param="blocks")
        missing = blocks - segment.trimmed - len(segment.blocks)
        if missing > 0:
            more = self._borrowable(missing)
            self._lent.update(more)
            segment.blocks += more
            self._tell("grow", ref.handle, blocks=more)
        segment.expires_s = now_s + lease_s

    def extend(self, ref: SegmentRef, blocks: Sequence[int]) -> None:
        """As `own`, for more blocks of a segment without a lease. Raises StaleEpoch."""
        segment = self.find(ref)
        assert segment.expires_s is None, "a lent segment grows by `grow`"
        self._allocator.retain(blocks)
        segment.blocks += blocks
        self._tell("grow", ref.handle, blocks=list(blocks))

    def freeze(self, ref: SegmentRef, generation: int, until_block: int, *, owner: str) -> None:
        """Blocks before `until_block` are not written any more, until `thaw` or for good (`trim`).
        `generation` begins with it: the owner names a larger one each time, so that a freeze that comes late
        changes nothing of a later one, and one that its owner did not hear of is in nobody's way. Raises
        StaleEpoch, InvalidInput, and Conflict for a generation that has begun, unless this repeats it."""
        segment = self._owned(ref, owner)
        blocks = until_block - segment.trimmed
        if generation == segment.generation and segment.frozen and blocks == segment.frozen:
            return
        if generation <= segment.generation:
            raise Conflict(
                f"segment {ref.handle} has generation {segment.generation}: a freeze begins a later one than "
                f"{generation}"
            )
        if not 1 <= blocks <= len(segment.blocks):
            raise InvalidInput(
                f"segment {ref.handle} has {len(segment.blocks)} blocks from {segment.trimmed} on: those "
                f"before {until_block} cannot be frozen",
                param="until_block",
            )
        self._end_standing(segment)
        segment.generation, segment.frozen = generation, blocks
        self._tell("freeze", ref.handle, generation=generation, count=blocks)

    def thaw(self, ref: SegmentRef, *, owner: str) -> None:
        """Takes the freeze of this generation back; where there is none, nothing happens."""
        segment = self._segments.get(ref.handle) if ref.epoch == self.epoch else None
        if segment is not None and segment.owner == owner and segment.generation == ref.generation:
            self._end_standing(segment)
            segment.frozen = 0
            self._tell("thaw", ref.handle, generation=segment.generation)

    def trim(self, ref: SegmentRef, *, owner: str, settlement: str = "") -> int:
        """Gives the frozen blocks back: to the settlement, where blocks are set aside for it, else they are
        free. Those that accesses under way may reach follow when these have ended (`parting`). How many
        blocks; 0 where there is no such freeze (any more)."""
        segment = self._segments.get(ref.handle) if ref.epoch == self.epoch else None
        if segment is None or segment.owner != owner or segment.generation != ref.generation:
            return 0
        count, segment.frozen = segment.frozen, 0
        if count:
            self._end_standing(segment)
            blocks, segment.blocks = segment.blocks[:count], segment.blocks[count:]
            segment.trimmed += count
            segment.oldest = segment.generation
            self._tell("trim", ref.handle, generation=segment.generation, count=count)
            segment.parting.append(Parting(blocks=blocks, before=self._next_pin, settlement=settlement))
            self._part(segment)
        return count

    def parting(self, ref: SegmentRef) -> bool:
        """Whether trimmed blocks of the segment still wait for accesses under way."""
        segment = self._segments.get(ref.handle) if ref.epoch == self.epoch else None
        return segment is not None and bool(segment.parting)

    def adopt(
        self,
        ref: SegmentRef,
        *,
        former_owner: str,
        owner: str,
        sequence: str,
        lease_s: float,
        now_s: float,
        shared_blocks: int = 0,
    ) -> SegmentRef:
        """The segment under a new handle, for another owner: the former handle is refused from then on. With
        `shared_blocks` so many leading ones are both's, and neither writes to them. Raises StaleEpoch,
        InvalidInput, Conflict, CapacityExhausted."""
        segment = self._owned(ref, former_owner)
        check_lease(lease_s)
        if not owner:
            raise InvalidInput("a segment needs an owner", param="owner")
        if segment.frozen:
            raise Conflict(f"segment {ref.handle} is being moved: ask again when that has ended")
        if ref.generation != segment.generation:
            raise StaleEpoch(
                f"segment {ref.handle} has generation {segment.generation}, not {ref.generation}: look again"
            )
        if shared_blocks > len(segment.blocks):
            raise InvalidInput(
                f"segment {ref.handle} has {len(segment.blocks)} blocks: {shared_blocks} cannot be shared",
                param="shared_blocks",
            )
        blocks = segment.blocks[:shared_blocks] if shared_blocks else list(segment.blocks)
        self._check_cap(sum(block not in self._lent for block in blocks))
        self._allocator.retain(blocks)
        new = self._add(owner, sequence, blocks, segment.first_position, now_s + lease_s, former=ref.handle)
        heir = self._segments[new.handle]
        heir.trimmed, heir.shared = segment.trimmed, segment.shared
        if shared_blocks:
            self._end_standing(segment)
            heir.shared = segment.shared = max(segment.shared, segment.trimmed + shared_blocks)
        else:
            self._drop(ref.handle, "adopted")
        return new

    def find(self, ref: SegmentRef) -> Segment:
        """Raises StaleEpoch for a handle of another life of the holder, for one that is not known any more,
        and for a generation whose blocks have moved."""
        if ref.epoch != self.epoch:
            raise StaleEpoch(
                f"segment {ref.handle} is of another life of this holder: its KV is gone, recompute it"
            )
        segment = self._segments.get(ref.handle)
        if segment is None:
            raise StaleEpoch(
                f"segment {ref.handle} was released, or its lease ran out: its KV is gone, recompute it"
            )
        if not segment.oldest <= ref.generation <= segment.generation:
            raise StaleEpoch(
                f"segment {ref.handle} has gone on from generation {ref.generation}: its blocks have moved"
            )
        return segment

    def pin(self, ref: SegmentRef, end: Callable[[], bool] | None = None) -> Pin:
        """As `find`; the blocks stay the segment's until `unpin`, even if it is released meanwhile. With
        `end` (see Pin) it is a standing pin, which the table may end."""
        segment = self.find(ref)
        pin = Pin(segment, self._next_pin, end)
        self._next_pin += 1
        segment.pins.add(pin.number)
        if end is not None:
            segment.standing.append(pin)
        if self._watched:
            self._tell("pin", ref.handle, generation=ref.generation, pin=pin.number)
        return pin

    def unpin(self, pin: Pin) -> None:
        """A standing one may have been ended before."""
        segment = pin.segment
        if pin.end is not None:
            if pin not in segment.standing:
                return
            segment.standing.remove(pin)
        assert pin.number in segment.pins, "unpinned more often than pinned"
        segment.pins.remove(pin.number)
        if self._watched:
            self._tell("unpin", segment.handle, pin=pin.number)
        if segment.parting:
            self._part(segment)
        if segment.released and not segment.pins:
            self._give(segment, segment.blocks)

    def release(self, refs: Iterable[SegmentRef]) -> None:
        """Segments that are not known (any more) are passed over: whoever releases may ask twice."""
        for ref in refs:
            if ref.epoch == self.epoch and ref.handle in self._segments:
                self._drop(ref.handle, "release")

    def renew(self, owner: str, refs: Iterable[SegmentRef], *, lease_s: float, now_s: float) -> list[int]:
        """Sets the leases anew; returns the handles that this holder does not have (any more), or not from
        `owner`."""
        check_lease(lease_s)
        unknown = []
        for ref in refs:
            segment = self._segments.get(ref.handle) if ref.epoch == self.epoch else None
            if segment is None or segment.owner != owner or segment.expires_s is None:
                unknown.append(ref.handle)
            else:
                segment.expires_s = now_s + lease_s
        return unknown

    def expire(self, now_s: float) -> list[Segment]:
        """Releases what nobody has renewed in time, pledges too; returns the segments for the log."""
        self.pledges.expire(now_s)
        over = [s for s in self._segments.values() if s.expires_s is not None and s.expires_s <= now_s]
        for segment in over:
            self._drop(segment.handle, "expire")
        return over

    def _add(
        self,
        owner: str,
        sequence: str,
        blocks: list[int],
        first_position: int,
        expires_s: float | None,
        *,
        former: int = 0,
    ) -> SegmentRef:
        """`former`: the handle whose blocks these are too, until now or for good."""
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
        if expires_s is not None:
            self._lent.update(blocks)
        kind = "own" if expires_s is None else "reserve"
        self._tell(kind, handle, owner=owner, blocks=list(blocks), former=former)
        return SegmentRef(handle=handle, epoch=self.epoch)

    def _tell(self, event: str, handle: int, **facts: object) -> None:
        self._allocator.observe(event, handle=handle, epoch=self.epoch, **facts)

    @property
    def _watched(self) -> bool:
        return self._allocator.observe is not unobserved  # pins come by the thousand

    def _borrowable(self, blocks: int) -> list[int]:
        if not blocks:
            raise InvalidInput("a reservation is of at least one block", param="blocks")
        self._check_cap(blocks)
        return self._allocator.allocate(blocks)

    def _check_cap(self, blocks: int) -> None:
        room = self.lend_blocks_max - self.lent_blocks
        if blocks > room:
            raise CapacityExhausted(
                f"{blocks} blocks are wanted, {max(room, 0)} more may be lent: ask another holder or retry"
            )

    def _owned(self, ref: SegmentRef, owner: str) -> Segment:
        """As `find`; raises InvalidInput for somebody else's."""
        segment = self.find(ref)
        if segment.owner != owner:
            raise InvalidInput(
                f"segment {ref.handle} belongs to {segment.owner}, not to {owner}", param="owner"
            )
        return segment

    def _part(self, segment: Segment) -> None:
        """Gives back trimmed blocks that no access under way can reach."""
        oldest = min(segment.pins, default=self._next_pin)
        done = [parting for parting in segment.parting if oldest >= parting.before]
        segment.parting = [parting for parting in segment.parting if oldest < parting.before]
        for parting in done:
            self._give(segment, parting.blocks, parting.settlement)

    def _end_standing(self, segment: Segment) -> None:
        """Before it changes."""
        for pin in list(segment.standing):
            if pin.end is not None and pin.end():
                self.unpin(pin)

    def _give(self, segment: Segment, blocks: list[int], settlement: str = "") -> None:
        """The segment's references on these blocks go to the settlement, if they are the last ones and it is
        known here, else back."""
        if segment.expires_s is not None:
            self._lent.subtract(blocks)
            for block in blocks:
                if not self._lent[block]:
                    del self._lent[block]
        if not self.pledges.claim(settlement, blocks):
            self._allocator.release(blocks)

    def _drop(self, handle: int, event: str) -> None:
        segment = self._segments.pop(handle)
        self._end_standing(segment)
        segment.released = True
        self._tell(event, handle)
        if not segment.pins:
            self._give(segment, segment.blocks)
