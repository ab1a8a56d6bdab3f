"""What is sent on the native path is what Python sends, and every answer that a peer may give is understood
as Python understands it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Partial
from kvcommons.backend.memory import byte_view
from kvcommons.errors import (
    DataLoss,
    DeadlineExceeded,
    KVCommonsError,
    Overloaded,
    Unavailable,
    UnknownPlan,
    UnsupportedParameter,
)
from kvcommons.holder.exchange import LayerExchange, PartialSource, Recipient, Share
from kvcommons.holder.layer_head import LayerHead, LayerReply
from kvcommons.holder.plan import PlanRow
from kvcommons.holder.plan_connection import PlanPool
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2
from kvcommons.transport.base import Limits, Observation
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.frame import HEADER_BYTES, pack, unpack
from tests.backends import COMPILED, asking_in_python, merge
from tests.contract.exchange_cases import in_python
from tests.contract.holder_cases import LAYOUT
from tests.machine import scaled

ROWS = 3
CPU = choose()
REPORTED = [(0, 0), (0, 7), (300, 40_000), (2**32 - 1, 2**32 - 1), (1, 0), (0, 0)]

Send = Callable[[socket.socket, bytes], None]
# What makes an answer of a layer's head.
Reply = Callable[[LayerHead], bytes]

pytestmark = pytest.mark.skipif(not COMPILED, reason="there is no compiled kernel")


class Peer:
    """Answers each layer by the next of `replies`, and then no more. None: it hangs up."""

    def __init__(self, folder: Path, replies: Sequence[Reply | None], send: Send) -> None:
        self.address = f"unix:{folder}/peer"
        self.plans: list[data_pb2.DataRequest] = []
        self.layers: list[tuple[LayerHead, bytes]] = []
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
            while received := sock.recv(HEADER_BYTES, socket.MSG_WAITALL):
                header = unpack(received, Limits())
                head = sock.recv(header.head_bytes, socket.MSG_WAITALL)
                payload = sock.recv(header.payload_bytes, socket.MSG_WAITALL) if header.payload_bytes else b""
                if not header.layer:
                    self.plans.append(data_pb2.DataRequest.FromString(head))
                    continue
                self.layers.append((LayerHead.unpack(head), payload))
                reply = next(self._replies, lambda head: b"")
                if reply is None:
                    return
                self._send(sock, reply(self.layers[-1][0]))

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


def framed(reply: data_pb2.DataReply, payload: bytes) -> bytes:
    head = reply.SerializeToString()
    return pack(len(head), len(payload), Limits()) + head + payload


def refused(error: KVCommonsError) -> Reply:
    return lambda head: framed(data_pb2.DataReply(error=error.to_detail()), b"")


def answered(partial: Partial, queued_us: int = 3, computed_us: int = 4, **other: int) -> Reply:
    """`other`: fields of the head that are not as they should be, or `last`, `less` bytes, `version`."""
    payload = bytes(byte_view(partial.out)) + bytes(byte_view(partial.lse))
    payload = payload[: len(payload) - other.pop("less", 0)]
    last, version = bool(other.pop("last", 0)), other.pop("version", 1)

    def reply(head: LayerHead) -> bytes:
        made = (
            LayerReply(head.layer, head.plan, head.step, queued_us, computed_us, 0)._replace(**other).pack()
        )
        made = version.to_bytes(2, "little") + made[2:]
        return pack(len(made), len(payload), Limits(), last=last, layer=True) + made + payload

    return reply


def partial() -> Partial:
    return Partial(out=torch.randn(ROWS, LAYOUT.query_heads, LAYOUT.head_dim),
                   lse=torch.randn(ROWS, LAYOUT.query_heads))  # fmt: skip


def rows(heads: int) -> Tensor:
    """Of a batch that has one more, with others' heads beside them."""
    return torch.randn(ROWS + 1, heads + 2, LAYOUT.head_dim)[:, 1:-1]


PLAN = [
    PlanRow.of(SegmentRef(handle=number + 1, epoch=2**63), position=number * 1000, length=number * 1000 + 1,
               append=number > 0, first_block=number)
    for number in range(ROWS)
]  # fmt: skip


@contextmanager
def asking(
    folder: Path, replies: Sequence[Reply | None], send: Send = at_once, deadline_s: float = 10.0
) -> Iterator[tuple[Peer, LayerExchange, list[Observation]]]:
    """An iteration of one share."""
    peer = Peer(folder, replies, send)
    observed: list[Observation] = []
    plans = PlanPool(DataClient(peer.address, observer=observed.append))
    whole = Partial(out=torch.zeros(ROWS, LAYOUT.query_heads, LAYOUT.head_dim),
                    lse=torch.zeros(ROWS, LAYOUT.query_heads))  # fmt: skip
    share = Share(rows=[2, 0, 3], shifted=[1], appended=[3, 0], answer=whole)
    made = LayerExchange(LAYOUT, [(share, [Recipient(plans=plans, rows=PLAN)])], [], whole, backend=CPU)
    made.begin(0, deadline_s, None)
    try:
        yield peer, made, observed
    finally:
        made.end()
        plans.close()
        peer.close()


@pytest.mark.parametrize("send", [at_once, in_pieces])
def test_what_is_sent_and_what_comes_back(socket_folder: Path, send: Send) -> None:
    """Layer by layer, over two iterations, and the same in Python."""
    partials = [partial() for _ in REPORTED]
    tensors = [
        [rows(heads) for heads in (LAYOUT.query_heads,) * 2 + (LAYOUT.kv_heads,) * 2] for _ in partials
    ]
    replies = [answered(one, *reported) for one, reported in zip(partials, REPORTED, strict=True)]
    sent = []
    for way in ("native", "python"):
        folder = socket_folder / way
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            if way == "python":
                patch.setattr("tests.contract.test_exchange_replies.CPU", asking_in_python())
            with asking(folder, replies, send) as (peer, made, observed):
                reported = []
                for number, (one, (q, shifted, k, v)) in enumerate(zip(partials, tensors, strict=True)):
                    if number == 3:
                        reported += made.take_timings()
                        made.end()
                        made.begin(1, 10.0, None)
                    made.ask(number % 2, q, k, v, shifted)
                    made.receive()
                    assert torch.equal(made.whole.out, one.out)
                    assert torch.equal(made.whole.lse, one.lse)
                reported += made.take_timings()
                assert [layer.native for layer in reported] == [way == "native"] * len(REPORTED)
                assert [(*layer.shares[0][4:6],) for layer in reported] == REPORTED
                for layer in reported:
                    (share,) = layer.shares
                    instants = (layer.asks_s, share.began_s, layer.asked_s, layer.waits_s, share.waits_s,
                                share.came_s, layer.came_s)  # fmt: skip
                    assert list(instants) == sorted(instants)
                assert [one.error for one in observed] == [""] * len(REPORTED)
                assert [one.WhichOneof("op") for one in peer.plans] == ["open_plan"]
                sent.append(peer.layers)
    for (head, payload), (expected, expected_payload) in zip(*sent, strict=True):
        assert 0 < head.deadline_ms <= 10_000
        assert head._replace(deadline_ms=0) == expected._replace(deadline_ms=0)
        assert payload == expected_payload
    assert [head.step for head, _ in sent[0]] == [0, 0, 0, 1, 1, 1]


OTHER = partial()
BUSY = Overloaded("not now")
# Answers to the second layer; what is said of it, and whether its partial is there.
ANSWERS: dict[str, tuple[list[Reply | None], type[KVCommonsError] | None, str]] = {
    "an error": ([refused(BUSY)], Overloaded, "not now"),
    "it leaves": ([answered(OTHER, last=1)], None, ""),
    "it knows no plan": ([refused(UnknownPlan("open it")), answered(OTHER)], None, ""),
    "it knows none again": ([refused(UnknownPlan("open it"))] * 2, UnknownPlan, "open it"),
    "too little": ([answered(OTHER, less=8)], DataLoss, "were due"),
    "another layer": ([answered(OTHER, layer=5)], DataLoss, "answered layer 5"),
    "another plan": ([answered(OTHER, plan=5)], DataLoss, "of plan 5"),
    "another step": ([answered(OTHER, step=5)], DataLoss, "at step 5"),
    "another version": ([answered(OTHER, version=9)], UnsupportedParameter, "version 9; this build speaks 1"),
    "another reply": ([lambda head: framed(data_pb2.DataReply(), bytes(8))], DataLoss, "8 bytes of another"),
    "no reply": ([lambda head: pack(4, 0, Limits()) + b"\xff\xff\xff\xff"], DataLoss, "no DataReply"),
    "no frame": ([lambda head: b"HTTP/1.1 400 Bad Request\r\n\r\n"], DataLoss, "not a data frame"),
    "half of it": ([lambda head: answered(OTHER)(head)[:200]], DeadlineExceeded, "waited for"),
    "a part of its head": ([lambda head: answered(OTHER)(head)[:30]], DeadlineExceeded, "waited for"),
    "nothing": ([lambda head: b""], DeadlineExceeded, "waited for"),
    "it hangs up": ([None], Unavailable, "closed the connection"),
    "more than one": ([lambda head: answered(OTHER)(head) + bytes(30)], None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("send", [at_once, in_pieces])
@pytest.mark.parametrize("python", [False, True])
def test_answers_that_are_not_as_they_should_be(
    socket_folder: Path, send: Send, name: str, python: bool
) -> None:
    """After one that was; a share that fails is empty from then on."""
    replies, error, words = ANSWERS[name]
    late = error is DeadlineExceeded
    deadline_s = scaled(0.5 if late else 10.0)
    with in_python() if python else nullcontext():
        with asking(socket_folder, [answered(OTHER, 1, 2), *replies], send, deadline_s) as asked:
            _, made, observed = asked
            q, k = rows(LAYOUT.query_heads), rows(LAYOUT.kv_heads)
            made.ask(0, q, k, k, q)
            made.receive()
            assert not made.failures
            made.whole.out.zero_()
            made.ask(1, q, k, k, q)
            made.receive()
            first, *rest = (layer.shares for layer in made.take_timings())
            assert first[0][4:6] == (1, 2)
            if error is None:
                assert not made.failures
                assert rest[0][0][4:6] == (3, 4)
                assert torch.equal(made.whole.out, OTHER.out)
                assert torch.equal(made.whole.lse, OTHER.lse)
                return
            assert isinstance(made.failures[0], error)
            assert words in made.failures[0].message
            assert [[share.answered for share in shares] for shares in rest] == [[False] * late]
            assert sorted(one.error for one in observed) == ["", error.code]
            for _ in range(2):
                assert torch.isneginf(made.whole.lse).all()
                assert not made.whole.out.any()
                made.ask(0, q, k, k, q)
                made.receive()
            assert made.failures.keys() == {0}


def test_what_was_sent_in_part_leaves_no_connection_behind(socket_folder: Path) -> None:
    """The first part of a head group stops reading; the second one is not asked any more."""
    many, heads, kv_heads = 200_000, LAYOUT.query_heads, LAYOUT.kv_heads
    listening = []
    for name in ("first", "second"):
        there = socket.socket(socket.AF_UNIX)
        there.bind(f"{socket_folder}/{name}")
        there.listen()
        listening.append(there)
    pools = [PlanPool(DataClient(f"unix:{socket_folder}/{name}")) for name in ("first", "second")]
    recipients = [
        Recipient(
            plans=plans,
            rows=PLAN[:1],
            query_heads=slice(part * heads // 2, (part + 1) * heads // 2),
            kv_heads=slice(part * kv_heads // 2, (part + 1) * kv_heads // 2),
        )
        for part, plans in enumerate(pools)
    ]
    whole = Partial(out=torch.randn(many, heads, LAYOUT.head_dim), lse=torch.randn(many, heads))
    share = Share(rows=range(many), shifted=[], appended=[], answer=whole)
    made = LayerExchange(LAYOUT, [(share, recipients)], [], whole, backend=CPU)
    made.begin(0, 0.2, None)
    kv = torch.zeros(many, kv_heads, LAYOUT.head_dim)
    made.ask(0, torch.zeros(many, heads, LAYOUT.head_dim), kv, kv, None)
    made.receive()
    assert isinstance(made.failures[0], DeadlineExceeded)
    ((late,),) = (layer.shares for layer in made.take_timings())
    assert not late.answered
    assert 0.1 < late.came_s - late.waits_s < scaled(10), "it was waited for while it was sent to"
    made.end()
    first, second = (plan.bare for plans in pools for plan in plans._idle)
    assert first is None
    assert second is not None
    for plans, there in zip(pools, listening, strict=True):
        plans.close()
        there.close()


def test_one_that_is_late_makes_no_other_look_slow(socket_folder: Path) -> None:
    """The second one was slow an iteration before."""
    one = Partial(out=OTHER.out[:1].contiguous(), lse=OTHER.lse[:1].contiguous())

    def slowly(head: LayerHead) -> bytes:
        time.sleep(0.1)
        return answered(one)(head)

    peers, shares = [], []
    for name, replies in (("late", [answered(one)]), ("well", [slowly, answered(one)])):
        (socket_folder / name).mkdir()
        peers.append(Peer(socket_folder / name, replies, at_once))
        plans = PlanPool(DataClient(peers[-1].address))
        answer = Partial(out=torch.empty_like(one.out), lse=torch.empty_like(one.lse))
        share = Share(rows=[0], shifted=[], appended=[], answer=answer)
        shares.append((share, [Recipient(plans=plans, rows=PLAN[:1])]))
    made = LayerExchange(LAYOUT, shares, [], shares[0][0].answer, backend=CPU)
    q = torch.zeros(1, LAYOUT.query_heads, LAYOUT.head_dim)
    kv = torch.zeros(1, LAYOUT.kv_heads, LAYOUT.head_dim)
    for step, well in enumerate((True, False)):
        made.begin(step, scaled(0.5), None)
        made.ask(0, q, kv, kv, None)
        made.receive()
        assert (0 in made.failures) != well
        (layer,) = made.take_timings()
        late, other = layer.shares
        assert (late.answered, other.answered) == (well, True)
        if not well:
            assert late.came_s - late.waits_s > scaled(0.4)
            assert other.came_s - other.waits_s < (late.came_s - late.waits_s) / 2
        made.end()
    for (_, (recipient,)), peer in zip(shares, peers, strict=True):
        recipient.plans.close()
        peer.close()


@pytest.mark.parametrize("parts", [1, 2, 65, 300])
def test_a_row_may_lie_in_many_places(parts: int) -> None:
    """All of them here: nobody has to be asked."""
    heads = LAYOUT.query_heads
    pieces = Partial(out=torch.randn(parts, heads, LAYOUT.head_dim), lse=torch.randn(parts, heads))
    whole = Partial(out=torch.randn(1, heads, LAYOUT.head_dim), lse=torch.randn(1, heads))
    sources = [PartialSource(partial=pieces, index=[part], rows=[0]) for part in range(parts)]
    made = LayerExchange(LAYOUT, [], sources, whole, backend=CPU)
    made.begin(0, 1.0, None)
    kv = torch.zeros(1, LAYOUT.kv_heads, LAYOUT.head_dim)
    made.ask(0, torch.zeros(1, heads, LAYOUT.head_dim), kv, kv, None)
    made.receive()
    expected = merge(
        [Partial(out=pieces.out[at : at + 1], lse=pieces.lse[at : at + 1]) for at in range(parts)]
    )
    assert torch.equal(whole.out, expected.out)
    assert torch.equal(whole.lse, expected.lse)


def test_a_plan_learns_of_what_changes(socket_folder: Path) -> None:
    """From one batch to the next, and of nothing else: a change is as large as what it changes."""
    peer = Peer(socket_folder, [answered(OTHER)] * 20, at_once)
    plans = PlanPool(DataClient(peer.address))

    def decode(wanted: Sequence[PlanRow], steps: int) -> None:
        answer = partial()
        share = Share(rows=range(len(wanted)), shifted=[], appended=[], answer=answer)
        made = LayerExchange(
            LAYOUT, [(share, [Recipient(plans=plans, rows=wanted)])], [], answer, backend=CPU
        )
        for step in range(steps):
            made.begin(step, 5.0, None)
            q, kv = (
                torch.zeros(ROWS, LAYOUT.query_heads, LAYOUT.head_dim),
                torch.zeros(ROWS, 2, LAYOUT.head_dim),
            )
            made.ask(0, q, kv, kv, None)
            made.receive()
            assert not made.failures
            made.end()

    decode(PLAN, 3)
    decode([row.moved(3) for row in PLAN], 2)  # the same rows in a new batch
    joins = PlanRow.of(SegmentRef(handle=77, epoch=5), position=9, length=10, append=True)
    decode([PLAN[0].moved(5), joins, PLAN[2].moved(5)], 2)
    until = Deadline.after(10)
    while len(peer.layers) < 7:
        until.check("the peer to have read all")
        time.sleep(0.01)
    opened, changed = peer.plans
    assert [PlanRow.read(row) for row in opened.open_plan.rows] == PLAN
    change = changed.change_plan
    assert (change.revision, change.step, list(change.removed)) == (1, 5, [1])
    assert [(one.index, PlanRow.read(one.row)) for one in change.placed] == [(1, joins)]
    assert [head.step for head, _ in peer.layers] == list(range(7))
    assert [head.revision for head, _ in peer.layers] == [0] * 5 + [1] * 2
    plans.close()
    peer.close()
