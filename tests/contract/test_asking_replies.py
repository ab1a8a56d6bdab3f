"""What is sent without the interpreter is what Python sends, and every answer that a peer may give is
understood as Python understands it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcommons.attention.memory import byte_view
from kvcommons.attention.partial import Partial
from kvcommons.errors import DataLoss, DeadlineExceeded, KVCommonsError, StaleEpoch, Unavailable
from kvcommons.holder.ask import Message, Recipient
from kvcommons.holder.asking import Asks
from kvcommons.holder.attend_call import AttendPart, attend_request, begin_attend
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2
from kvcommons.transport.base import Limits, Observation
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.frame import HEADER_BYTES, pack, unpack
from tests.contract.holder_cases import LAYOUT

ROWS = 3
TOLD = [(0, 0), (0, 7), (300, 40_000), (2**32 - 1, 2**32 - 1), (1, 0), (0, 0)]

Send = Callable[[socket.socket, bytes], None]


class Peer:
    """Answers each request by the next of `replies`, and then no more."""

    def __init__(self, folder: Path, replies: Sequence[bytes | None], send: Send) -> None:
        """None: it hangs up."""
        self.address = f"unix:{folder}/peer"
        self.requests: list[tuple[data_pb2.DataRequest, bytes]] = []
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{folder}/peer")
        self._listening.listen()
        self._replies, self._send = iter(replies), send
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):  # who has had enough hangs up
            while header := sock.recv(HEADER_BYTES, socket.MSG_WAITALL):
                head_bytes, payload_bytes, _ = unpack(header, Limits())
                head = sock.recv(head_bytes, socket.MSG_WAITALL)
                payload = sock.recv(payload_bytes, socket.MSG_WAITALL)
                self.requests.append((data_pb2.DataRequest.FromString(head), payload))
                reply = next(self._replies, b"")
                if reply is None:
                    return
                self._send(sock, reply)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.thread.join(5)


def at_once(sock: socket.socket, reply: bytes) -> None:
    sock.sendall(reply)


def in_pieces(sock: socket.socket, reply: bytes) -> None:
    """Of 1, 2, 3, … bytes, so that the next one is waited for."""
    size = 1
    while reply:
        sock.sendall(reply[:size])
        reply, size = reply[size:], size + 1 if size < 40 else 1 << 20
        time.sleep(1e-4)


def framed(reply: data_pb2.DataReply, payload: bytes, *, last: bool = False) -> bytes:
    head = reply.SerializeToString()
    return pack(len(head), len(payload), Limits(), last=last) + head + payload


def answered(partial: Partial, queued_us: int, computed_us: int, *, last: bool = False) -> bytes:
    told = data_pb2.AttendLayerReply(queued_us=queued_us, computed_us=computed_us)
    payload = bytes(byte_view(partial.out)) + bytes(byte_view(partial.lse))
    return framed(data_pb2.DataReply(attend_layer=told), payload, last=last)


def partial() -> Partial:
    return Partial(out=torch.randn(ROWS, LAYOUT.query_heads, LAYOUT.head_dim),
                   lse=torch.randn(ROWS, LAYOUT.query_heads))  # fmt: skip


def rows(heads: int) -> Tensor:
    """Of a batch that has one more, with others' heads beside them."""
    return torch.randn(ROWS + 1, heads + 2, LAYOUT.head_dim)[:, 1:-1]


@contextmanager
def asking(
    folder: Path, replies: Sequence[bytes | None], send: Send = at_once, deadline_s: float = 10.0
) -> Iterator[tuple[Peer, Asks, list[Observation]]]:
    peer = Peer(folder, replies, send)
    observed: list[Observation] = []
    client = DataClient(peer.address, observer=observed.append)
    whole = Partial(out=torch.zeros(ROWS, LAYOUT.query_heads, LAYOUT.head_dim),
                    lse=torch.zeros(ROWS, LAYOUT.query_heads))  # fmt: skip
    message = Message(
        recipients=[Recipient(client=client, wording=WORDING)], rows=[2, 0, 3], shifted=[1], appended=[3, 0],
        answer=whole,
    )  # fmt: skip
    asks = Asks(LAYOUT, [message], [], whole)
    asks.begin([WORDING], deadline_s, None)
    try:
        yield peer, asks, observed
    finally:
        asks.end()
        client.close()
        peer.close()


WORDING = attend_request(
    [
        AttendPart(ref=SegmentRef(handle=number + 1, epoch=2**63), rows=1, first_position=number * 1000,
                   length=number * 1000 + 1, append=number > 0, first_block=number)
        for number in range(ROWS)
    ]
)  # fmt: skip


@pytest.mark.parametrize("send", [at_once, in_pieces])
def test_what_is_sent_and_what_comes_back(socket_folder: Path, send: Send) -> None:
    """With heads of every length, layer by layer."""
    partials = [partial() for _ in TOLD]
    replies = [answered(one, *told) for one, told in zip(partials, TOLD, strict=True)]
    with asking(socket_folder, replies * 2, send) as (peer, asks, observed):
        assert asks.open(Deadline.after(5)) == {}
        sent = []
        for layer, one in enumerate(partials):
            q, shifted, k, v = (rows(heads) for heads in (LAYOUT.query_heads,) * 2 + (LAYOUT.kv_heads,) * 2)
            assert asks.ask(layer, q, k, v, shifted)
            assert asks.receive()
            assert torch.equal(asks.whole.out, one.out)
            assert torch.equal(asks.whole.lse, one.lse)
            sent.append((torch.stack((q[2], shifted[0], q[3])), torch.stack((k[[3, 0]], v[[3, 0]]), dim=1)))
        turns = asks.take_turns()
        assert [(turn.told[0].queued_us, turn.told[0].computed_us) for turn in turns] == TOLD
        for turn in turns:
            (told,) = turn.told
            assert turn.asks_s <= told.began_s <= turn.asked_s <= turn.waits_s <= told.waits_s <= told.came_s
            assert told.came_s <= turn.came_s
        asks.end()
        natively, peer.requests = peer.requests, []
        client = DataClient(peer.address)
        for layer, (q, kv) in enumerate(sent):
            begin_attend(client, layer, WORDING, q, [kv.unsqueeze(3)], Deadline.after(10)).finish()
        client.close()
    for (request, payload), (expected, expected_payload) in zip(natively, peer.requests, strict=True):
        assert 0 < request.deadline_ms <= 10_000
        request.deadline_ms = expected.deadline_ms = 0
        assert request.SerializeToString() == expected.SerializeToString()
        assert payload == expected_payload
    assert [one.error for one in observed] == [""] * len(TOLD)


OTHER = partial()
STALE = StaleEpoch("its KV is gone")
ANSWERS: dict[str, tuple[list[bytes | None], type[KVCommonsError] | None, str]] = {
    "an error": ([framed(data_pb2.DataReply(error=STALE.to_detail()), b"")], StaleEpoch, "its KV is gone"),
    "it leaves": ([answered(OTHER, 3, 4, last=True)], None, ""),
    "too little": ([framed(data_pb2.DataReply(attend_layer=data_pb2.AttendLayerReply()), bytes(100))],
                   DataLoss, "sent 100 bytes where"),
    "another reply": ([framed(data_pb2.DataReply(), bytes(8))], DataLoss, "sent 8 bytes where"),
    "no reply": ([pack(4, 0, Limits()) + b"\xff\xff\xff\xff"], DataLoss, "no DataReply"),
    "no frame": ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], DataLoss, "not a data frame"),
    "half of it": ([answered(OTHER, 3, 4)[:200]], DeadlineExceeded, "waited for"),
    "nothing": ([b""], DeadlineExceeded, "waited for"),
    "it hangs up": ([None], Unavailable, "closed the connection"),
    "more than one": ([answered(OTHER, 3, 4) + bytes(30)], None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("send", [at_once, in_pieces])
def test_answers_that_are_not_as_they_should_be(socket_folder: Path, send: Send, name: str) -> None:
    """After one that was."""
    replies, error, words = ANSWERS[name]
    with asking(socket_folder, [answered(OTHER, 1, 2), *replies], send, 0.3) as (_, asks, observed):
        assert asks.open(Deadline.after(5)) == {}
        q, k = rows(LAYOUT.query_heads), rows(LAYOUT.kv_heads)
        assert asks.ask(0, q, k, k, q)
        assert asks.receive()
        assert asks.ask(1, q, k, k, q)
        asks.whole.out.zero_()
        if asks.receive():
            assert name == "more than one"  # bytes behind an answer are not looked at before the next one
            assert torch.equal(asks.whole.out, OTHER.out)
            return
        call = asks.call(0)
        if error is None:
            answer, told = call.finish_told()
            assert (told.queued_us, told.computed_us) == (3, 4)
            assert torch.equal(answer.out, OTHER.out)
            assert torch.equal(answer.lse, OTHER.lse)
        else:
            with pytest.raises(error, match=words):
                call.finish_told()
        assert observed[-1].error == (error.code if error is not None else "")
        assert observed[-1].op == "attend_layer"
