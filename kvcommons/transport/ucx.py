"""UCX, between hosts whose network it knows better than the kernel does: "ucx:host:port". Needs the extra
`ucx`.

The port is TCP. On it both sides tell each other where their UCX workers are, and it stays open: its end is
the peer's end, whatever UCX makes of that. The bytes go as tagged messages. Each connection has a context and
a worker of its own, which the thread that uses the connection drives, and waits for, in UCX's blocking mode:
a thread in between would cost two switches a message. docs/formats/ucx-greeting.md is the page of the
greeting.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvcommons.errors import DataLoss, DeadlineExceeded, TooLarge, Unavailable, UnsupportedParameter
from kvcommons.transport.base import Bare, Connection, Limits, SendBroken
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection, Stream
from kvcommons.transport.offering import OfferingStream
from kvcommons.transport.sockets import ASK_S, SocketListener, SocketStream, yield_core
from kvcommons.transport.tcp import connect_stream, listen_on, open_stream

MAGIC = b"KVCX"
VERSION = 2
# magic, version, flags, bytes of the worker's address that follows
_GREETING = struct.Struct("<4sHHI")
_FLAG_UCX = 1
_HELLO = b"\0"
_ADDRESS_BYTES_MAX = 64 << 10
# What a started greeting may take, the first messages included.
_GREETING_S = 5.0
# One message; what is longer goes as several.
_MESSAGE_BYTES = 512 << 10
# For messages that were sent before the peer's end, and come after it on another socket.
_LAST_WORD_S = 0.05
# For UCX to take a connection down; a paused peer may keep it longer, on a thread of its own.
_CLOSE_S = 1.0
# Where the environment has no UCX_… of its own: large segments, and messages that go without asking the peer
# first, for two ends that both asked would wait for each other.
_DEFAULTS = {
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "256k",
    "RNDV_THRESH": "1m",
    "WARN_UNUSED_ENV_VARS": "n",
}
# At the start: importing ucxx sets some that nobody asked for, a small RNDV_THRESH for one.
_ASKED_FOR = frozenset(name for name in os.environ if name.startswith("UCX_"))


class UcxTransport:
    def connect(self, rest: str, limits: Limits, deadline: Deadline) -> Connection:
        address = f"ucx:{rest}"
        library()
        control = connect_stream(rest, address, deadline)
        try:
            return FramedConnection(_take_offer(control, deadline), address, limits)
        except BaseException:
            control.close()
            raise

    def listen(self, rest: str, limits: Limits) -> SocketListener:
        library()

        def open_offering(sock: socket.socket, peer: str) -> Stream:
            control = open_stream(sock, peer)
            return OfferingStream(control, _WorkerTerms(control))

        return listen_on(rest, "ucx", open_offering, limits)


class _WorkerTerms:
    """Offers a UCX worker."""

    def __init__(self, control: SocketStream) -> None:
        self._control = control
        self._offered: _Worker | None = None  # and not taken yet

    def offer(self) -> bool:
        self._offered = _Worker()
        send_greeting(self._control, self._offered.address, Deadline.after(0))
        return True

    def decline(self) -> None:
        send_greeting(self._control, b"", Deadline.after(0))

    def answered(self, deadline: Deadline) -> Stream | None:
        address = read_greeting(self._control, deadline.within(_GREETING_S))
        if not address or self._offered is None:
            self.close()
            return None
        worker, self._offered = self._offered, None
        return _meet(self._control, worker, address, deadline)

    def close(self) -> None:
        if self._offered is not None:
            self._offered.close([])
            self._offered = None


class _Worker:
    """A UCX worker with an endpoint to one other. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._api = api = library()
        options = {name: value for name, value in _DEFAULTS.items() if f"UCX_{name}" not in _ASKED_FOR}
        # Of its own: workers of several threads may share a context only where it was made for that
        # (`mt_workers_shared`), which the binding cannot say.
        self._context = api.UCXContext(options, (api.Feature.TAG, api.Feature.WAKEUP))
        self._worker = api.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._endpoint: Any = None
        self._tag = api.UCXXTag(1)
        self.address = bytes(self._worker.address)
        self.descriptor: int = self._worker.epoll_file_descriptor

    def join(self, address: bytes) -> None:
        """Raises DataLoss for what is no worker's address."""
        try:
            theirs = self._api.UCXAddress.create_from_buffer(address)
            # With error handling, so that UCX, too, notices a peer that was killed.
            self._endpoint = self._api.UCXEndpoint.create_from_worker_address(
                self._worker, theirs, endpoint_error_handling=True
            )
        except self._api.UCXError as error:
            raise DataLoss(f"UCX cannot use the peer's address: {error}") from error

    def send(self, view: memoryview) -> Any:
        """A request; the view must live and stay as it is until it has completed."""
        return self._endpoint.tag_send(_array(view), self._tag)

    def probe(self) -> Any | None:
        """A message that came, taken out of the queue."""
        found = self._worker.tag_probe(self._tag, remove=True)
        return found if found.matched else None

    def receive(self, message: Any, into: bytearray) -> Any:
        return self._endpoint.tag_recv_with_handle(_array(memoryview(into)[: message.length]), message)

    def progress(self) -> None:
        """Raises Unavailable."""
        try:
            while self._worker.progress_once():
                pass
        except self._api.UCXError as error:
            raise Unavailable(f"UCX failed: {error}") from error

    def arm(self) -> bool:
        """Whether nothing is left to do before the descriptor becomes readable."""
        return bool(self._worker.arm())

    def fails(self, request: Any) -> str:
        """What a completed request failed with; empty where it did not."""
        try:
            request.check_error()
        except self._api.UCXError as error:
            return str(error) or type(error).__name__
        return ""

    def close(self, requests: list[Any], *memory: object, connecting: bool = False) -> None:
        """UCX takes things down when the last reference goes, and may wait for the peer meanwhile; the
        requests' `memory` stays until then. `connecting`: no message has come yet."""

        def let_go() -> None:
            if connecting:
                self._await_failure()
            requests.extend([self._endpoint, self._worker, self._context, memory])
            self._endpoint = self._worker = self._context = None
            while requests:
                requests.pop(0)

        thread = threading.Thread(target=let_go, name="ucx-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _await_failure(self) -> None:
        """Of an endpoint that is not wanted any more. To close one that UCX still connects may end the
        process (`ucp_worker_discard_uct_ep` of UCX 1.21 reads a connection that UCX has freed), not so one
        that has failed; and it fails soon, for the peer gives its own end up."""
        deadline = Deadline.after(_GREETING_S)
        while self._endpoint is not None and self._endpoint.alive and not deadline.passed():
            with contextlib.suppress(Unavailable):
                self.progress()
            if self.arm():
                select.select([self.descriptor], [], [], min(deadline.left(), _LAST_WORD_S))


class UcxStream:
    """A Stream of tagged messages. Owns the worker and the socket beside it."""

    proven = True

    def __init__(self, control: SocketStream, worker: _Worker) -> None:
        self._control = control
        self._worker = worker
        self._poll = select.poll()
        self._poll.register(worker.descriptor, select.POLLIN)
        self._poll.register(control.sock, select.POLLIN)
        self._met = False
        self._ended = False
        self._aborted = False
        self._brief = True  # the wait before
        self._ask_s = ASK_S
        # A message is received here and copied out: into memory of the caller UCX might write even after he
        # gave up.
        self._box = bytearray(_MESSAGE_BYTES)
        self._rest = memoryview(b"")
        self._sending = bytearray()
        self._request: Any = None  # under way
        self._message: Any = None  # that came, and was not received yet

    def meet(self, deadline: Deadline) -> None:
        """Sends a first message and waits for the peer's: both endpoints stand then. Raises Unavailable."""
        self.send_some([memoryview(_HELLO)], deadline)
        if not self.receive_some([memoryview(bytearray(len(_HELLO)))], deadline):
            raise Unavailable(f"{self._control.peer} closed the connection")
        self._met = True

    def send_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        if self._aborted:
            raise Unavailable(f"the connection to {self._control.peer} was given up")
        # Copied too: whoever gives up before UCX is through may change his buffers.
        self._sending = message = bytearray()
        for view in views:
            message += view[: _MESSAGE_BYTES - len(message)]
            if len(message) == _MESSAGE_BYTES:
                break
        self._request = self._worker.send(memoryview(message))
        try:
            if not self._wait(self._finished, deadline, "to send to"):
                raise Unavailable(f"{self._control.peer} closed the connection")
            self._check()
        except Unavailable as error:
            raise SendBroken(error.message, sent_bytes=len(message)) from error
        return len(message)

    def receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        if not self._rest and not self._receive(deadline):
            return 0
        count = 0
        for view in views:
            part = min(view.nbytes, len(self._rest))
            view[:part] = self._rest[:part]
            self._rest = self._rest[part:]
            count += part
            if not self._rest:
                break
        return count

    def finish(self) -> None:
        try:
            self._worker.progress()
        except Unavailable:
            pass  # nothing more will be sent
        self._control.finish()

    def wait_readable(self, deadline: Deadline) -> bool:
        if self._rest or self._message is not None:
            return True
        try:
            self._wait(self._came, deadline, "for")
        except DeadlineExceeded:
            return False
        except Unavailable:
            self._ended = True
        return True

    def ask_for(self, ask_s: float) -> None:
        self._ask_s = ask_s

    def bare(self) -> Bare | None:
        return None

    def abort(self) -> None:
        self._aborted = True
        self._control.abort()

    def close(self) -> None:
        self._control.close()
        requests = [self._request, self._message]
        self._request = self._message = None
        self._worker.close(requests, self._sending, self._box, connecting=not self._met)

    def _came(self) -> bool:
        if self._message is None:
            self._message = self._worker.probe()
        return self._message is not None

    def _receive(self, deadline: Deadline) -> bool:
        """False: the peer's end."""
        if not self._wait(self._came, deadline, "for"):
            return False
        size = self._message.length
        if size > _MESSAGE_BYTES:
            raise TooLarge(f"{self._control.peer} sent {size} bytes in a message of {_MESSAGE_BYTES}")
        self._request = self._worker.receive(self._message, self._box)
        self._message = None
        if not self._wait(self._finished, deadline, "for"):
            return False
        self._check()
        self._rest = memoryview(self._box)[:size]
        return True

    def _finished(self) -> bool:
        return bool(self._request.completed)

    def _check(self) -> None:
        request, self._request = self._request, None
        failure = self._worker.fails(request)
        if failure:
            raise Unavailable(f"{self._control.peer} went away: {failure}")

    def _wait(self, done: Callable[[], bool], deadline: Deadline, why: str) -> bool:
        """False: the peer's end."""
        started_s = time.monotonic()
        # As sockets do: see wait_readable there.
        asks_until_s = started_s + self._ask_s if self._brief and deadline.left() > self._ask_s else 0.0
        while True:
            if self._aborted:
                raise Unavailable(f"the connection to {self._control.peer} was given up")
            self._worker.progress()
            if done():
                self._brief = time.monotonic() - started_s < 1.5 * self._ask_s
                return True
            if self._ended:
                return False
            if time.monotonic() < asks_until_s:
                yield_core()
                continue
            if not self._worker.arm():
                continue
            ready = self._poll.poll(deadline.left() * 1000)
            if not ready:
                raise self._control.waited(why)
            if any(descriptor != self._worker.descriptor for descriptor, _ in ready):
                self._ended = True
                return self._wait_last(done)

    def _wait_last(self, done: Callable[[], bool]) -> bool:
        deadline = Deadline.after(_LAST_WORD_S)
        while True:
            self._worker.progress()
            if done():
                return True
            if deadline.passed():
                return False
            if self._worker.arm():
                select.select([self._worker.descriptor], [], [], deadline.left())


def _take_offer(control: SocketStream, deadline: Deadline) -> Stream:
    address = read_greeting(control, deadline)
    if not address:
        return control
    worker = _Worker()
    try:
        send_greeting(control, worker.address, deadline)
    except BaseException:
        worker.close([])
        raise
    return _meet(control, worker, address, deadline)


def _meet(control: SocketStream, worker: _Worker, address: bytes, deadline: Deadline) -> UcxStream:
    """A stream between this worker and the one of that address, once messages come and go."""
    stream = UcxStream(control, worker)
    try:
        worker.join(address)
        stream.meet(deadline.within(_GREETING_S))
    except BaseException:
        stream.close()
        raise
    return stream


def send_greeting(control: SocketStream, address: bytes, deadline: Deadline) -> None:
    greeting = memoryview(_GREETING.pack(MAGIC, VERSION, _FLAG_UCX if address else 0, len(address)) + address)
    while greeting:
        greeting = greeting[control.send_some([greeting], deadline) :]


def read_greeting(control: SocketStream, deadline: Deadline) -> bytes:
    """The address of the peer's worker; empty where it offers none. Raises DataLoss for what is no greeting
    of this version."""
    # What is no greeting may be shorter than one: its beginning tells.
    start = _read(control, len(MAGIC), deadline)
    if start != MAGIC:
        raise DataLoss(f"not a greeting of UCX: {control.peer} begins with {start!r}; do both ends say ucx:?")
    _, version, flags, size = _GREETING.unpack(start + _read(control, _GREETING.size - len(MAGIC), deadline))
    if version != VERSION or flags & ~_FLAG_UCX or bool(flags) != bool(size) or size > _ADDRESS_BYTES_MAX:
        raise DataLoss(
            f"UCX greeting of version {version}, flags {flags}; this build speaks {VERSION}: run one version"
        )
    return _read(control, size, deadline)


def _read(control: SocketStream, size: int, deadline: Deadline) -> bytes:
    got = bytearray(size)
    view = memoryview(got)
    while view:
        count = control.receive_some([view], deadline)
        if not count:
            raise Unavailable(f"{control.peer} closed the connection")
        view = view[count:]
    return bytes(got)


def library() -> Any:
    """The binding. Raises UnsupportedParameter where the package is missing."""
    try:
        import ucxx._lib.libucxx as api
    except ImportError as error:
        raise UnsupportedParameter(
            "addresses of ucx: need the package ucxx: pip install 'kvcommons[ucx]' (Linux), or use tcp:"
        ) from error
    return api


def _array(view: memoryview) -> Any:
    import numpy as np
    from ucxx._lib.arr import Array

    return Array(np.frombuffer(view, dtype=np.uint8))
