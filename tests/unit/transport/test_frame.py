"""The frame's bytes, and deadlines."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from kvcommons.errors import DataLoss, DeadlineExceeded, TooLarge
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport import frame
from kvcommons.transport.base import Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection
from kvcommons.transport.sockets import SocketStream

GOLDEN = Path(__file__).parents[2] / "golden/data-frame.bin"


def test_a_frame_has_the_documented_bytes() -> None:
    ours, theirs = socket.socketpair()
    connection = FramedConnection(SocketStream(ours, "peer"), "peer", Limits())
    blocks = pb.WriteBlocks(handle=5, epoch=2**63, layer=3, first_block=1, blocks=2)
    head = pb.DataRequest(deadline_ms=1500, write_blocks=blocks).SerializeToString(deterministic=True)
    connection.send(head, [b"\x00\x01\x02", b"", bytearray(b"\xfd\xfe\xff")], Deadline.after(5))
    connection.close()
    with theirs, theirs.makefile("rb") as stream:
        assert stream.read() == GOLDEN.read_bytes()


def test_the_golden_frame_is_read() -> None:
    header = GOLDEN.read_bytes()[: frame.HEADER_BYTES]
    head_bytes, payload_bytes, last, layer = frame.unpack(header, Limits())
    assert not last
    assert not layer
    assert frame.HEADER_BYTES + head_bytes + payload_bytes == GOLDEN.stat().st_size
    head = GOLDEN.read_bytes()[frame.HEADER_BYTES :][:head_bytes]
    assert pb.DataRequest.FromString(head).write_blocks.epoch == 2**63


@pytest.mark.parametrize(("at", "message"), [(0, "not a data frame"), (4, "version"), (6, "version")])
def test_another_header_is_refused(at: int, message: str) -> None:
    header = bytearray(frame.pack(1, 2, Limits()))
    header[at] ^= 0x10
    with pytest.raises(DataLoss, match=message):
        frame.unpack(header, Limits())


def test_limits_are_the_last_size_that_passes() -> None:
    limits = Limits(head_bytes=10, payload_bytes=20)
    assert frame.unpack(frame.pack(10, 20, limits), limits) == (10, 20, False, False)
    assert frame.unpack(frame.pack(0, 0, limits, last=True), limits) == (0, 0, True, False)
    assert frame.unpack(frame.pack(0, 0, limits, layer=True), limits).layer
    with pytest.raises(TooLarge, match="head of 11"):
        frame.pack(11, 0, limits)
    with pytest.raises(TooLarge, match="payload of 21"):
        frame.unpack(frame.pack(0, 21, Limits()), limits)


def test_a_deadline_runs_down_and_is_never_below_zero() -> None:
    deadline = Deadline(time.monotonic() - 1)
    assert (deadline.left(), deadline.left_ms(), deadline.passed()) == (0.0, 0, True)
    with pytest.raises(DeadlineExceeded, match="reading did not finish"):
        deadline.check("reading")
    later = Deadline.after(100)
    later.check()
    assert 99 < later.left() <= 100
    assert later.within(1).left() <= 1
    assert later.within(1000).left() <= 100
    assert Deadline.after(1e12).left_ms() == 2**32 - 1
