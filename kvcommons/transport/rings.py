"""Two rings of shared memory as a Stream, and a Unix socket as their doorbell.

Each direction has a ring that one process fills and the other empties. How far they are is not written into
the memory: a doorbell on the socket says how many bytes were put into the sender's ring, and how many were
taken out of the other one. So the socket orders what the memory shows, a wait is a poll, a peer's death is
the socket's end, and there is no offset in memory that a peer could get wrong. docs/formats/shared-memory.md
is the page of the bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence

from kvcommons.errors import DataLoss, KVCommonsError, Unavailable
from kvcommons.transport.base import Bare
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.sockets import SocketStream

# So much of a frame goes out without waiting for the peer. Memory is taken when it is first written.
RING_BYTES = 4 << 20
RING_BYTES_MIN = 64 << 10
RING_BYTES_MAX = 256 << 20
# Bytes put into the sender's ring, bytes taken out of the receiver's ring, since the doorbell before. A bit
# of the former says that they begin at the start of the ring.
_BELL = struct.Struct("<II")
_FROM_START = 1 << 31
_BELLS_BYTES = 512 * _BELL.size
# Copied between two doorbells: small enough that both ends copy at the same time.
_PIECE_BYTES = 256 << 10
# A copy of so much lets other threads run.
_UNLOCKED_BYTES = 64 << 10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RingMemory:
    """The memory of one connection: the ring that the connecting side fills, then the one that the accepting
    side fills. It belongs to no file system, and goes with the last process that has it mapped."""

    def __init__(self, descriptor: int, ring_bytes: int) -> None:
        """Maps it; the descriptor stays the caller's. Raises OSError where that fails."""
        self.ring_bytes = ring_bytes
        self._map = mmap.mmap(descriptor, 2 * ring_bytes)
        self._view = memoryview(self._map)

    def ring(self, number: int) -> memoryview:
        return self._view[number * self.ring_bytes : (number + 1) * self.ring_bytes]

    def close(self) -> None:
        """After the rings' views were released."""
        self._view.release()
        self._map.close()


def create(ring_bytes: int) -> int:
    """A descriptor of memory for two rings, of a size that nobody can change: a peer that cut it off would
    kill this process. Raises OSError where the system does not give it."""
    descriptor = os.memfd_create("kvcommons-rings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 2 * ring_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check(descriptor: int, ring_bytes: int) -> None:
    """Raises DataLoss for a descriptor of anything but what `create` makes."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise DataLoss("the peer offered a descriptor that is no shared memory") from error
    size = os.fstat(descriptor).st_size
    if seals & _SEALS != _SEALS or size != 2 * ring_bytes or not is_ring_size(ring_bytes):
        raise DataLoss(f"the peer offered shared memory of {size} bytes for two rings of {ring_bytes}")


def is_ring_size(ring_bytes: int) -> bool:
    return RING_BYTES_MIN <= ring_bytes <= RING_BYTES_MAX and ring_bytes % mmap.PAGESIZE == 0


class RingStream:
    """A Stream over the rings. Owns the memory and the socket."""

    proven = True

    def __init__(self, bell: SocketStream, memory: RingMemory, *, connecting: bool) -> None:
        self._bell = bell
        self._memory = memory
        self._size = memory.ring_bytes
        self._out = memory.ring(0 if connecting else 1)
        self._out_at = 0
        self._out_free = self._size
        self._in = memory.ring(1 if connecting else 0)
        self._in_at = 0
        self._in_ready = 0
        self._in_unacknowledged = 0  # that the peer has not been told of
        self._piece = min(_PIECE_BYTES, self._size // 4)
        self._ended = False
        self._failure: KVCommonsError | None = None
        self._bells = bytearray(_BELLS_BYTES)

    def send_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        if self._failure:
            raise self._failure
        while not self._out_free:
            if self._ended:
                raise Unavailable(f"{self._bell.peer} closed the connection")
            self._listen(deadline, "to send to")
        start = self._out_free == self._size
        if start:
            self._out_at = 0  # what is small stays in the caches, and takes little memory
        most, count = min(self._out_free, self._piece), 0
        for view in views:
            count += self._put(view[: most - count])
            if count == most:
                break
        self._out_free -= count
        self._ring(count | _FROM_START if start else count, deadline)
        return count

    def receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        if self._failure:
            raise self._failure
        while not self._in_ready:
            if self._ended:
                return 0
            self._listen(deadline, "for")
        most, count = min(self._in_ready, self._piece), 0
        for view in views:
            count += self._take(view[: most - count])
            if count == most:
                break
        self._in_ready -= count
        self._in_unacknowledged += count
        # Less than that the peer can do without: as long as nothing is ready here, more than half is free.
        if self._in_unacknowledged >= self._size // 2:
            try:
                self._ring(0, deadline)
            except Unavailable:
                pass  # it has left, and what it wrote before is still to be read
        return count

    def finish(self) -> None:
        self._bell.finish()

    def wait_readable(self, deadline: Deadline) -> bool:
        while not (self._in_ready or self._ended or self._failure):
            if not self._bell.wait_readable(deadline):
                return False
            try:
                self._hear()
            except KVCommonsError as error:
                self._failure = error  # for whoever receives
        return True

    def ask_for(self, ask_s: float) -> None:
        self._bell.ask_for(ask_s)

    def bare(self) -> Bare | None:
        return None  # the socket carries doorbells

    def abort(self) -> None:
        self._bell.abort()

    def close(self) -> None:
        self._bell.close()
        self._out.release()
        self._in.release()
        self._memory.close()

    def _put(self, view: memoryview) -> int:
        at, size = self._out_at, view.nbytes
        if at + size <= self._size:
            _copy(self._out[at : at + size], view)
        else:
            first = self._size - at
            _copy(self._out[at:], view[:first])
            _copy(self._out[: size - first], view[first:])
        self._out_at = (at + size) % self._size
        return size

    def _take(self, view: memoryview) -> int:
        at, size = self._in_at, view.nbytes
        if at + size <= self._size:
            _copy(view, self._in[at : at + size])
        else:
            first = self._size - at
            _copy(view[:first], self._in[at:])
            _copy(view[first:], self._in[: size - first])
        self._in_at = (at + size) % self._size
        return size

    def _ring(self, written: int, deadline: Deadline) -> None:
        sent = self._bell.send_some((_BELL.pack(written, self._in_unacknowledged),), deadline)
        if sent != _BELL.size:
            raise Unavailable(f"{self._bell.peer} took half a doorbell")  # no Unix socket splits so little
        self._in_unacknowledged = 0

    def _listen(self, deadline: Deadline, why: str) -> None:
        while not self._hear():
            self._bell.wait_to_receive(deadline, why)

    def _hear(self) -> bool:
        """Takes the doorbells that are there, or the peer's end; whether there was any of these."""
        try:
            count = self._bell.sock.recv_into(self._bells)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._bell.gone(error) from error
        if count == _BELL.size:
            self._heard(*_BELL.unpack_from(self._bells))
        elif not count:
            self._ended = True
        elif count % _BELL.size:
            raise DataLoss(f"{self._bell.peer} sent half a doorbell")
        else:
            for written, consumed in _BELL.iter_unpack(memoryview(self._bells)[:count]):
                self._heard(written, consumed)
        return True

    def _heard(self, written: int, consumed: int) -> None:
        if written & _FROM_START:
            if self._in_ready:
                raise DataLoss(f"{self._bell.peer} began its ring again before it was empty")
            self._in_at = 0
            written &= ~_FROM_START
        self._in_ready += written
        self._out_free += consumed
        if self._in_ready + self._in_unacknowledged > self._size or self._out_free > self._size:
            raise DataLoss(f"{self._bell.peer} rang for more than a ring of {self._size} bytes holds")


def _copy(into: memoryview, source: memoryview) -> None:
    """Without the interpreter's lock where it takes a while; of read-only memory Python tells no address."""
    size = into.nbytes
    if size < _UNLOCKED_BYTES or source.readonly:
        into[:] = source
        return
    ctypes.memmove(_address(into), _address(source), size)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
