"""A holder with its data plane in the test's process, and debtors' ends of connections, byte by byte."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvcommons.attention.memory import TORCH_DTYPES, BlockMemory, byte_view
from kvcommons.errors import Unavailable
from kvcommons.holder.budget import AttentionBudget
from kvcommons.holder.data import HolderData
from kvcommons.holder.holder import HeldModel, Holder
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb
from kvcommons.rblock.allocator import BlockAllocator
from kvcommons.rblock.layout import Layout
from kvcommons.transport.base import Limits, Observation
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.frame import HEADER_BYTES, pack, unpack
from kvcommons.transport.server import DataServer
from tests.machine import scaled

LAYERS, BLOCKS, SIZE = 3, 64, 4
LAYOUT = Layout(layers=LAYERS, kv_heads=2, block_tokens=SIZE, head_dim=16, kv_dtype="float32", query_heads=4)
WINDOWS = (None, 6, None)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def eventually(condition: Callable[[], object]) -> None:
    deadline = Deadline.after(scaled(20))
    while not condition():
        deadline.check("what the test waits for")
        time.sleep(0.002)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A segment of a request."""

    ref: SegmentRef
    position: int
    length: int
    append: bool = True
    first_block: int = 0

    def next(self) -> Row:
        return replace(self, position=self.position + 1, length=self.length + self.append)


class Peer:
    """A debtor's end of one connection."""

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

    def frame(
        self,
        layer: int,
        rows: Sequence[Row],
        seed: int = 0,
        *,
        trace: str = "",
        deadline_ms: int = 20_000,
    ) -> bytes:
        attend = pb.AttendLayer(layer=layer)
        for row in rows:
            attend.segments.add(
                handle=row.ref.handle, epoch=row.ref.epoch, generation=row.ref.generation, rows=1,
                first_position=row.position, append=row.append, length=row.length,
                first_block=row.first_block,
            )  # fmt: skip
        head = pb.DataRequest(deadline_ms=deadline_ms, traceparent=trace, attend_layer=attend)
        return self.wrap(head, self.payload(rows, layer, seed))

    def payload(self, rows: Sequence[Row], layer: int, seed: int) -> bytes:
        one, source = self._layout, torch.Generator().manual_seed(1000 * seed + layer)
        q = torch.randn(len(rows), one.query_heads, one.head_dim, generator=source)
        appending = sum(row.append for row in rows)
        new = torch.randn(appending, 2 * one.kv_heads, one.head_dim, generator=source)
        return bytes(byte_view(q)) + bytes(byte_view(new.to(TORCH_DTYPES[one.kv_dtype])))

    def wrap(self, head: pb.DataRequest, payload: bytes = b"") -> bytes:
        words = head.SerializeToString()
        return pack(len(words), len(payload), Limits()) + words + payload

    def send(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def receive(self) -> tuple[pb.DataReply, bytes]:
        head_bytes, payload_bytes, _ = unpack(self._take(HEADER_BYTES), Limits())
        reply = pb.DataReply.FromString(self._take(head_bytes))
        return reply, self._take(payload_bytes)

    def ask(self, frame: bytes) -> bytes:
        """An answer's payload."""
        self.send(frame)
        reply, payload = self.receive()
        assert not reply.HasField("error"), reply.error
        assert reply.HasField("attend_layer")
        return payload

    def refused(self, frame: bytes) -> str:
        """The error's code."""
        self.send(frame)
        reply, payload = self.receive()
        assert not payload
        return reply.error.code

    def cut(self, frame: bytes, less: int) -> bytes:
        """With a payload that is shorter by so much."""
        head_bytes, payload_bytes, _ = unpack(frame[:HEADER_BYTES], Limits())
        return pack(head_bytes, payload_bytes - less, Limits()) + frame[HEADER_BYTES:-less]

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

    def __init__(self, address: str, layout: Layout, ask_s: float, budget: AttentionBudget | None) -> None:
        memory = BlockMemory(layout, BLOCKS)
        source = torch.Generator().manual_seed(1)
        memory.tensor.copy_(torch.randn(memory.tensor.shape, generator=source))
        model = HeldModel(fingerprint=b"f" * 32, scale=0.25, windows=WINDOWS)
        self.clock_s = 0.0
        self.holder = Holder(
            memory, BlockAllocator(BLOCKS), model, instance_id="holder", clock=lambda: self.clock_s
        )
        self.data = HolderData(self.holder, budget=budget)
        self.observed: list[Observation] = []
        self.server = DataServer(
            address, self.data, name="holder", observer=self.observed.append, ask_s=ask_s
        )
        self.server.start()
        self.layout = layout
        self.lent: list[SegmentRef] = []
        self.peers: list[Peer] = []

    @property
    def served(self) -> int:
        return self.data.attention.following.served

    def lend(self, blocks: int) -> SegmentRef:
        ref = self.holder.lend("debtor", "s", blocks, first_position=0, lease_s=10)
        self.lent.append(ref)
        return ref

    def peer(self) -> Peer:
        self.peers.append(Peer(self.server.address, self.layout))
        return self.peers[-1]

    def pins(self) -> int:
        return sum(len(segment.pins) for segment, _ in self.holder.held())

    def follow(self, peer: Peer, row: Row) -> Row:
        """Has the connection's thread serve natively; the row of the next iteration."""
        before, deadline = self.served, Deadline.after(20)
        while self.served == before:
            deadline.check("native serving")
            for layer in range(LAYERS):
                peer.ask(peer.frame(layer, [row]))
            row = row.next()
            time.sleep(0.02)  # it is told of after a while without requests
        return row

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The cores are somebody else's."""
        turn = self.data.attention.turn
        assert turn.take(20)
        try:
            yield
        finally:
            turn.give()


@contextmanager
def rig(
    folder: Path,
    *,
    transport: str = "tcp",
    layout: Layout = LAYOUT,
    ask_s: float = 60e-6,
    budget: AttentionBudget | None = None,
) -> Iterator[Rig]:
    """Ends with a check that nothing stays pinned or taken, and that the server's threads end at once."""
    address = "tcp:127.0.0.1:0" if transport == "tcp" else f"unix:{folder}/data"
    made = Rig(address, layout, ask_s, budget)
    try:
        yield made
        made.holder.release(made.lent)
        eventually(lambda: made.holder.allocator.in_use == 0)
    finally:
        assert made.server.stop(5)
        for peer in made.peers:
            peer.socket.close()
