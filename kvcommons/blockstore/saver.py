"""Writes blocks to a kvstore in the background (AttentionStore, section 3.2.2: asynchronous saving)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcommons.blockstore.lane import Lane, Save
from kvcommons.rblock.heads import HeadPart
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.telemetry.trace import current_traceparent
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverStats:
    """Objects since the start: each of them ended in one of the first three."""

    saved_objects: int
    unwanted_objects: int  # the store had them, or a layer before them was lost
    dropped_objects: int  # no room in the write buffer, or the store was away or refused them
    pending_bytes: int


class BlockSaver:
    """Takes layers of blocks from the owner's memory without copying: they must stay as they are until
    `done`. An owner that needs its memory sooner has them moved to the write buffer by `detach`.

    What waits is bounded by `buffer_bytes`; a layer waits at most `hold_s` for a store that is away. A layer
    that is dropped takes the later layers of its blocks with it.
    """

    def __init__(
        self,
        writer: str,
        *,
        buffer_bytes: int = 256 << 20,
        hold_s: float = 10.0,
        call_s: float = 5.0,
        dialer: Dialer = UNSECURED,
    ) -> None:
        """`writer` is the instance's id; `call_s` bounds one PutLayer."""
        self.writer = writer  # of what is saved from now on
        self._buffer_bytes = buffer_bytes
        self._hold_s = hold_s
        self._call_s = call_s
        self._dialer = dialer
        # Guards all that follows, and the lanes' queues.
        self._changed = threading.Condition()
        self._lanes: dict[tuple[str, str], Lane] = {}  # by address and writer
        self._pending_bytes = 0
        self._counts = {"saved": 0, "unwanted": 0, "dropped": 0}
        self._closed = False

    def save(
        self,
        *,
        address: str,
        model: bytes,
        layers: int,
        tenant: str,
        parent: bytes,
        first_index: int,
        block_ids: Sequence[bytes],
        layer: int,
        payload: Sequence[Buffer],
        done: Callable[[], None],
        part: range | None = None,
        heads: HeadPart | None = None,
    ) -> bool:
        """Queues one layer of consecutive blocks, `payload` one object a block. Returns False if it was
        dropped at once.

        Never blocks. `done` is called exactly once, by a thread of the saver, or by this one before it
        returns False: do not hold a lock that `done` needs. `parent` is the identity of the block before the
        first (b"" at the sequence's beginning), `first_index` the first one's index in its sequence, `layers`
        the model's, `part` those of them that this owner saves, in order, and `heads` of which heads (None:
        all)."""
        assert len(payload) == len(block_ids), "one buffer a block"
        views = tuple(memoryview(buffer) for buffer in payload)
        save = Save(
            model=model,
            part=part or range(layers),
            heads=heads,
            layers=layers,
            tenant=tenant,
            parent=parent,
            first_index=first_index,
            block_ids=tuple(block_ids),
            layer=layer,
            payload=(views,),
            bytes=sum(view.nbytes for view in views),
            done=done,
            give_up=Deadline.after(self._hold_s),
            traceparent=current_traceparent(),
        )
        with self._changed:
            if not self._closed and self._pending_bytes + save.bytes <= self._buffer_bytes:
                self._pending_bytes += save.bytes
                self._lane(address).put(save)
                return True
            self._counts["dropped"] += len(save.block_ids)
        done()
        return False

    def detach(self) -> bool:
        """Moves what waits to memory of the saver's own, so that its owners can go on with theirs: whether
        there was anything. What this copies is bounded, as all that waits, by `buffer_bytes`."""
        with self._changed:
            owners = [done for lane in self._lanes.values() for done in lane.detach()]
        for done in owners:
            done()
        return bool(owners)

    def stats(self) -> SaverStats:
        with self._changed:
            return SaverStats(
                saved_objects=self._counts["saved"],
                unwanted_objects=self._counts["unwanted"],
                dropped_objects=self._counts["dropped"],
                pending_bytes=self._pending_bytes,
            )

    def flush(self, deadline: Deadline) -> bool:
        """Waits until nothing is pending; False when the deadline came first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_bytes, deadline.left())

    def close(self, deadline: Deadline) -> None:
        """Refuses new saves, drops what is pending at the deadline, ends the threads."""
        with self._changed:
            self._closed = True
        self.flush(deadline)
        with self._changed:
            lanes = list(self._lanes.values())
            for lane in lanes:
                lane.stop()
        for lane in lanes:
            lane.join()

    def _lane(self, address: str) -> Lane:
        key = (address, self.writer)
        lane = self._lanes.get(key)
        if lane is None or lane.over:
            lane = Lane(
                address,
                writer=self.writer,
                call_s=self._call_s,
                changed=self._changed,
                settle=self._settle,
                dialer=self._dialer,
            )
            self._lanes = {known: old for known, old in self._lanes.items() if not old.over}
            self._lanes[key] = lane
            lane.start()
        return lane

    def _settle(self, save: Save, saved: int, unwanted: int) -> None:
        """Called by a lane; what is neither saved nor unwanted was dropped."""
        save.done()
        with self._changed:
            self._counts["saved"] += saved
            self._counts["unwanted"] += unwanted
            self._counts["dropped"] += len(save.payload) * len(save.block_ids) - saved - unwanted
            self._pending_bytes -= save.bytes
            self._changed.notify_all()
