"""A holder from a debtor's side: segments borrowed there, kept by renewing their leases, written to and
attended over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcommons.errors import KVCommonsError
from kvcommons.holder.copying import BlockSave, read_blocks, write_request
from kvcommons.holder.exchange import Recipient
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.plan_connection import PlanPool
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import holder_pb2
from kvcommons.pb import holder_pb2_grpc as rpc
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG = logging.getLogger(__name__)

# A lease survives two renewals that fail.
_RENEWALS_PER_LEASE = 3
_RENEW_TIMEOUT_S = 2.0
# Decode has nothing else to do while it waits for partials.
_ASK_S = 400e-6


class RemoteHolder:
    """One creditor, for one debtor. The coroutines belong to the event loop; data operations block, may come
    from any thread, and run at the same time."""

    def __init__(
        self,
        control_address: str,
        data_address: str,
        *,
        owner: str,
        model: bytes,
        lost: Callable[[Sequence[SegmentRef]], None],
        lease_s: float = 10.0,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`control_address`: empty where another process of the instance borrows, and this one only attends.
        `owner` is this instance's id. `lost` is called, on the event loop, with segments that the holder does
        not have any more, or that could not be renewed for as long as their lease; they need no release."""
        self.control_address = control_address
        self.data_address = data_address
        self._owner = owner
        self._model = model
        self._lost = lost
        self._lease_s = lease_s
        # Told how long an iteration waited for a partial from here, and whether it came in time.
        self.waited: Callable[[float, bool], None] = lambda seconds, answered: None
        self._channel = dialer.channel(control_address, "holder") if control_address else None
        if self._channel is not None:
            self._stub = rpc.HolderStub(self._channel)
        self._data = dialer.client(data_address, "holder")
        # Over sockets, which the native path takes; a layer's frames are small.
        self._plans = PlanPool(dialer.client(data_address, "holder", ask_s=_ASK_S, rings=False))
        self._borrowed: dict[SegmentRef, float] = {}  # to when its lease runs out, at the latest
        self._generations = itertools.count(1)  # of all segments
        self._renewal: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to renew leases. Call it on the event loop."""
        # Not in the context of the request that happens to borrow first: its trace ends some day.
        self._renewal = asyncio.get_running_loop().create_task(
            self._renew_for_ever(), name="renew", context=Context()
        )

    async def close(self) -> None:
        """Releases nothing: what is still borrowed comes free when its lease runs out."""
        if self._renewal is not None:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._renewal
        if self._channel is not None:
            await self._channel.close(None)
        self.close_data()

    def close_data(self) -> None:
        """What `close` does where there is no control address. Any thread."""
        self._data.close()
        self._plans.close()

    @property
    def borrowed(self) -> list[SegmentRef]:
        """Segments whose leases are renewed."""
        return list(self._borrowed)

    async def reserve(
        self, sequence: str, blocks: int, *, first_position: int, shift: int = 0, timeout_s: float
    ) -> SegmentRef:
        """A segment whose first token has `first_position`. Raises CapacityExhausted, InvalidInput for
        another model."""
        asked_s = asyncio.get_running_loop().time()
        request = self._reservation(blocks)
        request.sequence, request.first_position, request.shift = sequence, first_position, shift
        reply = await self._stub.Reserve(request, timeout=timeout_s)
        ref = SegmentRef(handle=reply.handle, epoch=reply.epoch)
        self._borrowed[ref] = asked_s + self._lease_s
        return ref

    async def grow(self, ref: SegmentRef, blocks: int, *, timeout_s: float) -> None:
        """More blocks at the segment's end, until it has had `blocks` in all; asking again is harmless.
        Raises CapacityExhausted, StaleEpoch; Unavailable, DeadlineExceeded where it may have grown."""
        request = self._reservation(blocks)
        request.handle, request.epoch = ref.handle, ref.epoch
        await self._stub.Reserve(request, timeout=timeout_s)

    async def release(self, refs: Iterable[SegmentRef], *, timeout_s: float) -> None:
        """Leases are not renewed any more, even where this raises: the holder reclaims the blocks then."""
        gone = list(refs)
        for ref in gone:
            self._borrowed.pop(ref, None)
        if not gone:
            return
        segments = [_message(ref) for ref in gone]
        await self._stub.Release(holder_pb2.ReleaseRequest(segments=segments), timeout=timeout_s)

    async def load(
        self,
        ref: SegmentRef,
        store_address: str,
        block_ids: Sequence[bytes],
        *,
        first_block: int,
        store_control: str = "",
        timeout_s: float,
    ) -> int:
        """Has the holder read blocks from a kvstore's data plane; how many leading ones are there and
        verified. `store_control` is where the store takes calls about corrupt ones."""
        request = holder_pb2.LoadRequest(
            segment=_message(ref),
            data_address=store_address,
            control_address=store_control,
            first_block=first_block,
            block_ids=block_ids,
        )
        return (await self._stub.Load(request, timeout=timeout_s)).blocks

    async def save(self, ref: SegmentRef, blocks: BlockSave, *, timeout_s: float) -> None:
        """Has the holder write them in the background."""
        request = holder_pb2.SaveRequest(
            segment=_message(ref),
            data_address=blocks.store,
            tenant=blocks.tenant,
            parent=blocks.parent,
            first_block=blocks.first_block,
            first_index=blocks.first_index,
            block_ids=blocks.block_ids,
        )
        await self._stub.Save(request, timeout=timeout_s)

    async def freeze(self, ref: SegmentRef, until_block: int, *, timeout_s: float) -> SegmentRef:
        """The segment's blocks before this one are not written any more; the reference to use once they have
        moved. One move at a time: a freeze ends the one before it. Raises StaleEpoch."""
        frozen = replace(ref, generation=next(self._generations))
        request = holder_pb2.FreezeRequest(
            owner=self._owner,
            segment=_message(ref),
            until_block=until_block,
            generation=frozen.generation,
        )
        await self._stub.Freeze(request, timeout=timeout_s)
        return frozen

    async def thaw(self, ref: SegmentRef, *, timeout_s: float) -> None:
        """Takes a freeze back; `ref` as it came from there."""
        request = holder_pb2.ThawRequest(owner=self._owner, segment=_message(ref))
        await self._stub.Thaw(request, timeout=timeout_s)

    async def trim(self, ref: SegmentRef, *, settlement: str = "", timeout_s: float) -> int:
        """Gives the frozen blocks back; returns when nothing reads them any more. How many."""
        request = holder_pb2.TrimRequest(owner=self._owner, segment=_message(ref), settlement=settlement)
        return (await self._stub.Trim(request, timeout=timeout_s)).blocks

    async def copy_in(
        self,
        into: SegmentRef,
        data_address: str,
        source: SegmentRef,
        *,
        first_block: int,
        source_block: int,
        blocks: int,
        timeout_s: float,
    ) -> None:
        """Has this holder read blocks of a segment at another one into a segment borrowed here."""
        request = holder_pb2.CopyInRequest(
            owner=self._owner,
            into=_message(into),
            first_block=first_block,
            data_address=data_address,
            source=_message(source),
            source_block=source_block,
            blocks=blocks,
        )
        await self._stub.CopyIn(request, timeout=timeout_s)

    async def adopt(
        self,
        ref: SegmentRef,
        former_owner: str,
        sequence: str,
        *,
        shared_blocks: int = 0,
        timeout_s: float,
    ) -> tuple[SegmentRef, int]:
        """A segment of another debtor (or of the holder itself) becomes this one's, under a new reference;
        with `shared_blocks` so many leading blocks become both's. And how many blocks it has."""
        asked_s = asyncio.get_running_loop().time()
        request = holder_pb2.AdoptRequest(
            owner=self._owner,
            former_owner=former_owner,
            segment=_message(ref),
            sequence=sequence,
            lease_ms=int(self._lease_s * 1000),
            shared_blocks=shared_blocks,
        )
        reply = await self._stub.Adopt(request, timeout=timeout_s)
        adopted = SegmentRef(
            handle=reply.segment.handle, epoch=reply.segment.epoch, generation=reply.segment.generation
        )
        self._borrowed[adopted] = asked_s + self._lease_s
        return adopted, reply.blocks

    async def inspect(self, *, timeout_s: float) -> holder_pb2.InspectReply:
        return await self._stub.Inspect(holder_pb2.InspectRequest(), timeout=timeout_s)

    def write_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, objects: Sequence[Buffer], deadline: Deadline
    ) -> None:
        """One layer of whole blocks, one buffer an object. Returns when they are there."""
        request = write_request(ref, layer, first_block, len(objects))
        self._data.call(request, objects, deadline=deadline)

    def read_blocks(
        self, ref: SegmentRef, layer: int, first_block: int, into: Sequence[Buffer], deadline: Deadline
    ) -> None:
        """The other way: one writable buffer an object."""
        read_blocks(self._data, ref, layer, first_block, into, deadline)

    def recipients(self, rows: Sequence[PlanRow]) -> list[Recipient]:
        """This one alone."""
        return [Recipient(plans=self._plans, rows=rows)]

    def _reservation(self, blocks: int) -> holder_pb2.ReserveRequest:
        lease_ms = int(self._lease_s * 1000)
        return holder_pb2.ReserveRequest(
            owner=self._owner, model=self._model, blocks=blocks, lease_ms=lease_ms
        )

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS_PER_LEASE)
            if not self._borrowed:
                continue
            try:
                gone = await self._renew(list(self._borrowed))
            except KVCommonsError as error:
                now_s = asyncio.get_running_loop().time()
                gone = [ref for ref, until_s in self._borrowed.items() if until_s <= now_s]
                _LOG.warning("leases at %s were not renewed: %s", self.control_address, error.message)
            gone = [ref for ref in gone if self._borrowed.pop(ref, None) is not None]
            if gone:
                self._lost(gone)

    async def _renew(self, refs: list[SegmentRef]) -> list[SegmentRef]:
        """Those that the holder does not have (any more)."""
        asked_s = asyncio.get_running_loop().time()
        request = holder_pb2.RenewRequest(
            owner=self._owner,
            segments=[_message(ref) for ref in refs],
            lease_ms=int(self._lease_s * 1000),
        )
        reply = await self._stub.Renew(request, timeout=min(_RENEW_TIMEOUT_S, self._lease_s))
        unknown = set(reply.unknown)
        for ref in refs:
            if ref in self._borrowed and ref.handle not in unknown:
                self._borrowed[ref] = asked_s + self._lease_s
        return [ref for ref in refs if ref.handle in unknown]


def _message(ref: SegmentRef) -> holder_pb2.SegmentRef:
    return holder_pb2.SegmentRef(handle=ref.handle, epoch=ref.epoch, generation=ref.generation)
