"""The Holder service: gRPC messages to the holder and back. Its data plane is `HolderData`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc.aio

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.errors import DeadlineExceeded, InvalidInput, Loading
from kvcommons.holder.copying import copy_blocks, read_blocks
from kvcommons.holder.holder import Holder
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import holder_pb2 as pb
from kvcommons.pb import holder_pb2_grpc as rpc
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.deadline import Deadline

_LOG = logging.getLogger(__name__)

# Loads that wait for a store at the same time, a thread each.
_LOADS_MAX = 8
_LOAD_S = 60.0
# At the most, for accesses under way on blocks that are trimmed or change hands.
_PART_S = 10.0
_PART_LOOK_S = 0.002
_SWEEP_S = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]
_T = TypeVar("_T")


class Stores(Protocol):
    """Learns where a kvstore takes calls about corrupt objects that `loader` finds."""

    def know(self, *, data_address: str, control_address: str) -> None: ...


class HolderService(rpc.HolderServicer):
    """Answers Loading until it is given its holder: the block memory of a decode instance is made for a model
    that takes a while to load."""

    def __init__(self, dialer: Dialer = UNSECURED) -> None:
        """`dialer`: to other holders, whose blocks are copied here."""
        self._dialer = dialer
        self._opened: Holder | None = None
        self._threads = ThreadPoolExecutor(_LOADS_MAX, thread_name_prefix="holder")
        self._sweep: asyncio.Task[None] | None = None

    def open(self, holder: Holder, loader: BlockLoader, saver: BlockSaver, stores: Stores) -> None:
        """And begins to reclaim what nobody renews. Call it on the event loop. `loader` and `saver` are the
        owner process's; `close` leaves them open."""
        self._opened, self._loader, self._saver, self._stores = holder, loader, saver, stores
        self._sweep = asyncio.get_running_loop().create_task(self._expire(), name="leases")

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            await asyncio.wait([self._sweep])
        await asyncio.to_thread(self._threads.shutdown)

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveReply:
        self._holder.check_model(request.model)
        lease_s = request.lease_ms / 1000
        if request.handle:
            ref = SegmentRef(handle=request.handle, epoch=request.epoch)
            self._holder.grow(ref, request.blocks, owner=request.owner, lease_s=lease_s)
        else:
            ref = self._holder.lend(
                request.owner,
                request.sequence,
                request.blocks,
                first_position=request.first_position + request.shift,
                lease_s=lease_s,
            )
        return pb.ReserveReply(handle=ref.handle, epoch=ref.epoch)

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseReply:
        self._holder.release([_ref(segment) for segment in request.segments])
        return pb.ReleaseReply()

    async def Renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewReply:
        refs = [_ref(segment) for segment in request.segments]
        unknown = self._holder.renew(request.owner, refs, lease_s=request.lease_ms / 1000)
        return pb.RenewReply(unknown=unknown)

    async def Load(self, request: pb.LoadRequest, context: _Context) -> pb.LoadReply:
        if request.control_address and self._holder:
            self._stores.know(data_address=request.data_address, control_address=request.control_address)
        deadline = _deadline(context, _LOAD_S)
        return await self._on_thread(lambda: self._load(request, deadline))

    async def Save(self, request: pb.SaveRequest, context: _Context) -> pb.SaveReply:
        return await self._on_thread(lambda: self._save(request))

    async def Inspect(self, request: pb.InspectRequest, context: _Context) -> pb.InspectReply:
        """A segment without a lease, the holder's own, has lease_left_ms 0."""
        allocator = self._holder.allocator
        reply = pb.InspectReply(
            total_blocks=allocator.total,
            free_blocks=allocator.free,
            cached_blocks=allocator.cached,
            lent_blocks=self._holder.lent_blocks,
            pledged_blocks=self._holder.pledges.blocks,
        )
        for segment, left_s in self._holder.held():
            reply.segments.add(
                handle=segment.handle,
                owner=segment.owner,
                sequence=segment.sequence,
                blocks=len(segment.blocks),
                lease_left_ms=int((left_s or 0) * 1000),
                generation=segment.generation,
                frozen_blocks=segment.frozen,
            )
        return reply

    async def Freeze(self, request: pb.FreezeRequest, context: _Context) -> pb.FreezeReply:
        ref = _ref(request.segment)
        self._holder.freeze(ref, request.generation, request.until_block, owner=request.owner)
        return pb.FreezeReply()

    async def Thaw(self, request: pb.ThawRequest, context: _Context) -> pb.ThawReply:
        self._holder.thaw(_ref(request.segment), owner=request.owner)
        return pb.ThawReply()

    async def Trim(self, request: pb.TrimRequest, context: _Context) -> pb.TrimReply:
        ref = _ref(request.segment)
        blocks = self._holder.trim(ref, owner=request.owner, settlement=request.settlement)
        await self._parted(ref, _seconds(context, _PART_S))
        return pb.TrimReply(blocks=blocks)

    async def CopyIn(self, request: pb.CopyInRequest, context: _Context) -> pb.CopyInReply:
        deadline = _deadline(context, _LOAD_S)
        return await self._on_thread(lambda: self._copy_in(request, deadline))

    async def Adopt(self, request: pb.AdoptRequest, context: _Context) -> pb.AdoptReply:
        ref = self._holder.adopt(
            _ref(request.segment),
            former_owner=request.former_owner,
            owner=request.owner,
            sequence=request.sequence,
            lease_s=request.lease_ms / 1000,
            shared_blocks=request.shared_blocks,
        )
        with self._holder.pinned([ref]) as (segment,):
            blocks = len(segment.blocks)
        return pb.AdoptReply(segment=pb.SegmentRef(handle=ref.handle, epoch=ref.epoch), blocks=blocks)

    @property
    def _holder(self) -> Holder:
        if self._opened is None:
            raise Loading("this instance is still loading its model", retry_after_ms=500)
        return self._opened

    async def _parted(self, ref: SegmentRef, wait_s: float) -> None:
        """Waits for what is under way on trimmed blocks."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while self._holder.parting(ref):
            if loop.time() >= until_s:
                raise DeadlineExceeded(
                    f"blocks of segment {ref.handle} are still read: they come free when that has ended"
                )
            await asyncio.sleep(_PART_LOOK_S)

    async def _on_thread(self, work: Callable[[], _T]) -> _T:
        # With the call's trace and ids: what it reads and writes at a store is part of it.
        return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, work)

    def _load(self, request: pb.LoadRequest, deadline: Deadline) -> pb.LoadReply:
        holder, count = self._holder, len(request.block_ids)
        with holder.pinned([_ref(request.segment)]) as (segment,):
            blocks = holder.blocks(segment, request.first_block, count, write=True)
            load = self._loader.load(
                request.data_address,
                holder.model.fingerprint,
                holder.memory.layout,
                request.block_ids,
                lambda layer, first, number: holder.memory.write_buffers(
                    layer, blocks[first : first + number]
                ),
                deadline,
            )
            try:
                # The load itself ends at the deadline; this only waits for it to have ended.
                loaded = load.wait_all(Deadline.after(deadline.left() + 1))
            finally:
                load.cancel()
        return pb.LoadReply(blocks=loaded)

    def _save(self, request: pb.SaveRequest) -> pb.SaveReply:
        """Each layer pins the segment until the saver is done with it."""
        holder, count = self._holder, len(request.block_ids)
        if not count:
            raise InvalidInput("nothing to save: block_ids is empty", param="block_ids")
        layout = holder.memory.layout
        with holder.pinned([_ref(request.segment)]) as (segment,):
            blocks = holder.blocks(segment, request.first_block, count)
            for layer in range(layout.layers):
                accepted = self._saver.save(
                    address=request.data_address,
                    model=holder.model.fingerprint,
                    layers=layout.layers,
                    tenant=request.tenant,
                    parent=request.parent,
                    first_index=request.first_index,
                    block_ids=request.block_ids,
                    layer=layer,
                    payload=holder.memory.read_buffers(layer, blocks),
                    done=self._pin_until_done(_ref(request.segment)),
                )
                if not accepted:
                    break  # the later layers would be of no use
        return pb.SaveReply()

    def _pin_until_done(self, ref: SegmentRef) -> Callable[[], None]:
        pin = self._holder.pin(ref)
        return lambda: self._holder.unpin(pin)

    def _copy_in(self, request: pb.CopyInRequest, deadline: Deadline) -> pb.CopyInReply:
        holder = self._holder
        client = self._dialer.client(request.data_address, "holder", kept_max=1)
        try:
            with holder.pinned([_ref(request.into)]) as (segment,):
                if segment.owner != request.owner:
                    raise InvalidInput(f"segment {segment.handle} is not {request.owner}'s", param="owner")
                blocks = holder.blocks(segment, request.first_block, request.blocks, write=True)
                source = _ref(request.source)
                read = partial(read_blocks, client)
                copy_blocks(read, source, request.source_block, holder.memory, blocks, deadline)
        finally:
            client.close()
        return pb.CopyInReply()

    async def _expire(self) -> None:
        """Releases what had run out by the sweep before already: where this process was held up since then,
        renewals that came in time are not read yet."""
        swept_s = time.monotonic()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = time.monotonic()
            self._holder.expire(now_s - swept_s)
            swept_s = now_s


def _ref(message: pb.SegmentRef) -> SegmentRef:
    return SegmentRef(handle=message.handle, epoch=message.epoch, generation=message.generation)


def _deadline(context: _Context, most_s: float) -> Deadline:
    return Deadline.after(_seconds(context, most_s))


def _seconds(context: _Context, most_s: float) -> float:
    """That the call has left."""
    left_s = context.time_remaining()
    return most_s if left_s is None else min(left_s, most_s)
