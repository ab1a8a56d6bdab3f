"""Frames over a socket: what is received ahead belongs to whoever takes it next."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvcommons.errors import TooLarge, Unavailable
from kvcommons.transport.base import Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection
from kvcommons.transport.sockets import SocketStream


class Counted(SocketStream):
    """Counts receptions that brought something."""

    received = 0

    def receive_some(self, views: Sequence[memoryview], deadline: Deadline) -> int:
        count = super().receive_some(views, deadline)
        self.received += 1
        return count


def soon() -> Deadline:
    return Deadline.after(5)


@pytest.fixture
def pair() -> Iterator[tuple[FramedConnection, FramedConnection, Counted]]:
    left, right = socket.socketpair()
    stream = Counted(right, "left")
    sender = FramedConnection(SocketStream(left, "right"), "right", Limits())
    receiver = FramedConnection(stream, "left", Limits())
    yield sender, receiver, stream
    sender.close()
    receiver.close()


def test_a_small_frame_is_received_at_once(
    pair: tuple[FramedConnection, FramedConnection, Counted],
) -> None:
    sender, receiver, stream = pair
    sender.send(b"head", [b"pay", b"load"], soon())
    into = bytearray(7)
    assert receiver.receive_head(soon()) == (b"head", 7)
    receiver.receive_payload([memoryview(into)[:2], memoryview(into)[2:]], soon())
    assert (bytes(into), receiver.unread_bytes, stream.received) == (b"payload", 0, 1)
    assert not receiver.wait_readable(Deadline.after(0))


@pytest.mark.parametrize("head", [0, 5, 20_000])
@pytest.mark.parametrize("payload", [0, 1, 16_000, 1 << 20])
def test_frames_that_wait_together_stay_apart(
    pair: tuple[FramedConnection, FramedConnection, Counted], head: int, payload: int
) -> None:
    """Of any size, whether their payload is taken or thrown away."""
    sender, receiver, _ = pair
    heads = [bytes([number]) * head for number in range(4)]
    payloads = [bytes([100 + number]) * payload for number in range(4)]

    def send() -> None:
        for one, body in zip(heads, payloads, strict=True):
            sender.send(one, [body], soon())

    thread = threading.Thread(target=send)
    thread.start()
    for number in range(4):
        assert receiver.wait_readable(soon())
        assert receiver.receive_head(soon()) == (heads[number], payload)
        if number == 1:
            receiver.drain(soon())
        else:
            into = bytearray(payload)
            receiver.receive_payload([into], soon())
            assert into == payloads[number]
        assert receiver.unread_bytes == 0
    thread.join()
    assert not receiver.wait_readable(Deadline.after(0))


def test_the_end_comes_after_what_was_received_ahead(
    pair: tuple[FramedConnection, FramedConnection, Counted],
) -> None:
    sender, receiver, _ = pair
    sender.send(b"one", [b"1"], soon())
    sender.send(b"two", [], soon())
    sender.close()
    assert receiver.receive_head(soon()) == (b"one", 1)
    receiver.drain(soon())
    assert receiver.receive_head(soon()) == (b"two", 0)
    with pytest.raises(Unavailable):
        receiver.receive_head(soon())


def test_a_head_over_the_limit_is_refused_before_it_has_come() -> None:
    left, right = socket.socketpair()
    sender = FramedConnection(SocketStream(left, "right"), "right", Limits())
    receiver = FramedConnection(SocketStream(right, "left"), "left", Limits(head_bytes=100))
    sender.send(bytes(101), [], soon())
    with pytest.raises(TooLarge):
        receiver.receive_head(soon())
    sender.close()
    receiver.close()
