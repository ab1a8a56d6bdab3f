"""The queue and the thread of a BlockSaver for one store: order is kept, a store that is away holds up no
other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvcommons.blockstore.progress import Progress
from kvcommons.errors import DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.checksum import checksum
from kvcommons.rblock.heads import HeadPart
from kvcommons.rpc.dialer import Dialer
from kvcommons.transport.client import PendingCall
from kvcommons.transport.deadline import Deadline

_LOG = logging.getLogger(__name__)

# Between attempts to reach a store that is away: the first wait, doubled up to the last.
_BACKOFF_S = (0.05, 1.0)
# A lane without work ends its thread.
_IDLE_S = 30.0
# A call that takes this long is broken off where the owner of its payload needs the memory.
_SLOW_CALL_S = 0.25
# Layers of the same blocks are sent together: a message has its price at both ends, whatever its size. So
# many bytes are waited for, or what went out in so much time, whichever is less, and never for longer than
# this: what is left to send when the last layer is computed stays little.
_TOGETHER_BYTES = 4 << 20
_TOGETHER_SENT_S = 0.05
_TOGETHER_WAIT_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Consecutive layers, from `layer` on, of consecutive blocks: `payload` has one object a block for each
    of them."""

    model: bytes
    layers: int  # of the model
    part: range  # of them, which this saver is given one after the other
    tenant: str
    parent: bytes
    first_index: int
    block_ids: tuple[bytes, ...]
    layer: int
    payload: tuple[tuple[memoryview, ...], ...]
    bytes: int
    done: Callable[[], None]
    give_up: Deadline
    traceparent: str
    heads: HeadPart | None = None  # that the objects have; None: all

    def copied(self) -> Save:
        """The same, its payload in memory of its own."""
        payload = tuple(tuple(memoryview(bytes(view)) for view in objects) for objects in self.payload)
        return replace(self, payload=payload, done=_nothing)

    @property
    def next_layer(self) -> int:
        return self.layer + len(self.payload)

    def goes_on(self, later: Save) -> bool:
        """Whether `later` has the next layers of the same blocks."""
        return (
            later.layer == self.next_layer
            and later.block_ids == self.block_ids
            and later.model == self.model
            and later.tenant == self.tenant
        )


def together(saves: Sequence[Save]) -> Save:
    """Saves of which each goes on with the one before, as one."""
    if len(saves) == 1:
        return saves[0]
    dones = [save.done for save in saves if save.done is not _nothing]

    def done() -> None:
        for each in dones:
            each()

    return replace(
        saves[0],
        payload=tuple(objects for save in saves for objects in save.payload),
        bytes=sum(save.bytes for save in saves),
        done=done if dones else _nothing,
    )


class Lane:
    """One store's saves, in order, on one thread and one connection."""

    def __init__(
        self,
        address: str,
        *,
        writer: str,
        call_s: float,
        changed: threading.Condition,
        settle: Callable[[Save, int, int], None],
        dialer: Dialer,
    ) -> None:
        """`changed` is the saver's, and held by callers of `put`, `stop` and `over`. `settle(save, saved,
        unwanted)` is called, without it, once for what goes out together."""
        self._address = address
        self._writer = writer
        self._call_s = call_s
        self._changed = changed
        self._settle = settle
        self._client = dialer.client(address, "kvstore", kept_max=1)
        self._progress = Progress()
        self._queue: deque[Save] = deque()
        self._together_bytes = _TOGETHER_BYTES
        self._stopping = False
        self._call: PendingCall | None = None
        self._call_began_s = 0.0
        self._let_go = False  # of the payload in hand, as soon as no call reads it
        self._backoff_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"save-{writer}", daemon=True)
        self.over = False

    def start(self) -> None:
        self._thread.start()

    def put(self, save: Save) -> None:
        self._queue.append(save)
        if len(self._queue) == 1 or self._ripe():
            self._changed.notify_all()

    def detach(self) -> list[Callable[[], None]]:
        """Copies what is queued out of its owners' memory; returns their `done`s, for the caller to call
        without the lock. Of the layer in hand the lane lets go by itself, once it is sent or has been under
        way for long."""
        self._let_go = True
        if self._call is not None and time.monotonic() - self._call_began_s > _SLOW_CALL_S:
            self._call.abort()
        self._changed.notify_all()
        owned = [save for save in self._queue if save.done is not _nothing]
        self._queue = deque(save if save.done is _nothing else save.copied() for save in self._queue)
        return [save.done for save in owned]

    def stop(self) -> None:
        """Drops what is queued, and breaks off the call under way."""
        self._stopping = True
        if self._call is not None:
            self._call.abort()
        self._changed.notify_all()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (save := self._next()) is not None:
            saved = unwanted = 0
            try:
                save, saved, unwanted = self._carry_out(save)
            except Exception:
                # `done` must be called whatever happens: it unpins memory.
                _LOG.exception("saving to %s", self._address)
            self._settle(save, saved, unwanted)
        self._client.close()

    def _next(self) -> Save | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping, _IDLE_S)
            if self._queue and not self._ripe():
                self._changed.wait_for(self._ripe, _TOGETHER_WAIT_S)
            self._let_go = False
            if not self._queue:
                self.over = True
                return None
            count, _ = self._leading()
            return together([self._queue.popleft() for _ in range(count)])

    def _leading(self) -> tuple[int, bool]:
        """How many saves at the head of the queue go out together, and whether they wait for no more."""
        size, last = 0, None
        for count, save in enumerate(self._queue):
            if last is not None and not last.goes_on(save):
                return count, True
            size += save.bytes
            last = save
            if size >= self._together_bytes or save.next_layer == save.part.stop:
                return count + 1, True
        return len(self._queue), False

    def _ripe(self) -> bool:
        return self._stopping or self._leading()[1]

    def _carry_out(self, save: Save) -> tuple[Save, int, int]:
        """Objects saved, and objects that need not be; and the save, which may have been copied. Tries again
        while the store is away, until it is time to give up."""
        sums: list[list[int]] = []
        layers = len(save.payload)
        while not self._stopping:
            if save.layer != save.part.start and not self._client.connected():
                # Another process answers there by now, without the layers before this one.
                self._progress.lost()
            runs = self._progress.runs(save.model, save.layer, save.block_ids, save.part.start)
            wanted = sum(map(len, runs))
            if not wanted:
                return save, 0, layers * len(save.block_ids)
            if self._backoff_s and save.give_up.passed():
                return save, 0, 0
            if not sums:
                sums = [
                    [checksum(block_id, layer, view) for layer, view in enumerate(objects, save.layer)]
                    for block_id, objects in zip(save.block_ids, zip(*save.payload, strict=True), strict=True)
                ]
            try:
                refused = sum(self._put(save, run, sums) for run in runs)
            except (Unavailable, DeadlineExceeded) as error:
                self._progress.lost()
                if save.layer != save.part.start:
                    return save, 0, 0  # it follows layers that the store may have forgotten
                self._pause(save, error)
                if self._let_go and save.done is not _nothing:
                    owned, save = save, save.copied()
                    owned.done()
            except KVCommonsError as error:
                _LOG.warning(
                    "%s refused %d layers from layer %d on of %d blocks: %s",
                    self._address, layers, save.layer, wanted, error.message,
                )  # fmt: skip
                self._progress.unwanted(save.model, save.block_ids)
                return save, 0, 0
            else:
                self._backoff_s = 0.0
                saved = wanted - refused
                return save, layers * saved, layers * (len(save.block_ids) - saved)
        return save, 0, 0

    def _put(self, save: Save, run: range, sums: list[list[int]]) -> int:
        """Sends one run; how many of its blocks the store does not want."""
        block_ids = save.block_ids[run.start : run.stop]
        put = pb.PutLayer(
            model=save.model,
            tenant=save.tenant,
            writer=self._writer,
            layer=save.layer,
            count=len(save.payload),
            layers=save.layers,
            parent=save.block_ids[run.start - 1] if run.start else save.parent,
            first_block=save.first_index + run.start,
            block_ids=block_ids,
            checksums=[each for of_block in sums[run.start : run.stop] for each in of_block],
            heads=None if save.heads is None else save.heads.message(),
        )
        deadline = Deadline.after(self._call_s)
        payload = [objects[index] for index in run for objects in save.payload]
        began_s = time.monotonic()
        with self._client.begin(
            pb.DataRequest(traceparent=save.traceparent, put_layer=put), payload, deadline=deadline
        ) as call:
            with self._changed:
                self._call, self._call_began_s = call, time.monotonic()
                if self._stopping:
                    call.abort()
            try:
                reply = call.finish()
            finally:
                with self._changed:
                    self._call = None
        self._pace(sum(view.nbytes for view in payload), time.monotonic() - began_s)
        unwanted = {index for index in reply.put_layer.unwanted if index < len(block_ids)}
        self._progress.sent(save.model, save.next_layer - 1, save.part.stop, block_ids)
        self._progress.unwanted(save.model, [block_ids[index] for index in unwanted])
        return len(unwanted)

    def _pace(self, sent_bytes: int, seconds: float) -> None:
        """Over a slow connection less goes out together."""
        with self._changed:
            self._together_bytes = min(
                _TOGETHER_BYTES, int(sent_bytes * _TOGETHER_SENT_S / max(seconds, 1e-6))
            )

    def _pause(self, save: Save, error: KVCommonsError) -> None:
        """Waits before the next attempt, at most until it is time to give up."""
        if not self._backoff_s:
            _LOG.warning("the store at %s is away: %s", self._address, error.message)
        self._backoff_s = min(max(self._backoff_s * 2, _BACKOFF_S[0]), _BACKOFF_S[1])
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._let_go, min(self._backoff_s, save.give_up.left())
            )


def _nothing() -> None:
    """`done` of a save whose memory is the saver's own."""
