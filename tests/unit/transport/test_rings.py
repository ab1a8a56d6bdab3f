"""Shared memory: what comes out of the rings is what went in, and peers that lie about them are refused."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, Unavailable
from kvcommons.transport import rings
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.offering import OfferingStream
from kvcommons.transport.rings import RingMemory, RingStream
from kvcommons.transport.shared import RingTerms, take_offer
from kvcommons.transport.sockets import SocketStream

GOLDEN = Path(__file__).parents[2] / "golden"
SIZE = rings.RING_BYTES_MIN


def soon() -> Deadline:
    return Deadline.after(10)


def bell(written: int, taken: int) -> bytes:
    return struct.pack("<II", written, taken)


@pytest.fixture
def pair() -> Iterator[tuple[RingStream, RingStream]]:
    """The connecting and the accepting end."""
    descriptor = rings.create(SIZE)
    ours, theirs = socket.socketpair()
    left = RingStream(SocketStream(ours, "right"), RingMemory(descriptor, SIZE), connecting=True)
    right = RingStream(SocketStream(theirs, "left"), RingMemory(descriptor, SIZE), connecting=False)
    os.close(descriptor)
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def liar() -> Iterator[tuple[RingStream, socket.socket]]:
    """An end, and the other one's socket."""
    descriptor = rings.create(SIZE)
    ours, theirs = socket.socketpair()
    stream = RingStream(SocketStream(ours, "liar"), RingMemory(descriptor, SIZE), connecting=True)
    os.close(descriptor)
    yield stream, theirs
    stream.close()
    theirs.close()


def send(stream: RingStream, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.send_some([view], soon()) :]


def receive(stream: RingStream, size: int, sizes: random.Random) -> bytes:
    got = bytearray()
    while len(got) < size:
        parts = [bytearray(min(size - len(got), sizes.choice((1, 19, 4096, 30000, 200_000))))]
        count = stream.receive_some([memoryview(part) for part in parts], soon())
        assert count
        got += b"".join(parts)[:count]
    return bytes(got)


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_all_sizes_arrive_in_order_both_ways(
    pair: tuple[RingStream, RingStream], seed: int
) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice((1, 20, 1000, SIZE // 2, SIZE - 1, SIZE, 3 * SIZE + 5)) for _ in range(60)]
    messages = [chance.randbytes(size) for size in sizes]
    wrong: list[object] = []

    def echo() -> None:
        try:
            theirs = random.Random(seed + 100)
            for message in messages:
                send(pair[1], receive(pair[1], len(message), theirs))
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=echo)
    thread.start()
    for message in messages:
        send(pair[0], message)
        assert receive(pair[0], len(message), chance) == message
    thread.join(20)
    assert not wrong


def test_a_full_ring_waits_and_what_is_taken_makes_room(pair: tuple[RingStream, RingStream]) -> None:
    left, right = pair
    send(left, bytes(SIZE))
    with pytest.raises(DeadlineExceeded, match="slow, paused or unreachable"):
        left.send_some([memoryview(b"x")], Deadline.after(0.01))
    receive(right, SIZE, random.Random(1))
    assert left.send_some([memoryview(b"x")], soon()) == 1


def test_room_that_is_made_is_nothing_to_read(pair: tuple[RingStream, RingStream]) -> None:
    left, right = pair
    send(left, bytes(SIZE))
    receive(right, SIZE, random.Random(1))
    assert not left.wait_readable(Deadline.after(0))
    send(right, b"x")
    assert left.wait_readable(soon())


def test_what_a_peer_wrote_before_it_left_is_read(pair: tuple[RingStream, RingStream]) -> None:
    left, right = pair
    send(left, b"last words")
    left.close()
    assert right.wait_readable(soon())
    assert receive(right, 10, random.Random(1)) == b"last words"
    assert right.receive_some([memoryview(bytearray(1))], soon()) == 0
    with pytest.raises(Unavailable, match="went away"):
        right.send_some([memoryview(b"x")], soon())


@pytest.mark.parametrize(
    ("rung", "message"),
    [
        (bell(SIZE + 1, 0), "more than a ring"),
        (bell(0, 1), "more than a ring"),
        (bell(5, 0) + bell(1 << 31 | 5, 0), "before it was empty"),
        (bell(1 << 31 | 2**31 - 1, 2**32 - 1), "more than a ring"),
        (b"\x01", "half a doorbell"),
    ],
)
def test_a_doorbell_that_cannot_be_is_refused(
    liar: tuple[RingStream, socket.socket], rung: bytes, message: str
) -> None:
    stream, theirs = liar
    theirs.sendall(rung)
    assert stream.wait_readable(soon())  # and what is wrong is told to whoever reads
    with pytest.raises(DataLoss, match=message):
        stream.receive_some([memoryview(bytearray(SIZE))], soon())


def _unsealed() -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * SIZE)
    return descriptor


@pytest.mark.parametrize(
    ("make", "ring_bytes"),
    [
        (_unsealed, SIZE),
        (lambda: os.open("/dev/null", os.O_RDWR), SIZE),
        (lambda: rings.create(2 * SIZE), SIZE),
        (lambda: rings.create(SIZE + 512), SIZE + 512),
    ],
)
def test_memory_that_could_shrink_or_has_another_size_is_refused(
    make: Callable[[], int], ring_bytes: int
) -> None:
    descriptor = make()
    try:
        with pytest.raises(DataLoss, match="shared memory"):
            rings.check(descriptor, ring_bytes)
    finally:
        os.close(descriptor)


def test_no_peer_can_cut_the_memory_off() -> None:
    descriptor = rings.create(SIZE)
    rings.check(descriptor, SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_the_end_is_an_error_while_sending(liar: tuple[RingStream, socket.socket]) -> None:
    stream, theirs = liar
    send(stream, bytes(SIZE))
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(KVCommonsError, match="closed the connection"):
        stream.send_some([memoryview(b"x")], soon())


def test_greetings_and_doorbells_have_the_documented_bytes() -> None:
    frame = (GOLDEN / "data-frame.bin").read_bytes()
    ours, near = socket.socketpair()
    far, theirs = socket.socketpair()
    plain = SocketStream(ours, "near")
    accepting = OfferingStream(plain, RingTerms(plain, rings.RING_BYTES))
    assert not accepting.wait_readable(Deadline.after(0))
    offer, descriptors, _, _ = socket.recv_fds(near, 16, 1)
    socket.send_fds(far, [offer], descriptors)
    os.close(descriptors[0])
    connecting = take_offer(SocketStream(theirs, "far"), soon())
    answer = far.recv(16)
    assert connecting.send_some([memoryview(frame)], soon()) == len(frame)
    asked = far.recv(8)
    near.sendall(answer + asked)
    got = bytearray(len(frame))
    assert accepting.receive_some([memoryview(got)], soon()) == len(frame)
    assert got == frame
    accepting.send_some([memoryview(b"x")], soon())
    assert offer + answer + asked + near.recv(8) == (GOLDEN / "shared-memory.bin").read_bytes()
    for end in (accepting, connecting, near, far):
        end.close()
