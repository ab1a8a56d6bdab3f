"""Frames over a stream of bytes, from and into the caller's buffers: the Connection that every transport
shares. What carries the bytes is a Stream of the transport's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvcommons.errors import Unavailable
from kvcommons.transport import frame
from kvcommons.transport.base import Bare, Limits, SendBroken
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Buffers given to a stream at once: what one sendmsg or recvmsg_into takes on every Linux.
VIEWS_MAX = 1024
_SCRATCH_BYTES = 256 << 10
# Received at once with a frame's header: small frames take one call.
_AHEAD_BYTES = 16 << 10


class Stream(Protocol):
    """Bytes in order, both ways. Belongs to one thread at a time, except for `abort`. Waits end with the
    deadline (DeadlineExceeded); a peer that is gone is Unavailable."""

    def send_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        """Sends at least one byte from the front of non-empty byte views; how many. Raises SendBroken where
        the peer may have got some before it went."""
        ...

    def receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        """Fills at least one byte of non-empty byte views, from the front; how many. 0: the peer's end."""
        ...

    def finish(self) -> None:
        """Says that nothing more will be sent. Never fails."""
        ...

    def wait_readable(self, deadline: Deadline) -> bool:
        """Whether bytes, the peer's end or a failure can be received before the deadline. Never raises."""
        ...

    @property
    def proven(self) -> bool:
        """As Connection's."""
        ...

    def ask_for(self, ask_s: float) -> None:
        """As Connection's."""
        ...

    def bare(self) -> Bare | None:
        """Its socket, where that carries these bytes and no others."""
        ...

    def abort(self) -> None:
        """Makes all pending and later operations fail at once. May be called by any thread."""
        ...

    def close(self) -> None: ...


def flat_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Byte views of C-contiguous buffers, without the empty ones (which cannot be cast)."""
    views = [memoryview(buffer) for buffer in buffers]
    return [view.cast("B") for view in views if view.nbytes]


def _advance(views: list[memoryview], start: int, done: int) -> int:
    """Index of the first view not finished after `done` more bytes; that view is cut to what is left of
    it."""
    while done:
        size = views[start].nbytes
        if done < size:
            views[start] = views[start][done:]
            break
        done -= size
        start += 1
    return start


class FramedConnection:
    """A Connection over a Stream, which it owns."""

    def __init__(self, stream: Stream, peer: str, limits: Limits) -> None:
        self.peer = peer
        self.unread_bytes = 0
        self.peer_leaves = False
        self.layer_head = False
        self._stream = stream
        self._limits = limits
        self._buffer = memoryview(bytearray(_AHEAD_BYTES))
        self._ahead = self._buffer[:0]  # received, and not taken yet
        self._exact = False

    def send(
        self,
        head: bytes,
        payload: Sequence[Buffer],
        deadline: Deadline,
        *,
        last: bool = False,
        layer: bool = False,
    ) -> None:
        views = flat_views(payload)
        size = sum(view.nbytes for view in views)
        header = frame.pack(len(head), size, self._limits, last=last, layer=layer)
        views.insert(0, memoryview(header + head))
        start, sent = 0, 0
        while start < len(views):
            try:
                count = self._stream.send_some(views[start : start + VIEWS_MAX], deadline)
            except Unavailable as error:
                begun = error.sent_bytes if isinstance(error, SendBroken) else 0
                raise SendBroken(error.message, sent_bytes=sent + begun) from error
            sent += count
            start = _advance(views, start, count)

    def receive_head(self, deadline: Deadline) -> tuple[bytes, int]:
        assert not self.unread_bytes, "the frame before has payload that nobody took"
        header = self._take(frame.HEADER_BYTES, deadline)
        unpacked = frame.unpack(header, self._limits)
        self.peer_leaves, self.layer_head = unpacked.last, unpacked.layer
        head = self._take(unpacked.head_bytes, deadline)
        self.unread_bytes = unpacked.payload_bytes
        return head, unpacked.payload_bytes

    def receive_payload(self, into: Sequence[Buffer], deadline: Deadline) -> None:
        views = flat_views(into)
        wanted = sum(view.nbytes for view in views)
        if wanted > self.unread_bytes:
            raise ValueError(f"{wanted} bytes wanted of a payload with {self.unread_bytes} left")
        self._fill(views, deadline)

    def drain(self, deadline: Deadline) -> None:
        if not self.unread_bytes:
            return
        scratch = memoryview(bytearray(min(_SCRATCH_BYTES, self.unread_bytes)))
        while self.unread_bytes:
            self._fill([scratch[: self.unread_bytes]], deadline)

    def linger(self, deadline: Deadline) -> None:
        self._stream.finish()
        scratch = bytearray(_SCRATCH_BYTES)
        while True:
            self._fill([memoryview(scratch)], deadline)

    def wait_readable(self, deadline: Deadline) -> bool:
        return bool(self._ahead) or self._stream.wait_readable(deadline)

    @property
    def proven(self) -> bool:
        return self._stream.proven

    def ask_for(self, ask_s: float) -> None:
        self._stream.ask_for(ask_s)

    def receive_exactly(self) -> None:
        self._exact = True

    def bare(self) -> Bare | None:
        return None if self._ahead or self.unread_bytes else self._stream.bare()

    def unreceive(self, received: Buffer) -> None:
        self._ahead = memoryview(received)

    def abort(self) -> None:
        self._stream.abort()

    def close(self) -> None:
        self._stream.close()

    def _take(self, size: int, deadline: Deadline) -> bytes:
        """The next bytes, and with them what else of the frame is there already."""
        if size > _AHEAD_BYTES:
            whole = bytearray(size)
            self._fill([memoryview(whole)], deadline)
            return bytes(whole)
        have = len(self._ahead)
        if have < size:
            self._buffer[:have] = self._ahead
            while have < size:
                end = size if self._exact else _AHEAD_BYTES
                count = self._stream.receive_some([self._buffer[have:end]], deadline)
                if not count:
                    raise Unavailable(f"{self.peer} closed the connection")
                have += count
            self._ahead = self._buffer[:have]
        head, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        return head

    def _fill(self, views: list[memoryview], deadline: Deadline) -> None:
        start = 0
        while self._ahead and start < len(views):
            count = min(views[start].nbytes, len(self._ahead))
            views[start][:count] = self._ahead[:count]
            self._ahead = self._ahead[count:]
            self.unread_bytes = max(0, self.unread_bytes - count)
            start = _advance(views, start, count)
        while start < len(views):
            count = self._stream.receive_some(views[start : start + VIEWS_MAX], deadline)
            if not count:
                raise Unavailable(f"{self.peer} closed the connection")
            # A head is received before unread_bytes is set, hence never below 0.
            self.unread_bytes = max(0, self.unread_bytes - count)
            start = _advance(views, start, count)
