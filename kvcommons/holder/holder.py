"""A holder's memory and who has what of it: the one object that gRPC, the data plane and the owner process
share."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvcommons.backend.memory import BlockMemory
from kvcommons.errors import InvalidInput, StaleEpoch
from kvcommons.holder.segment import Pin, Segment
from kvcommons.holder.segments import SegmentRef, SegmentTable, new_epoch
from kvcommons.rblock.allocator import BlockAllocator

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldModel:
    """What a holder must know of the model whose KV it holds."""

    fingerprint: bytes
    scale: float  # of scores
    windows: tuple[int | None, ...]  # by layer: sliding window in tokens


class Holder:
    """Thread-safe. The lock is held for table operations only, never while bytes move: operations on blocks
    pin their segments instead, so that blocks released meanwhile are given to nobody until the operation has
    ended."""

    def __init__(
        self,
        memory: BlockMemory,
        allocator: BlockAllocator,
        model: HeldModel,
        *,
        instance_id: str,
        lend_blocks_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        epoch: int | None = None,
    ) -> None:
        """`lend_blocks_max`: what others may have of it in all; all of it unless set. `allocator` may be used
        by the owner process beside the holder. `epoch` names this life of the process; new
        unless set."""
        self.memory = memory
        self.allocator = allocator
        self.model = model
        self.instance_id = instance_id
        self._clock = clock
        self._lock = threading.Lock()
        lend = allocator.total if lend_blocks_max is None else lend_blocks_max
        self._table = SegmentTable(allocator, epoch=epoch or new_epoch(), lend_blocks_max=lend)

    def check_model(self, fingerprint: bytes) -> None:
        if fingerprint != self.model.fingerprint:
            raise InvalidInput(
                f"this holder has KV of model {self.model.fingerprint.hex()[:12]}, not "
                f"{fingerprint.hex()[:12]}: start all services with one model, dtype and block size",
                param="model",
            )

    def lend(
        self, owner: str, sequence: str, blocks: int, *, first_position: int, lease_s: float
    ) -> SegmentRef:
        """Errors as in SegmentTable."""
        with self._lock:
            now_s = self._clock()
            return self._table.lend(
                owner, sequence, blocks, first_position=first_position, lease_s=lease_s, now_s=now_s
            )

    def grow(self, ref: SegmentRef, blocks: int, *, owner: str, lease_s: float) -> None:
        """To so many blocks in all."""
        with self._lock:
            self._table.grow(ref, blocks, owner=owner, lease_s=lease_s, now_s=self._clock())

    @property
    def epoch(self) -> int:
        """Names this life of the process."""
        return self._table.epoch

    def own(
        self, sequence: str, blocks: Sequence[int], *, first_position: int = 0, shared_blocks: int = 0
    ) -> SegmentRef:
        """A segment of the owner process's own, over blocks that it has matched (`shared_blocks`, the leading
        ones) or allocated: prefill reads all of it and writes to the latter, and it needs no lease. The
        segment keeps references of its own, until `release`."""
        with self._lock:
            return self._table.own(
                self.instance_id,
                sequence,
                blocks,
                first_position=first_position,
                shared_blocks=shared_blocks,
            )

    def extend(self, ref: SegmentRef, blocks: Sequence[int]) -> None:
        """More blocks for a segment of the owner process's own."""
        with self._lock:
            self._table.extend(ref, blocks)

    def release(self, refs: Sequence[SegmentRef]) -> None:
        with self._lock:
            self._table.release(refs)

    def renew(self, owner: str, refs: Sequence[SegmentRef], *, lease_s: float) -> list[int]:
        """Handles that are unknown."""
        with self._lock:
            return self._table.renew(owner, refs, lease_s=lease_s, now_s=self._clock())

    def expire(self) -> int:
        """Releases segments whose lease has run out; call it every second or so."""
        with self._lock:
            over = self._table.expire(self._clock())
        for segment in over:
            _LOG.warning(
                "lease ran out: segment %d of %s, sequence %s, %d blocks",
                segment.handle,
                segment.owner,
                segment.sequence,
                len(segment.blocks),
            )
        return len(over)

    def freeze(self, ref: SegmentRef, generation: int, until_block: int, *, owner: str) -> None:
        """This and what follows it: see SegmentTable."""
        with self._lock:
            self._table.freeze(ref, generation, until_block, owner=owner)

    def thaw(self, ref: SegmentRef, *, owner: str) -> None:
        with self._lock:
            self._table.thaw(ref, owner=owner)

    def trim(self, ref: SegmentRef, *, owner: str, settlement: str = "") -> int:
        with self._lock:
            return self._table.trim(ref, owner=owner, settlement=settlement)

    def parting(self, ref: SegmentRef) -> bool:
        with self._lock:
            return self._table.parting(ref)

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
        with self._lock:
            return self._table.adopt(
                ref,
                former_owner=former_owner,
                owner=owner,
                sequence=sequence,
                lease_s=lease_s,
                now_s=self._clock(),
                shared_blocks=shared_blocks,
            )

    def pledge(self, settlement: str, blocks: int, *, lease_s: float) -> int:
        with self._lock:
            return self._table.pledges.pledge(settlement, blocks, lease_s=lease_s, now_s=self._clock())

    def pledged(self, settlement: str) -> int:
        with self._lock:
            return self._table.pledges.pledged(settlement)

    def draw(self, settlement: str, blocks: int) -> list[int]:
        with self._lock:
            return self._table.pledges.draw(settlement, blocks)

    def refill(self, settlement: str, blocks: Sequence[int]) -> None:
        with self._lock:
            self._table.pledges.refill(settlement, blocks)

    def redeem(self, settlement: str) -> None:
        with self._lock:
            self._table.pledges.redeem(settlement)

    def pin(self, ref: SegmentRef) -> Pin:
        """Raises StaleEpoch. Whoever pins has to unpin; see `pinned`."""
        with self._lock:
            return self._table.pin(ref)

    def unpin(self, pin: Pin) -> None:
        with self._lock:
            self._table.unpin(pin)

    @contextmanager
    def pinned(self, refs: Sequence[SegmentRef]) -> Iterator[list[Segment]]:
        """All of the segments, or StaleEpoch."""
        pins: list[Pin] = []
        try:
            with self._lock:
                for ref in refs:
                    pins.append(self._table.pin(ref))
            yield [pin.segment for pin in pins]
        finally:
            with self._lock:
                for pin in pins:
                    self._table.unpin(pin)

    def pin_each(self, wanted: Iterable[tuple[SegmentRef, Callable[[], bool]]]) -> list[Pin | StaleEpoch]:
        """Standing pins, each with its `end` (see Pin); an error where there is no such segment. `end` is
        called with the holder's lock held."""
        with self._lock:
            return [self._pin_or_error(ref, end) for ref, end in wanted]

    def _pin_or_error(self, ref: SegmentRef, end: Callable[[], bool]) -> Pin | StaleEpoch:
        try:
            return self._table.pin(ref, end)
        except StaleEpoch as error:
            return error

    def unpin_all(self, pins: Iterable[Pin]) -> None:
        with self._lock:
            for pin in pins:
                self._table.unpin(pin)

    def blocks(
        self, segment: Segment, first: int, count: int, *, write: bool = False, beyond: bool = False
    ) -> list[int]:
        """Physical numbers of blocks of a pinned segment, and those `beyond` them too. Raises InvalidInput
        outside of it, and to `write` for blocks that are frozen or shared."""
        with self._lock:
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

    def held(self) -> list[tuple[Segment, float | None]]:
        """Segments, each with the seconds left of its lease (None: it has none)."""
        with self._lock:
            now_s = self._clock()
            return [
                (segment, None if segment.expires_s is None else max(0.0, segment.expires_s - now_s))
                for segment in self._table.segments
            ]

    def loans(self) -> dict[str, int]:
        """Blocks lent, by debtor: what heartbeats tell the ledger."""
        with self._lock:
            lent: Counter[str] = Counter()
            for segment in self._table.segments:
                if segment.expires_s is not None:
                    lent[segment.owner] += len(segment.blocks)
            return dict(lent)

    def stop_lending(self) -> None:
        """Before the process ends: no new reservations; what is lent stays until it is given back."""
        with self._lock:
            self._table.lend_blocks_max = 0

    @property
    def lent_blocks(self) -> int:
        with self._lock:
            return self._table.lent_blocks

    @property
    def pledged_blocks(self) -> int:
        with self._lock:
            return self._table.pledges.blocks

    @property
    def lendable_blocks(self) -> int:
        with self._lock:
            return self._table.lendable_blocks
