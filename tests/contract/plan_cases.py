"""A holder with its data plane in the test's process, and debtors' ends of connections, byte by byte."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kvcommons.backend.memory import TORCH_DTYPES, BlockMemory, byte_view
from kvcommons.errors import Unavailable
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.data import HolderData
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.holder.layer_head import LayerHead, LayerReply
from kvcommons.holder.plan import PlanRow, difference
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.layout import Layout
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.base import Limits, Observation
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.frame import HEADER_BYTES, pack, unpack
from kvcommons.transport.server import DataServer
from tests.machine import scaled
from tests.waiting import wait_until

LAYERS, BLOCKS, SIZE = 3, 64, 4
LAYOUT = Layout(layers=LAYERS, kv_heads=2, block_tokens=SIZE, head_dim=16, kv_dtype="float32", query_heads=4)
WINDOWS = (None, 6, None)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def row(ref: SegmentRef, position: int = 4, length: int = 5, *, append: bool = True, **facts: int) -> PlanRow:
    return PlanRow.of(ref, position=position, length=length, append=append, **facts)


class Peer:
    """A debtor's end of one connection, and what it has opened there."""

    def __init__(self, address: str, layout: Layout) -> None:
        scheme, _, rest = address.partition(":")
        if scheme == "unix":
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(scaled(20))
        self._layout = layout
        self.plans: dict[int, list[PlanRow]] = {}
        self.revisions: dict[int, int] = {}
        self.head = LayerReply(0, 0, 0, 0, 0, 0)  # of the last answer

    def open(self, rows: Sequence[PlanRow], *, plan: int = 1, step: int = 0, trace: str = "") -> None:
        self.plans[plan], self.revisions[plan] = list(rows), 0
        message = pb.OpenPlan(plan=plan, step=step, rows=[one.message() for one in rows])
        self.send(self.wrap(pb.DataRequest(deadline_ms=9999, traceparent=trace, open_plan=message)))

    def change(self, rows: Sequence[PlanRow], *, plan: int = 1, step: int = 0) -> None:
        """`rows`, as of `step`, are what it has then; rows before as of step 0 are told apart by it."""
        before = [one.moved(step) for one in self.plans[plan]]
        removed, placed = difference(before, rows)
        self.plans[plan] = [one.moved(-step) for one in rows]
        self.revisions[plan] += 1
        message = pb.ChangePlan(plan=plan, revision=self.revisions[plan], step=step, removed=removed)
        for index, one in placed:
            message.placed.add(index=index, row=one.message())
        self.send(self.wrap(pb.DataRequest(deadline_ms=9999, change_plan=message)))

    def layer(
        self, layer: int, step: int = 0, *, plan: int = 1, seed: int = 0, deadline_ms: int = 20_000
    ) -> bytes:
        """Its frame."""
        payload = self.payload(plan, layer, seed)
        rows = self.plans.get(plan, [])
        head = LayerHead(
            layer=layer, plan=plan, revision=self.revisions.get(plan, 0), step=step, deadline_ms=deadline_ms,
            queries=sum(one.queries for one in rows), appended=sum(one.queries for one in rows if one.append),
        ).pack()  # fmt: skip
        return pack(len(head), len(payload), Limits(), layer=True) + head + payload

    def payload(self, plan: int, layer: int, seed: int) -> bytes:
        one, source = self._layout, torch.Generator().manual_seed(1000 * seed + layer)
        rows = self.plans.get(plan, [])
        q = torch.randn(sum(row.queries for row in rows), one.query_heads, one.head_dim, generator=source)
        appending = sum(row.queries for row in rows if row.append)
        new = torch.randn(appending, 2 * one.kv_heads, one.head_dim, generator=source)
        return bytes(byte_view(q)) + bytes(byte_view(new.to(TORCH_DTYPES[one.kv_dtype])))

    def wrap(self, head: pb.DataRequest, payload: bytes = b"") -> bytes:
        words = head.SerializeToString()
        return pack(len(words), len(payload), Limits()) + words + payload

    def send(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def receive(self) -> tuple[pb.DataReply | LayerReply, bytes]:
        header = unpack(self._take(HEADER_BYTES), Limits())
        head = self._take(header.head_bytes)
        reply = LayerReply.unpack(head) if header.layer else pb.DataReply.FromString(head)
        return reply, self._take(header.payload_bytes)

    def ask(self, frame: bytes) -> bytes:
        """A layer's answer: its payload."""
        self.send(frame)
        reply, payload = self.receive()
        assert isinstance(reply, LayerReply), reply
        self.head = reply
        return payload

    def refused(self, frame: bytes) -> str:
        """The error's code."""
        self.send(frame)
        reply, payload = self.receive()
        assert isinstance(reply, pb.DataReply)
        assert not payload
        return reply.error.code

    def lost(self, plan: int = 1) -> dict[int, str]:
        """Rows, each with the code of why."""
        self.send(self.wrap(pb.DataRequest(deadline_ms=9999, describe_plan=pb.DescribePlan(plan=plan))))
        reply, _ = self.receive()
        assert isinstance(reply, pb.DataReply)
        return {one.index: one.error.code for one in reply.plan_description.lost}

    def cut(self, frame: bytes, less: int) -> bytes:
        """With a payload that is shorter by so much."""
        header = unpack(frame[:HEADER_BYTES], Limits())
        made = pack(header.head_bytes, header.payload_bytes - less, Limits(), layer=header.layer)
        return made + frame[HEADER_BYTES:-less]

    def unread(self) -> int:
        """Bytes of what was sent that the holder has not taken."""
        (count,) = struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))
        return int(count)

    def closed(self) -> bool:
        """Whether the holder has ended the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def _take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            some = self.socket.recv(size - len(taken))
            if not some:
                raise Unavailable("the holder has ended the connection")
            taken += some
        return taken


class Rig:
    """A holder with its data plane, and the test's say in its table."""

    def __init__(
        self,
        address: str,
        layout: Layout,
        ask_s: float,
        budget: AttentionBudget | None,
        tracer: Tracer | None = None,
    ) -> None:
        memory = BlockMemory(layout, BLOCKS)
        source = torch.Generator().manual_seed(1)
        memory.tensor.copy_(torch.randn(memory.tensor.shape, generator=source))
        model = HeldModel(fingerprint=b"f" * 32, scale=0.25, windows=WINDOWS)
        self.holder = Holder(memory, BlockAllocator(BLOCKS), model, instance_id="holder", clock=lambda: 0.0)
        self.data = HolderData(self.holder, budget=budget, tracer=tracer)
        self.observed: list[Observation] = []
        self.server = DataServer(
            address, self.data, name="holder", observer=self.observed.append, ask_s=ask_s,
            session=self.data.attention.session,
        )  # fmt: skip
        self.server.start()
        self.layout = layout
        self.lent: list[SegmentRef] = []
        self.peers: list[Peer] = []

    @property
    def served(self) -> int:
        return self.data.attention.served

    def lend(self, blocks: int) -> SegmentRef:
        ref = self.holder.lend("debtor", "s", blocks, first_position=0, lease_s=10)
        self.lent.append(ref)
        return ref

    def peer(self) -> Peer:
        self.peers.append(Peer(self.server.address, self.layout))
        return self.peers[-1]

    def pins(self) -> int:
        return sum(len(segment.pins) for segment, _ in self.holder.held())

    def follow(self, peer: Peer, step: int, plan: int = 1) -> int:
        """Has the connection's thread serve natively; the next step."""
        before, deadline = self.served, Deadline.after(20)
        while self.served == before:
            deadline.check("native serving")
            for layer in range(LAYERS):
                peer.ask(peer.layer(layer, step, plan=plan))
            step += 1
            time.sleep(0.02)  # it is told of after a while without requests
        return step

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The cores are somebody else's."""
        allowance = self.data.attention.allowance
        taken = allowance.take(20)
        assert taken
        try:
            yield
        finally:
            allowance.give(taken)


@contextmanager
def rig(
    folder: Path,
    *,
    transport: str = "tcp",
    layout: Layout = LAYOUT,
    ask_s: float = 60e-6,
    budget: AttentionBudget | None = None,
    tracer: Tracer | None = None,
) -> Iterator[Rig]:
    """Ends with a check that nothing stays pinned or taken, and that the server's threads end at once."""
    address = "tcp:127.0.0.1:0" if transport == "tcp" else f"unix:{folder}/data"
    made = Rig(address, layout, ask_s, budget, tracer)
    try:
        yield made
        made.holder.release(made.lent)
        wait_until(lambda: made.holder.allocator.in_use == 0)
    finally:
        try:
            assert made.server.stop(5)
        finally:  # else another test is blamed for what is open still
            for peer in made.peers:
                peer.socket.close()
