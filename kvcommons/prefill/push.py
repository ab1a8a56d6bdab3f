"""New blocks on their way to the holders that will attend over them: a lane (thread, connection) for each.

Payloads go straight from block memory; the blocks stay pinned until the holder has acknowledged them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvcommons.backend.memory import BlockMemory
from kvcommons.errors import DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.pb import common_pb2 as pb
from kvcommons.pb import data_pb2
from kvcommons.prefill.targets import Place, Target, Write
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.heads import HeadPart, HeadTransfer, transfers
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline

log = logging.getLogger(__name__)

IDLE_S = 30.0  # a lane without work for so long ends


class Delivery:
    """All writes of one job: how many are under way, and the first failure. Any thread may touch it. Each
    other stage of the instance counts as one, which ends with the last of its writes."""

    def __init__(self, deadline: Deadline, traceparent: str) -> None:
        self.deadline = deadline
        self.traceparent = traceparent
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._pending = self._elsewhere = 0  # writes of this process, and other stages
        self._failure: KVCommonsError | None = None
        self._after: Callable[[KVCommonsError | None], None] | None = None

    @property
    def failure(self) -> KVCommonsError | None:
        """Of the first write that failed; the others are not tried any more."""
        return self._failure

    def begin(self) -> None:
        with self._lock:
            self._pending += 1

    def end(self, failure: KVCommonsError | None = None) -> None:
        """One write is acknowledged, failed or dropped."""
        with self._lock:
            self._pending -= 1
            after = self._ended(failure)
        if after is not None:
            after(self._failure)

    def begin_elsewhere(self, stages: int) -> None:
        """So many other ones write, too."""
        with self._lock:
            self._elsewhere += stages

    def end_elsewhere(self, failure: KVCommonsError | None = None) -> None:
        """One of them has written all that it had, or will not."""
        with self._lock:
            self._elsewhere -= 1
            after = self._ended(failure)
        if after is not None:
            after(self._failure)

    def await_arrival(self) -> None:
        """Until all writes of this process so far are acknowledged. Raises the failure of one,
        DeadlineExceeded."""
        with self._lock:
            arrived = self._arrived.wait_for(lambda: not self._pending, self.deadline.left())
        if self._failure is not None:
            raise self._failure
        if not arrived:
            raise DeadlineExceeded("the prompt's blocks did not reach their holders within the deadline")

    def abandon(self, reason: KVCommonsError) -> None:
        """Nobody waits for this job any more: what was not sent stays here."""
        with self._lock:
            self._failure = self._failure or reason

    def seal(self, after: Callable[[KVCommonsError | None], None]) -> None:
        """No more writes come: `after` is called once, on whichever thread ends the last, with the failure if
        any."""
        with self._lock:
            self._after = after
            ready = self._take_after()
        if ready is not None:
            ready(self._failure)

    def _ended(self, failure: KVCommonsError | None) -> Callable[[KVCommonsError | None], None] | None:
        self._failure = self._failure or failure
        self._arrived.notify_all()
        return self._take_after()

    def _take_after(self) -> Callable[[KVCommonsError | None], None] | None:
        if self._pending or self._elsewhere:
            return None
        after, self._after = self._after, None
        return after


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A call to make; `done` is called once, whatever becomes of it."""

    delivery: Delivery
    call: Callable[[DataClient, Deadline], None]
    done: Callable[[KVCommonsError | None], None]


class Pusher:
    """Lanes by data address, made when needed."""

    def __init__(
        self,
        memory: BlockMemory,
        allocator: BlockAllocator,
        *,
        call_deadline_s: float,
        dialer: Dialer = UNSECURED,
        heads: HeadPart | None = None,
    ) -> None:
        """`call_deadline_s`: how long one write may take before its target counts as lost. `heads`: which of
        the model's are in `memory`; None: all."""
        self._heads = heads
        self._memory = memory
        self._allocator = allocator
        self._call_deadline_s = call_deadline_s
        self._dialer = dialer
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._stopped = False

    def write(self, delivery: Delivery, layer: int, write: Write, blocks: list[int]) -> None:
        """One layer of `blocks` (physical, as many as the write counts), whose content is final for that
        layer. To a head group, and to ranks, each is sent its heads, as far as they are here; of pipeline
        stages the one that has the layer is. Raises InvalidInput where the heads here and those of the parts
        do not divide each other."""
        assert len(blocks) == write.count
        by_part: dict[int, list[Place]] = {}
        for place in write.target.places_of(layer):
            by_part.setdefault(0 if place.heads is None else place.heads.number, []).append(place)
        for transfer in transfers(self._heads, write.target.head_parts):
            for place in by_part[transfer.place]:  # several ranks, where there are fewer KV heads
                self._write(delivery, layer, write, blocks, place, transfer)

    def _write(
        self,
        delivery: Delivery,
        layer: int,
        write: Write,
        blocks: list[int],
        place: Place,
        transfer: HeadTransfer,
    ) -> None:
        self._allocator.retain(blocks)
        delivery.begin()

        def call(client: DataClient, deadline: Deadline) -> None:
            request = data_pb2.DataRequest(
                deadline_ms=deadline.left_ms(),
                traceparent=delivery.traceparent,
                write_blocks=data_pb2.WriteBlocks(
                    handle=place.handle,
                    epoch=place.epoch,
                    layer=layer,
                    first_block=write.first - write.target.first_block,
                    blocks=write.count,
                    heads=None if transfer.received is None else transfer.received.message(),
                ),
            )
            objects = self._memory.read_buffers(layer, blocks)
            payload = objects if transfer.sent is None else transfer.sent.pieces(objects)
            client.call(request, payload, deadline=deadline)

        def done(failure: KVCommonsError | None) -> None:
            self._allocator.release(blocks)
            delivery.end(failure)

        self._put(place.data_address, _Item(delivery=delivery, call=call, done=done))

    def start_sequence(
        self,
        delivery: Delivery,
        target: Target,
        first: pb.SampledToken,
        push_from_block: int,
        done: Callable[[KVCommonsError | None], None],
    ) -> None:
        """Tells decode, after all writes, to go on from `first`."""

        def call(client: DataClient, deadline: Deadline) -> None:
            request = data_pb2.DataRequest(
                deadline_ms=deadline.left_ms(),
                traceparent=delivery.traceparent,
                start_sequence=data_pb2.StartSequence(
                    handle=target.handle, epoch=target.epoch, first=first, pushed_from_block=push_from_block
                ),
            )
            client.call(request, deadline=deadline)

        self._put(target.data_address, _Item(delivery=delivery, call=call, done=done))

    def stop(self) -> None:
        """Ends all lanes; what was not sent fails."""
        with self._lock:
            self._stopped = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.stop()

    def _put(self, address: str, item: _Item) -> None:
        with self._lock:
            if not self._stopped:
                lane = self._lanes.get(address)
                if lane is None or not lane.put(item):
                    self._lanes = {known: old for known, old in self._lanes.items() if old.open}
                    lane = self._lanes[address] = _Lane(address, self._call_deadline_s, self._dialer)
                    lane.put(item)
                return
        item.done(Unavailable("this prefill instance is stopping"))


class _Lane:
    """One holder's queue, thread and connection."""

    def __init__(self, address: str, call_deadline_s: float, dialer: Dialer) -> None:
        self._address = address
        self._call_deadline_s = call_deadline_s
        self._client = dialer.client(address, "holder", kept_max=1)
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.open = True
        self._thread = threading.Thread(target=self._run, name=f"push {address}", daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> bool:
        """False once the lane has ended."""
        with self._lock:
            if self.open:
                self._queue.put(item)
            return self.open

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(self._call_deadline_s + 1.0)

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    self.open = not self._queue.empty()
                if self.open:
                    continue
                break
            if item is None:
                break
            item.done(self._carry_out(item))
        with self._lock:
            self.open = False
        while not self._queue.empty():
            left = self._queue.get()
            if left is not None:
                left.done(Unavailable("this prefill instance is stopping"))
        self._client.close()

    def _carry_out(self, item: _Item) -> KVCommonsError | None:
        failure = item.delivery.failure
        if failure is not None:
            return failure
        try:
            item.call(self._client, item.delivery.deadline.within(self._call_deadline_s))
        except KVCommonsError as error:
            log.warning("push failed: %s", error.message, extra={"target": self._address, "code": error.code})
            return Unavailable(f"the blocks did not reach the holder at {self._address}: {error.message}")
        except Exception as error:
            log.exception("push failed unexpectedly", extra={"target": self._address})
            return Unavailable(f"the blocks did not reach the holder at {self._address}: {error}")
        return None
