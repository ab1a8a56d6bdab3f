"""A layer's frames, byte by byte."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvcommons.errors import DataLoss, KVCommonsError, UnsupportedParameter
from kvcommons.holder.layer_head import LayerHead, LayerReply
from kvcommons.transport.base import Limits
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection
from kvcommons.transport.sockets import SocketStream

GOLDEN = Path(__file__).parents[2] / "golden/attention-layer.bin"
HEAD = LayerHead(layer=31, plan=7, revision=2, step=1000, deadline_ms=5000, queries=2, appended=1)
REPLY = LayerReply(layer=31, plan=7, step=1000, queued_us=12, computed_us=345, lost=1)


def test_frames_have_the_documented_bytes() -> None:
    """A layer and its answer, one behind the other."""
    ours, theirs = socket.socketpair()
    connection = FramedConnection(SocketStream(ours, "peer"), "peer", Limits())
    connection.send(HEAD.pack(), [bytes(range(16)), b"kv"], Deadline.after(5), layer=True)
    connection.send(REPLY.pack(), [bytes(range(24))], Deadline.after(5), layer=True)
    connection.close()
    with theirs, theirs.makefile("rb") as stream:
        assert stream.read() == GOLDEN.read_bytes()


def test_the_golden_frames_are_read() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(GOLDEN.read_bytes())
    ours.close()
    connection = FramedConnection(SocketStream(theirs, "peer"), "peer", Limits())
    for expected, payload_bytes in ((HEAD, 18), (REPLY, 24)):
        head, size = connection.receive_head(Deadline.after(5))
        assert (connection.layer_head, size) == (True, payload_bytes)
        assert type(expected).unpack(head) == expected
        connection.drain(Deadline.after(5))
    connection.close()


@pytest.mark.parametrize("head", [HEAD, REPLY])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda head: b"\x02\x00" + head[2:], UnsupportedParameter, "head of version 2; this build speaks 1"),
        (lambda head: head[:1], UnsupportedParameter, "version"),
        (lambda head: head[:-1], DataLoss, "bytes, not"),
        (lambda head: head + b"x", DataLoss, "bytes, not"),
    ],
)
def test_another_head_is_refused_by_name(
    head: LayerHead | LayerReply, change: object, error: type[KVCommonsError], words: str
) -> None:
    assert callable(change)
    with pytest.raises(error, match=words):
        type(head).unpack(change(head.pack()))


def test_what_is_not_known_yet_is_refused() -> None:
    with pytest.raises(DataLoss, match="where 0 belongs"):
        LayerHead.unpack(HEAD.pack()[:-1] + b"\x01")
