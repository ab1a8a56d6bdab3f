"""Streams over sockets (sendmsg, recvmsg_into), and what TCP and Unix listeners share.

Sockets are non-blocking and every wait is a poll with the deadline's time: a paused peer costs its deadline,
never more. Where the wait before was short, a wait first asks again and again for some microseconds: to be
woken on a core that went idle takes longer than most answers do.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvcommons.errors import DeadlineExceeded, PermissionDenied, Unavailable
from kvcommons.transport.base import Bare, Connection, Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection, Stream

log = logging.getLogger(__name__)

# How long a wait asks before it sleeps, unless its owner says otherwise.
ASK_S = 60e-6
# To offer the core takes longer than this only where others have work for it.
_WANTED_S = 250e-6
# Lets whatever else is ready have the core, without the interpreter's lock (os.sched_yield keeps it).
yield_core = ctypes.CDLL(None).sched_yield


class SocketStream:
    """A Stream over a connected stream socket, which it owns."""

    proven = True  # what was to be asked of its peer was, before there was a stream

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._brief = True  # the wait before
        self._ask_s = ASK_S
        # abort() may come from another thread while close() gives the descriptor back.
        self._closing = threading.Lock()

    def send_some(self, views: Sequence[memoryview | bytes], deadline: Deadline) -> int:
        while True:
            try:
                return self.sock.sendmsg(views)
            except BlockingIOError:
                self.wait_to_send(deadline)
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
        if self._readable.poll(0):
            return True
        started_s = time.monotonic()
        left_s = deadline.left_at(started_s)
        if not left_s:
            return False
        readable = bool(self._brief and left_s > self._ask_s and self._ask(started_s + self._ask_s))
        if not readable:
            # Rounded up by poll itself.
            readable = bool(self._readable.poll(deadline.left() * 1000))
        self._brief = time.monotonic() - started_s < 1.5 * self._ask_s
        return readable

    def ask_for(self, ask_s: float) -> None:
        self._ask_s = ask_s

    def bare(self) -> Bare | None:
        return Bare(descriptor=self.sock.fileno(), ask_s=self._ask_s)

    def _ask(self, until_s: float) -> bool:
        now_s = time.monotonic()
        while now_s < until_s:
            yield_core()
            if self._readable.poll(0):
                return True
            before_s, now_s = now_s, time.monotonic()
            if now_s - before_s > _WANTED_S:
                break
        return False

    def wait_to_receive(self, deadline: Deadline, why: str = "for") -> None:
        """Until something can be received; `why` says for whom, before the peer's name."""
        if not self.wait_readable(deadline):
            raise self.waited(why)

    def wait_to_send(self, deadline: Deadline) -> None:
        # Rounded up by poll itself; a poll of 0 still sees what is there.
        if not self._writable.poll(deadline.left() * 1000):
            raise self.waited("to send to") from None

    def gone(self, error: OSError) -> Unavailable:
        return gone(self.peer, error)

    def abort(self) -> None:
        with self._closing:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected any more, or closed: what was asked for

    def close(self) -> None:
        with self._closing:
            self.sock.close()

    def waited(self, why: str) -> DeadlineExceeded:
        return waited(self.peer, why)


def gone(peer: str, error: OSError) -> Unavailable:
    return Unavailable(f"{peer} went away: {error.strerror or error}")


def waited(peer: str, why: str) -> DeadlineExceeded:
    """`why`: for whom, before the peer's name."""
    return DeadlineExceeded(f"waited {why} {peer} until the deadline: it is slow, paused or unreachable")


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
        """`open_stream` takes an accepted socket and its peer's name, and raises PermissionDenied for a peer
        that is not let in; `release` runs before the listening socket is closed."""
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
            try:
                stream = self._open_stream(sock, peer)
            except PermissionDenied as error:
                log.warning("refused: %s", error.message)
                sock.close()
                continue
            return FramedConnection(stream, peer, self._limits)
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
