"""Shared memory, on one host: "shm:/path", a Unix socket whose connections carry their bytes in rings.

The accepting side offers memory, the connecting side takes it or declines; without memory (the system gives
none, or the peer cannot map it) the frames go over the socket itself. docs/formats/shared-memory.md is the
page of the bytes."""

from __future__ import annotations

import logging
import os
import socket
import struct

from kvcommons.errors import DataLoss, InvalidInput, Unavailable
from kvcommons.transport import rings
from kvcommons.transport.base import Connection, Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection, Stream
from kvcommons.transport.offering import OfferingStream
from kvcommons.transport.rings import RingMemory, RingStream
from kvcommons.transport.sockets import SocketListener, SocketStream
from kvcommons.transport.unix import connect_stream, listen_on, open_stream

_LOG = logging.getLogger(__name__)

MAGIC = b"KVCM"
VERSION = 1
# magic, version, flags, bytes of each ring
_GREETING = struct.Struct("<4sHHQ")
GREETING_BYTES = _GREETING.size
_FLAG_RINGS = 1


class SharedTransport:
    def __init__(self, ring_bytes: int = rings.RING_BYTES) -> None:
        """`ring_bytes` of each direction of a connection, for a listener; 0 offers none, and whoever connects
        declines what is offered: its frames go over the socket itself."""
        self._ring_bytes = ring_bytes

    def connect(self, rest: str, limits: Limits, deadline: Deadline) -> Connection:
        address = f"shm:{rest}"
        stream = connect_stream(rest, address, deadline)
        try:
            wanted = bool(self._ring_bytes)
            return FramedConnection(take_offer(stream, deadline, wanted=wanted), address, limits)
        except BaseException:
            stream.close()
            raise

    def listen(self, rest: str, limits: Limits) -> SocketListener:
        if self._ring_bytes and not rings.is_ring_size(self._ring_bytes):
            raise InvalidInput(
                f"rings of {self._ring_bytes} bytes: choose whole pages from {rings.RING_BYTES_MIN} to"
                f" {rings.RING_BYTES_MAX}, or 0 for none",
                param="data_ring_bytes",
            )

        def open_offering(sock: socket.socket, peer: str) -> Stream:
            plain = open_stream(sock, peer)
            return OfferingStream(plain, RingTerms(plain, self._ring_bytes))

        return listen_on(rest, f"shm:{rest}", open_offering, limits)


class RingTerms:
    """Offers memory for two rings of `ring_bytes` (0: none)."""

    def __init__(self, plain: SocketStream, ring_bytes: int) -> None:
        self._plain = plain
        self._ring_bytes = ring_bytes
        self._offered: RingMemory | None = None  # and not taken yet

    def offer(self) -> bool:
        descriptor = self._create()
        if descriptor is None:
            self.decline()
            return False
        try:
            self._greet(_FLAG_RINGS, self._ring_bytes, [descriptor])
        except OSError as error:
            raise self._plain.gone(error) from error
        finally:
            os.close(descriptor)
        return True

    def decline(self) -> None:
        try:
            self._greet(0, 0, [])
        except OSError as error:
            raise self._plain.gone(error) from error

    def answered(self, deadline: Deadline) -> Stream | None:
        answer = bytearray(GREETING_BYTES)
        count = self._plain.receive_some([memoryview(answer)], deadline)
        if not count:
            raise Unavailable(f"{self._plain.peer} closed the connection")
        if not _read_greeting(answer[:count], self._plain.peer) or self._offered is None:
            self.close()
            return None
        memory, self._offered = self._offered, None
        return RingStream(self._plain, memory, connecting=False)

    def close(self) -> None:
        if self._offered is not None:
            self._offered.close()
            self._offered = None

    def _create(self) -> int | None:
        if not self._ring_bytes:
            return None
        try:
            descriptor = rings.create(self._ring_bytes)
        except OSError as error:
            _LOG.warning("no shared memory for a %s: %s", self._plain.peer, error.strerror)
            return None
        self._offered = _map(descriptor, self._ring_bytes, self._plain.peer)
        if self._offered is None:
            os.close(descriptor)
            return None
        return descriptor

    def _greet(self, flags: int, ring_bytes: int, descriptors: list[int]) -> None:
        # It fits into any socket's buffer: no waiting here.
        socket.send_fds(self._plain.sock, [_GREETING.pack(MAGIC, VERSION, flags, ring_bytes)], descriptors)


def take_offer(stream: SocketStream, deadline: Deadline, *, wanted: bool = True) -> Stream:
    """The connecting side's Stream, once the other side has made its offer: where it is not `wanted`, the
    socket's own. Raises DataLoss for one that is
    wrong; the socket then stays the caller's."""
    stream.wait_to_receive(deadline)
    descriptors: list[int] = []
    try:
        # Close-on-exec, or a process that another thread starts in this moment would keep it.
        greeting, descriptors, _, _ = socket.recv_fds(
            stream.sock, GREETING_BYTES, 1, flags=socket.MSG_CMSG_CLOEXEC
        )
        if not greeting:
            raise Unavailable(f"{stream.peer} closed the connection")
        ring_bytes = _read_greeting(greeting, stream.peer)
        if not ring_bytes:
            return stream
        if not descriptors:
            raise DataLoss(f"{stream.peer} offered shared memory without its descriptor")
        rings.check(descriptors[0], ring_bytes)
        memory = _map(descriptors[0], ring_bytes, stream.peer) if wanted else None
    except OSError as error:
        raise stream.gone(error) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    answer = (_FLAG_RINGS, ring_bytes) if memory else (0, 0)
    stream.send_some([memoryview(_GREETING.pack(MAGIC, VERSION, *answer))], deadline)
    return RingStream(stream, memory, connecting=True) if memory else stream


def _map(descriptor: int, ring_bytes: int, peer: str) -> RingMemory | None:
    try:
        return RingMemory(descriptor, ring_bytes)
    except OSError as error:
        _LOG.warning("cannot map shared memory with %s: %s", peer, error.strerror)
        return None


def _read_greeting(greeting: bytes | bytearray, peer: str) -> int:
    """Bytes of a ring; 0: no rings. Raises DataLoss for what is no greeting of this version."""
    if len(greeting) != GREETING_BYTES or not greeting.startswith(MAGIC):
        raise DataLoss(
            f"not a greeting of shared memory: {peer} begins with {bytes(greeting[:4])!r}; do both ends say"
            " shm:?"
        )
    _, version, flags, ring_bytes = _GREETING.unpack(greeting)
    if version != VERSION or flags & ~_FLAG_RINGS or bool(flags) != bool(ring_bytes):
        raise DataLoss(
            f"shared memory of version {version}, flags {flags}; this build speaks {VERSION}: run one version"
        )
    return int(ring_bytes)
