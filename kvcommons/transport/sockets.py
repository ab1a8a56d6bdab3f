"""Streams over sockets (sendmsg, recvmsg_into), and what TCP and Unix listeners share.

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

from kvcommons.errors import DeadlineExceeded, Unavailable
from kvcommons.transport.base import Connection, Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection, Stream


class SocketStream:
    """A Stream over a connected stream socket, which it owns."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        # abort() may come from another thread while close() gives the descriptor back.
        self._closing = threading.Lock()

    def send_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        while True:
            try:
                return self.sock.sendmsg(views)
            except BlockingIOError:
                self._wait(self._writable, deadline, "to send to")
            except OSError as error:
                raise self.gone(error) from error

    def receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        while True:
            try:
                return self.sock.recvmsg_into(views)[0]
            except BlockingIOError:
                self.wait_to_receive(deadline)
            except OSError as error:
                raise self.gone(error) from error

    def finish(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # not connected any more: nothing more will be sent

    def wait_readable(self, deadline: Deadline) -> bool:
        return bool(self._readable.poll(deadline.left() * 1000))

    def wait_to_receive(self, deadline: Deadline, why: str = "for") -> None:
        """Until something can be received; `why` says for whom, before the peer's name."""
        self._wait(self._readable, deadline, why)

    def gone(self, error: OSError) -> Unavailable:
        return Unavailable(f"{self.peer} went away: {error.strerror or error}")

    def abort(self) -> None:
        with self._closing:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected any more, or closed: what was asked for

    def close(self) -> None:
        with self._closing:
            self.sock.close()

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
        open_stream: Callable[[socket.socket, str], Stream],
        limits: Limits,
        release: Callable[[], None],
    ) -> None:
        """`open_stream` takes an accepted socket and its peer's name; `release` runs before the listening
        socket is closed."""
        sock.setblocking(False)
        self.address = address
        self._sock = sock
        self._open_stream = open_stream
        self._limits = limits
        self._release = release
        self._stopped = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)

    def accept(self) -> Connection | None:
        while not self._stopped.is_set():
            # Idle waiting, ended by stop(): nothing here waits for a peer.
            self._poll.poll()
            if self._stopped.is_set():
                break
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # it went away between poll and accept
            peer = f"client of {self.address}"
            return FramedConnection(self._open_stream(sock, peer), peer, self._limits)
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
