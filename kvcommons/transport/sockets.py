"""Frames over stream sockets, from and into the caller's buffers (sendmsg, recvmsg_into), and what TCP and
Unix listeners share.

Sockets are non-blocking and every wait is a poll with the deadline's time: a paused peer costs its deadline,
never more."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcommons.errors import DeadlineExceeded, Unavailable
from kvcommons.transport import frame
from kvcommons.transport.base import Limits, SendBroken
from kvcommons.transport.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Buffers that one sendmsg or recvmsg_into takes.
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SCRATCH_BYTES = 256 << 10


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


class SocketConnection:
    """A Connection over a connected stream socket, which it owns."""

    def __init__(self, sock: socket.socket, peer: str, limits: Limits) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.unread_bytes = 0
        self.peer_leaves = False
        self._sock = sock
        self._limits = limits
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        # abort() may come from another thread while close() gives the descriptor back.
        self._closing = threading.Lock()

    def send(self, head: bytes, payload: Sequence[Buffer], deadline: Deadline, *, last: bool = False) -> None:
        views = flat_views(payload)
        header = frame.pack(len(head), sum(view.nbytes for view in views), self._limits, last=last)
        views.insert(0, memoryview(header + head))
        start, sent = 0, 0
        while start < len(views):
            try:
                count = self._sock.sendmsg(views[start : start + _IOV_MAX])
            except BlockingIOError:
                self._wait(self._writable, deadline, "to send to")
                continue
            except OSError as error:
                raise SendBroken(
                    f"{self.peer} went away: {error.strerror or error}", sent_bytes=sent
                ) from error
            sent += count
            start = _advance(views, start, count)

    def receive_head(self, deadline: Deadline) -> tuple[bytes, int]:
        assert not self.unread_bytes, "the frame before has payload that nobody took"
        header = bytearray(frame.HEADER_BYTES)
        self._fill([memoryview(header)], deadline)
        head_bytes, payload_bytes, self.peer_leaves = frame.unpack(header, self._limits)
        head = bytearray(head_bytes)
        if head_bytes:
            self._fill([memoryview(head)], deadline)
        self.unread_bytes = payload_bytes
        return bytes(head), payload_bytes

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
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        scratch = bytearray(_SCRATCH_BYTES)
        while True:
            self._fill([memoryview(scratch)], deadline)

    def wait_readable(self, deadline: Deadline) -> bool:
        return bool(self._readable.poll(deadline.left() * 1000))

    def abort(self) -> None:
        with self._closing:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected any more, or closed: what was asked for

    def close(self) -> None:
        with self._closing:
            self._sock.close()

    def _fill(self, views: list[memoryview], deadline: Deadline) -> None:
        start = 0
        while start < len(views):
            try:
                count = self._sock.recvmsg_into(views[start : start + _IOV_MAX])[0]
            except BlockingIOError:
                self._wait(self._readable, deadline, "for")
                continue
            except OSError as error:
                raise Unavailable(f"{self.peer} went away: {error.strerror or error}") from error
            if not count:
                raise Unavailable(f"{self.peer} closed the connection")
            # A head is received before unread_bytes is set, hence never below 0.
            self.unread_bytes = max(0, self.unread_bytes - count)
            start = _advance(views, start, count)

    def _wait(self, poll: select.poll, deadline: Deadline, why: str) -> None:
        # Rounded up by poll itself; a poll of 0 still sees what is there.
        if not poll.poll(deadline.left() * 1000):
            raise DeadlineExceeded(
                f"waited {why} {self.peer} until the deadline: it is slow, paused or unreachable"
            )


class SocketListener:
    """A Listener over a bound, listening socket, which it owns."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        prepare: Callable[[socket.socket], None],
        limits: Limits,
        release: Callable[[], None],
    ) -> None:
        """`prepare` sets options on accepted sockets; `release` runs before the socket is closed."""
        sock.setblocking(False)
        self.address = address
        self._sock = sock
        self._prepare = prepare
        self._limits = limits
        self._release = release
        self._stopped = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)

    def accept(self) -> SocketConnection | None:
        while not self._stopped.is_set():
            # Idle waiting, ended by stop(): nothing here waits for a peer.
            self._poll.poll()
            if self._stopped.is_set():
                break
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # it went away between poll and accept
            self._prepare(sock)
            return SocketConnection(sock, f"client of {self.address}", self._limits)
        return None

    def stop(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            os.write(self._wake_write, b"x")

    def close(self) -> None:
        """After the thread in accept has returned."""
        self._stopped.set()
        self._release()
        self._sock.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


def finish_connect(sock: socket.socket, address: object, name: str, deadline: Deadline) -> None:
    """Connects a non-blocking socket; the caller closes it when this raises Unavailable or
    DeadlineExceeded."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while True:
        code = sock.connect_ex(address)  # type: ignore[arg-type]
        if code == 0:
            return
        if code == errno.EAGAIN:
            # A Unix socket's backlog is full; there is nothing to poll for.
            deadline.check(f"connecting to {name}, whose backlog is full,")
            time.sleep(0.005)
            continue
        if code != errno.EINPROGRESS:
            raise Unavailable(f"cannot connect to {name}: {os.strerror(code)}; is it running?")
        if not poll.poll(deadline.left() * 1000):
            raise DeadlineExceeded(f"{name} did not answer within the deadline")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise Unavailable(f"cannot connect to {name}: {os.strerror(code)}; is it running?")
        return
