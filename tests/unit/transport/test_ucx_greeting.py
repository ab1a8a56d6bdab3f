"""What both sides of a ucx: address say first, which needs no UCX."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.errors import DataLoss, DeadlineExceeded, Unavailable
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.sockets import SocketStream
from kvcommons.transport.ucx import read_greeting, send_greeting

GOLDEN = Path(__file__).parents[2] / "golden/ucx-greeting.bin"


@pytest.fixture
def ends() -> Iterator[tuple[SocketStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours, "peer")
    yield stream, theirs
    stream.close()
    theirs.close()


def test_greetings_have_the_documented_bytes(ends: tuple[SocketStream, socket.socket]) -> None:
    stream, theirs = ends
    for address in (b"", b"address"):
        send_greeting(stream, address, Deadline.after(5))
    assert theirs.recv(1000) == GOLDEN.read_bytes()
    theirs.sendall(GOLDEN.read_bytes())
    assert [read_greeting(stream, Deadline.after(5)) for _ in range(2)] == [b"", b"address"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"HTTP/1.1 400 Bad", "begins with b'HTTP'"),
        (struct.pack("<4sHHI", b"KVCX", 1, 1, 7), "version 1"),
        (struct.pack("<4sHHI", b"KVCX", 2, 2, 7), "flags 2"),
        (struct.pack("<4sHHI", b"KVCX", 2, 1, 0), "run one version"),
        (struct.pack("<4sHHI", b"KVCX", 2, 1, 1 << 20), "run one version"),
    ],
)
def test_what_is_no_greeting_is_refused(
    ends: tuple[SocketStream, socket.socket], said: bytes, message: str
) -> None:
    stream, theirs = ends
    theirs.sendall(said)
    with pytest.raises(DataLoss, match=message):
        read_greeting(stream, Deadline.after(5))


def test_half_a_greeting_costs_the_deadline_and_the_end_is_an_error(
    ends: tuple[SocketStream, socket.socket],
) -> None:
    stream, theirs = ends
    theirs.sendall(GOLDEN.read_bytes()[:9])
    with pytest.raises(DeadlineExceeded):
        read_greeting(stream, Deadline.after(0.02))
    theirs.sendall(b"KVCX")
    theirs.close()
    with pytest.raises(Unavailable, match="closed the connection"):
        read_greeting(stream, Deadline.after(5))
