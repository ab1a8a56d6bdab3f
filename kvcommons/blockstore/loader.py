"""Reads runs of blocks from a kvstore, layer by layer, so that a layer can be used while later ones come
(AttentionStore, section 3.2.1: layer-wise pre-loading)."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcommons.errors import DataLoss, DeadlineExceeded, Internal, KVCommonsError, Unavailable
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.checksum import checksum
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.client import DataClient, PendingCall
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # (layer, first block of the run, blocks) to one writable buffer an object, which are final when the
    # context ends.
    Destination = Callable[[int, int, int], AbstractContextManager[Sequence[Buffer]]]

_LOG = logging.getLogger(__name__)

# Stores whose connections are kept.
_CLIENTS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptObject:
    """An object whose bytes do not have the checksum that they were stored with; for Blocks.Condemn."""

    address: str  # of the store's data plane
    model: bytes
    block_id: bytes
    layer: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    address: str
    model: bytes
    layout: Layout
    heads: HeadPart | None
    block_ids: tuple[bytes, ...]
    traceparent: str

    def request(self, layers: range) -> pb.DataRequest:
        wanted = pb.GetLayers(
            model=self.model,
            block_ids=self.block_ids,
            first_layer=layers.start,
            layers=len(layers),
            heads=None if self.heads is None else self.heads.message(),
        )
        return pb.DataRequest(traceparent=self.traceparent, get_layers=wanted)

    def check(self, reply: pb.DataReply, payload_bytes: int, layer: int) -> int:
        """How many objects follow. Raises DataLoss for a reply that does not fit the question."""
        got, asked = reply.got_layer, len(self.block_ids)
        count = len(got.checksums)
        if got.layer != layer or count > asked or len(got.generations) != count:
            raise DataLoss(
                f"{self.address} sent {count} blocks of layer {got.layer} for {asked} of layer {layer}"
            )
        if payload_bytes != count * self.layout.object_bytes:
            raise DataLoss(f"{self.address} sent {payload_bytes} bytes for {count} objects of this model")
        return count


class LayerLoad:
    """A load under way. Its buffers belong to it until it has ended: by itself, or by `cancel`.

    It stops after its first `ahead` layers until it is released, and then goes on with the others. Where not
    all of the blocks are in the store's memory at once, they come in pieces, and no layer is there before the
    last piece comes.
    """

    def __init__(self, layers: int, blocks: int, ahead: int, first: int = 0) -> None:
        """`first`: which layer of the model is the first of these."""
        self._layers = layers
        self._first = first
        self._blocks = blocks
        self._allowed = ahead
        self._held_s = 0.0
        self._changed = threading.Condition()
        self._runs: list[int] = []
        self._ended = False
        self._cancelled = False
        self._call: PendingCall | None = None
        self._failure: KVCommonsError | None = None

    def wait(self, layer: int, deadline: Deadline) -> int:
        """How many leading blocks are there and verified in all layers up to this one of the model; fewer
        than asked for where blocks were missing or corrupt, 0 where the load failed or was cancelled before
        this layer.

        Raises DeadlineExceeded; the load goes on then.
        """
        layer -= self._first
        with self._changed:
            ready = self._changed.wait_for(lambda: len(self._runs) > layer or self._ended, deadline.left())
            if not ready:
                raise DeadlineExceeded(f"layer {layer + self._first} was not loaded within its deadline")
            return self._runs[layer] if layer < len(self._runs) else 0

    def wait_all(self, deadline: Deadline) -> int:
        """Blocks that are there and verified in all layers. Raises DeadlineExceeded."""
        return self.wait(self._first + self._layers - 1, deadline)

    @property
    def layers_arrived(self) -> int:
        with self._changed:
            return len(self._runs)

    @property
    def held_s(self) -> float:
        """How long it has stood still for want of a release."""
        with self._changed:
            return self._held_s

    def release(self) -> None:
        """The layers that were held back may come."""
        with self._changed:
            self._allowed = self._layers
            self._changed.notify_all()

    def narrow(self, blocks: int) -> None:
        """Goes on with the first `blocks` alone. When this returns nothing writes to the other buffers."""
        with self._changed:
            if blocks >= self._blocks:
                return
            self._blocks = blocks
            call = self._call
            if call is not None:
                call.abort()
                self._changed.wait_for(lambda: self._call is not call)  # the next one may have begun

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def ended(self) -> bool:
        with self._changed:
            return self._ended

    @property
    def failure(self) -> KVCommonsError | None:
        """Why it ended early, if it was not cancelled."""
        with self._changed:
            return self._failure

    def cancel(self, deadline: Deadline | None = None) -> bool:
        """Stops the load. When this returns True nothing writes to its buffers any more; False: the deadline
        came first, and the load ends later. Without a deadline it is True in the end."""
        with self._changed:
            self._cancelled = True
            if self._call is not None:
                self._call.abort()
            self._changed.notify_all()
            # The connection answers no more: a copy or a checksum under way is waited for, and what the
            # destination does when a layer is there.
            return self._changed.wait_for(
                lambda: self._ended or self._call is None, None if deadline is None else deadline.left()
            )

    def _ended_by(self, deadline: Deadline) -> bool:
        """Waits for the thread, or for the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, deadline.left())

    def _next(self, deadline: Deadline) -> tuple[range, int] | None:
        """The layers to ask for now and of how many blocks; waits while they are held back. None when there
        is no more to do."""
        began = time.monotonic()
        with self._changed:
            arrived = len(self._runs)
            if arrived and self._blocks:
                self._blocks = min(self._blocks, self._runs[-1])
            if arrived < self._layers and self._allowed <= arrived:
                released = self._changed.wait_for(
                    lambda: self._allowed > arrived or self._cancelled, deadline.left()
                )
                self._held_s += time.monotonic() - began
                if not released:
                    raise DeadlineExceeded("a load was held back until its deadline")
            if self._cancelled or arrived == self._layers or not self._blocks:
                return None
            return range(self._first + arrived, self._first + self._allowed), self._blocks

    def _begin(self, call: PendingCall, blocks: int) -> bool:
        """False when it was cancelled before, or is to go on with fewer blocks; the call is the caller's
        then."""
        with self._changed:
            if self._cancelled or self._blocks < blocks:
                return False
            self._call = call
            return True

    def _pause(self) -> None:
        """The call is over."""
        with self._changed:
            self._call = None
            self._changed.notify_all()

    def _wants_less(self, blocks: int) -> bool:
        """Whether a call for so many blocks was broken off by `narrow`."""
        with self._changed:
            return self._blocks < blocks and not self._cancelled

    def _advance(self, run: int) -> None:
        with self._changed:
            self._runs.append(run)
            self._changed.notify_all()

    def _end(self, failure: KVCommonsError | None) -> None:
        with self._changed:
            self._call = None
            self._failure = failure
            self._ended = True
            self._changed.notify_all()


class BlockLoader:
    """Loads on threads of its own, `loads_max` at a time; further ones wait, within their deadlines."""

    def __init__(
        self,
        condemn: Callable[[CorruptObject], None],
        *,
        name: str = "load",
        loads_max: int = 4,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`condemn` is called for each corrupt object, on a loading thread: it must not block."""
        self._condemn = condemn
        self._dialer = dialer
        self._pool = ThreadPoolExecutor(loads_max, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, DataClient] = OrderedDict()
        self._active: set[LayerLoad] = set()
        self._closed = False

    def load(
        self,
        address: str,
        model: bytes,
        layout: Layout,
        block_ids: Sequence[bytes],
        destination: Destination,
        deadline: Deadline,
        *,
        ahead: int | None = None,
        layers: range | None = None,
        heads: HeadPart | None = None,
    ) -> LayerLoad:
        """Reads `layers` (None: all) of consecutive blocks from a store's data address, those after the first
        `ahead` once it is released. `layout` is that of the `heads` that are read (None: all). Never blocks,
        and never raises for what the store does."""
        wanted_layers = layers or range(layout.layers)
        count = len(wanted_layers)
        load = LayerLoad(count, len(block_ids), count if ahead is None else ahead, wanted_layers.start)
        wanted = _Wanted(
            address=address,
            model=model,
            layout=layout,
            heads=heads,
            block_ids=tuple(block_ids),
            traceparent=current_traceparent(),
        )
        with self._lock:
            if self._closed:
                raise Unavailable("the loader was closed")
            self._active.add(load)
            self._pool.submit(self._run, load, wanted, destination, deadline)
        return load

    def close(self, deadline: Deadline | None = None) -> None:
        """Cancels all loads and ends the threads; past the deadline those that are held up by a destination
        end by themselves, at the latest with their loads."""
        with self._lock:
            self._closed = True
            active, clients = list(self._active), list(self._clients.values())
        for load in active:
            load.cancel(Deadline.after(0))
        self._pool.shutdown(wait=deadline is None or all(load._ended_by(deadline) for load in active))
        for client in clients:
            client.close()

    def _run(self, load: LayerLoad, wanted: _Wanted, destination: Destination, deadline: Deadline) -> None:
        failure: KVCommonsError | None = None
        try:
            while (step := load._next(deadline)) is not None:
                layers, blocks = step
                try:
                    self._load_layers(load, wanted, layers, blocks, destination, deadline)
                except Unavailable:
                    if not load._wants_less(blocks):
                        raise
                finally:
                    load._pause()
        except KVCommonsError as error:
            failure = error
            if not load.cancelled:
                count = len(wanted.block_ids)
                _LOG.warning("loading %d blocks from %s: %s", count, wanted.address, error.message)
        except Exception as error:
            _LOG.exception("loading blocks from %s", wanted.address)
            failure = Internal(f"{type(error).__name__} while loading; see the log")
        finally:
            load._end(failure)
            with self._lock:
                self._active.discard(load)

    def _load_layers(
        self,
        load: LayerLoad,
        wanted: _Wanted,
        layers: range,
        blocks: int,
        destination: Destination,
        deadline: Deadline,
    ) -> None:
        """These layers of the first `blocks`, piece by piece where the store sends them so."""
        wanted = replace(wanted, block_ids=wanted.block_ids[:blocks])
        with self._client(wanted.address).begin(wanted.request(layers), deadline=deadline) as call:
            if not load._begin(call, blocks):
                return
            there, more = 0, True
            while more:
                part = replace(wanted, block_ids=wanted.block_ids[there:])
                there, more = self._receive(load, call, part, layers, there, destination)

    def _receive(
        self,
        load: LayerLoad,
        call: PendingCall,
        part: _Wanted,
        layers: range,
        first: int,
        destination: Destination,
    ) -> tuple[int, bool]:
        """One piece, whose first block is the run's `first`. How many leading blocks of the run are there
        then in all of the layers, and whether others follow. Where none do, the load has advanced."""
        run, more = len(part.block_ids), False

        def is_last(reply: pb.DataReply) -> bool:
            return reply.got_layer.layer == layers[-1] and not reply.got_layer.more

        for layer in layers:
            with ExitStack() as open_buffers:
                buffers: Sequence[Buffer] = ()

                def choose(reply: pb.DataReply, payload_bytes: int, layer: int = layer) -> Sequence[Buffer]:
                    nonlocal buffers
                    count = part.check(reply, payload_bytes, layer)
                    if count:
                        buffers = open_buffers.enter_context(destination(layer, first, count))
                    return buffers

                got = call.next(choose, last=is_last).got_layer
                came = self._verify(part, got, buffers, min(run, len(buffers)))
            if layer == layers.start:
                more = got.more and 0 < came == len(buffers) < run  # a corrupt one ends the run
            elif more and came < run:
                more = False  # what is missing in a later layer ends the run
                for _ in range(layers.start, layer):
                    load._advance(first + run)
            run = came
            if more:
                continue
            load._advance(first + run)
            if not first + run:
                break  # the rest is of no use: leaving the call early hangs up
        return first + run, more

    def _verify(self, wanted: _Wanted, got: pb.GotLayer, buffers: Sequence[Buffer], run: int) -> int:
        """How many of the leading `run` objects are what was stored; the first that is not is condemned."""
        for index, block_id in enumerate(wanted.block_ids[:run]):
            if checksum(block_id, got.layer, buffers[index]) == got.checksums[index]:
                continue
            _LOG.warning("block %s, layer %d, of %s is corrupt", block_id.hex(), got.layer, wanted.address)
            self._condemn(
                CorruptObject(
                    address=wanted.address,
                    model=wanted.model,
                    block_id=block_id,
                    layer=got.layer,
                    generation=got.generations[index],
                )
            )
            return index
        return run

    def _client(self, address: str) -> DataClient:
        with self._lock:
            client = self._clients.pop(address, None) or self._dialer.client(address, "kvstore")
            self._clients[address] = client
            if len(self._clients) > _CLIENTS_MAX:
                _, oldest = self._clients.popitem(last=False)
                oldest.close()
            return client
