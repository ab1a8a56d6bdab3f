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

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvcommons.errors import CapacityExhausted, Conflict, InvalidInput, StaleEpoch
from kvcommons.holder.locked import locked
from kvcommons.holder.pledges import Pledges, check_lease
from kvcommons.holder.segment import Parting, Pin, Segment
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.telemetry.events import unobserved

_LOG = logging.getLogger(__name__)


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
    """Over a BlockAllocator, on each of whose blocks a segment holds one reference. Thread-safe."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        instance_id: str,
        lend_blocks_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
    ) -> None:
        """`instance_id` is the holder's. At most `lend_blocks_max` blocks are lent (segments with a lease) at
        any time; all of them unless set. `allocator` may be used by the owner process beside the table.
        `epoch` names this life of the process; new unless set."""
        self.allocator = allocator
        self.instance_id = instance_id
        self.epoch = epoch or new_epoch()
        self.lend_blocks_max = allocator.total if lend_blocks_max is None else lend_blocks_max
        self._clock = clock
        self._lock = threading.RLock()  # held for table operations only, never while bytes move
        self._segments: dict[int, Segment] = {}
        self._lent: Counter[int] = Counter()  # physical block to how many segments with a lease have it
        self.pledges = Pledges(allocator, clock)
        self._next_handle = 1
        self._next_pin = 1

    @property
    @locked
    def segments(self) -> Sequence[Segment]:
        return list(self._segments.values())

    @property
    @locked
    def lent_blocks(self) -> int:
        """Blocks with a lease; one that several segments share counts once."""
        return len(self._lent)

    @property
    @locked
    def lendable_blocks(self) -> int:
        """How many more could be lent now."""
        return max(0, min(self.allocator.free, self.lend_blocks_max - self.lent_blocks))

    @locked
    def lend(
        self, owner: str, sequence: str, blocks: int, *, first_position: int, lease_s: float
    ) -> SegmentRef:
        """A segment for another instance. Raises CapacityExhausted, and changes nothing then."""
        if not owner:
            raise InvalidInput("a reservation needs an owner", param="owner")
        check_lease(lease_s)
        return self._add(owner, sequence, self._borrowable(blocks), first_position, self._clock() + lease_s)

    @locked
    def own(
        self, sequence: str, blocks: Sequence[int], *, first_position: int = 0, shared_blocks: int = 0
    ) -> SegmentRef:
        """A segment of the holder's own, without a lease, over blocks that its process has matched
        (`shared_blocks`, the leading ones, which are not written to) or allocated; takes a reference of its
        own on each."""
        self.allocator.retain(blocks)
        ref = self._add(self.instance_id, sequence, list(blocks), first_position, None)
        self._segments[ref.handle].shared = shared_blocks
        return ref

    @locked
    def grow(self, ref: SegmentRef, blocks: int, *, owner: str, lease_s: float) -> None:
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
        segment.expires_s = self._clock() + lease_s

    @locked
    def extend(self, ref: SegmentRef, blocks: Sequence[int]) -> None:
        """As `own`, for more blocks of a segment without a lease. Raises StaleEpoch."""
        segment = self.find(ref)
        assert segment.expires_s is None, "a lent segment grows by `grow`"
        self.allocator.retain(blocks)
        segment.blocks += blocks
        self._tell("grow", ref.handle, blocks=list(blocks))

    @locked
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

    @locked
    def thaw(self, ref: SegmentRef, *, owner: str) -> None:
        """Takes the freeze of this generation back; where there is none, nothing happens."""
        segment = self._get(ref)
        if segment is not None and segment.owner == owner and segment.generation == ref.generation:
            self._end_standing(segment)
            segment.frozen = 0
            self._tell("thaw", ref.handle, generation=segment.generation)

    @locked
    def trim(self, ref: SegmentRef, *, owner: str, settlement: str = "") -> int:
        """Gives the frozen blocks back: to the settlement, where blocks are set aside for it, else they are
        free. Those that accesses under way may reach follow when these have ended (`parting`). How many
        blocks; 0 where there is no such freeze (any more)."""
        segment = self._get(ref)
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

    @locked
    def parting(self, ref: SegmentRef) -> bool:
        """Whether trimmed blocks of the segment still wait for accesses under way."""
        segment = self._get(ref)
        return segment is not None and bool(segment.parting)

    @locked
    def adopt(
        self,
        ref: SegmentRef,
        *,
        former_owner: str,
        owner: str,
        sequence: str,
        lease_s: float,
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
        self.allocator.retain(blocks)
        new = self._add(
            owner, sequence, blocks, segment.first_position, self._clock() + lease_s, former=ref.handle
        )
        heir = self._segments[new.handle]
        heir.trimmed, heir.shared = segment.trimmed, segment.shared
        if shared_blocks:
            self._end_standing(segment)
            heir.shared = segment.shared = max(segment.shared, segment.trimmed + shared_blocks)
        else:
            self._drop(ref.handle, "adopted")
        return new

    @locked
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

    @locked
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

    @locked
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

    @contextmanager
    def pinned(self, refs: Sequence[SegmentRef]) -> Iterator[list[Segment]]:
        """All of the segments, or StaleEpoch."""
        pins: list[Pin] = []
        try:
            with self._lock:
                for ref in refs:
                    pins.append(self.pin(ref))
            yield [pin.segment for pin in pins]
        finally:
            self.unpin_all(pins)

    @locked
    def pin_each(self, wanted: Iterable[tuple[SegmentRef, Callable[[], bool]]]) -> list[Pin | StaleEpoch]:
        """Standing pins, each with its `end` (see Pin); an error where there is no such segment. `end` is
        called with the table's lock held."""
        pins: list[Pin | StaleEpoch] = []
        for ref, end in wanted:
            try:
                pins.append(self.pin(ref, end))
            except StaleEpoch as error:
                pins.append(error)
        return pins

    @locked
    def unpin_all(self, pins: Iterable[Pin]) -> None:
        for pin in pins:
            self.unpin(pin)

    @locked
    def blocks(
        self, segment: Segment, first: int, count: int, *, write: bool = False, beyond: bool = False
    ) -> list[int]:
        """Physical numbers of blocks of a pinned segment, and those `beyond` them too. Raises InvalidInput
        outside of it, and to `write` for blocks that are frozen or shared."""
        inside = first - segment.trimmed
        if count < 1 or inside < 0 or inside + count > len(segment.blocks):
            raise InvalidInput(
                f"blocks {first}..{first + count} are not within segment {segment.handle}, which has "
                f"{segment.trimmed}..{segment.trimmed + len(segment.blocks)}: reserve more first"
            )
        if write and first < segment.writable_from:
            raise InvalidInput(
                f"block {first} of segment {segment.handle} is frozen or shared: nobody writes to blocks "
                f"before {segment.writable_from}"
            )
        return segment.blocks[inside:] if beyond else segment.blocks[inside : inside + count]

    @locked
    def release(self, refs: Iterable[SegmentRef]) -> None:
        """Segments that are not known (any more) are passed over: whoever releases may ask twice."""
        for ref in refs:
            if ref.epoch == self.epoch and ref.handle in self._segments:
                self._drop(ref.handle, "release")

    @locked
    def renew(self, owner: str, refs: Iterable[SegmentRef], *, lease_s: float) -> list[int]:
        """Sets the leases anew; returns the handles that this holder does not have (any more), or not from
        `owner`."""
        check_lease(lease_s)
        unknown, until_s = [], self._clock() + lease_s
        for ref in refs:
            segment = self._get(ref)
            if segment is None or segment.owner != owner or segment.expires_s is None:
                unknown.append(ref.handle)
            else:
                segment.expires_s = until_s
        return unknown

    @locked
    def expire(self, grace_s: float = 0.0) -> list[Segment]:
        """Releases what nobody has renewed within `grace_s` of its end, pledges too; call it every second or
        so."""
        self.pledges.expire(grace_s)
        by_s = self._clock() - grace_s
        over = [s for s in self._segments.values() if s.expires_s is not None and s.expires_s <= by_s]
        for segment in over:
            self._drop(segment.handle, "expire")
            _LOG.warning(
                "lease ran out: segment %d of %s, sequence %s, %d blocks",
                segment.handle,
                segment.owner,
                segment.sequence,
                len(segment.blocks),
            )
        return over

    @locked
    def held(self) -> list[tuple[Segment, float | None]]:
        """Segments, each with the seconds left of its lease (None: it has none)."""
        now_s = self._clock()
        return [
            (segment, None if segment.expires_s is None else max(0.0, segment.expires_s - now_s))
            for segment in self.segments
        ]

    @locked
    def loans(self) -> dict[str, int]:
        """Blocks lent, by debtor: what heartbeats tell the ledger."""
        lent: Counter[str] = Counter()
        for segment in self.segments:
            if segment.expires_s is not None:
                lent[segment.owner] += len(segment.blocks)
        return dict(lent)

    def stop_lending(self) -> None:
        """Before the process ends: no new reservations; what is lent stays until it is given back."""
        self.lend_blocks_max = 0

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

    def _get(self, ref: SegmentRef) -> Segment | None:
        return self._segments.get(ref.handle) if ref.epoch == self.epoch else None

    def _tell(self, event: str, handle: int, **facts: object) -> None:
        self.allocator.observe(event, handle=handle, epoch=self.epoch, **facts)

    @property
    def _watched(self) -> bool:
        return self.allocator.observe is not unobserved  # pins come by the thousand

    def _borrowable(self, blocks: int) -> list[int]:
        if not blocks:
            raise InvalidInput("a reservation is of at least one block", param="blocks")
        self._check_cap(blocks)
        return self.allocator.allocate(blocks)

    def _check_cap(self, blocks: int) -> None:
        free = self.lend_blocks_max - self.lent_blocks
        if blocks > free:
            raise CapacityExhausted(
                f"{blocks} blocks are wanted, {max(free, 0)} more may be lent: ask another holder or retry"
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
            self.allocator.release(blocks)

    def _drop(self, handle: int, event: str) -> None:
        segment = self._segments.pop(handle)
        self._end_standing(segment)
        segment.released = True
        self._tell(event, handle)
        if not segment.pins:
            self._give(segment, segment.blocks)
