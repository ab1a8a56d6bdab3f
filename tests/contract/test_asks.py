"""Messages to holders that do not play along, one layer each, without the interpreter."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kvcommons.attention.native import ask as native
from kvcommons.attention.partial import Partial, merge
from kvcommons.errors import DeadlineExceeded
from kvcommons.holder.ask import Message, Recipient
from kvcommons.holder.asking import Asks, Source
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport import frame
from kvcommons.transport.base import Limits
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from tests.contract.holder_cases import LAYOUT

pytestmark = pytest.mark.skipif(native.find() is None, reason="there is no compiled kernel")

HEADS, KV_HEADS, DIM = LAYOUT.query_heads, LAYOUT.kv_heads, LAYOUT.head_dim
Listen = Callable[[str, Sequence[float | None]], DataClient]


@pytest.fixture
def listen(socket_folder: Path) -> Iterator[Listen]:
    """A holder that answers its requests after so many seconds each; None: it does not read that one."""
    sockets: list[socket.socket] = []
    clients: list[DataClient] = []

    def start(name: str, delays: Sequence[float | None]) -> DataClient:
        there = socket.socket(socket.AF_UNIX)
        there.bind(f"{socket_folder}/{name}")
        there.listen(8)
        sockets.append(there)
        threading.Thread(target=answer, args=(there, delays), daemon=True).start()
        clients.append(DataClient(f"unix:{socket_folder}/{name}"))
        return clients[-1]

    def answer(there: socket.socket, delays: Sequence[float | None]) -> None:
        connection, _ = there.accept()
        sockets.append(connection)
        head = pb.DataReply(attend_layer=pb.AttendLayerReply(computed_us=2)).SerializeToString()
        payload = bytes(HEADS * (DIM + 1) * 4)
        for delay in delays:
            if delay is None:
                return
            connection.recv(1 << 20)
            time.sleep(delay)
            connection.sendall(frame.pack(len(head), len(payload), Limits()) + head + payload)

    yield start
    for client in clients:
        client.close()
    for one in sockets:
        one.close()


def room(rows: int) -> Partial:
    return Partial(out=torch.randn(rows, HEADS, DIM), lse=torch.randn(rows, HEADS))


def ask(asks: Asks, rows: int) -> bool:
    kv = torch.zeros(rows, KV_HEADS, DIM)
    return asks.ask(0, torch.zeros(rows, HEADS, DIM), kv, kv, None)


def test_what_was_sent_in_part_leaves_no_connection_behind(listen: Listen) -> None:
    """Both parts of a head group stop reading; only the first one is heard of."""
    rows, clients = 200_000, [listen(name, [None]) for name in ("first", "second")]
    parts = [
        Recipient(
            client=client,
            wording=pb.AttendLayer(),
            query_heads=slice(part * HEADS // 2, (part + 1) * HEADS // 2),
            kv_heads=slice(part * KV_HEADS // 2, (part + 1) * KV_HEADS // 2),
        )
        for part, client in enumerate(clients)
    ]
    whole = room(rows)
    message = Message(recipients=parts, rows=range(rows), shifted=[], appended=[], answer=whole)
    asks = Asks(LAYOUT, [message], [], whole)
    asks.begin([part.wording for part in parts], 0.2, None)
    assert asks.open(Deadline.after(5)) == {}
    assert not ask(asks, rows)
    with pytest.raises(DeadlineExceeded):
        asks.call(0).check_sent()
    asks.end()
    assert [client.connected() for client in clients] == [False, False]


def test_one_that_is_late_makes_no_other_look_slow(listen: Listen) -> None:
    """The second one was slow an iteration before."""
    clients = [listen("late", [0, None]), listen("well", [0.1, 0])]
    messages = [
        Message(
            recipients=[Recipient(client=client, wording=pb.AttendLayer())],
            rows=[0],
            shifted=[],
            appended=[],
            answer=room(1),
        )
        for client in clients
    ]
    asks = Asks(LAYOUT, messages, [], messages[0].answer)
    for well in (True, False):
        asks.begin([pb.AttendLayer()] * 2, 0.5, None)
        assert asks.open(Deadline.after(5)) == {}
        assert ask(asks, 1)
        assert asks.receive() is well
        if not well:
            told = asks.call(1).told
            assert told.came_s <= told.waits_s
        asks.take_turns()
        asks.end()


@pytest.mark.parametrize("parts", [1, 2, 65, 300])
def test_a_row_may_lie_in_many_places(listen: Listen, parts: int) -> None:
    """All of them here: nobody has to be asked."""
    partial, whole = room(parts), room(1)
    sources = [Source(partial=partial, index=[part], rows=[0]) for part in range(parts)]
    asks = Asks(LAYOUT, [], sources, whole)
    asks.begin([], 1.0, None)
    assert ask(asks, 1)
    assert asks.receive()
    pieces = [Partial(out=partial.out[at : at + 1], lse=partial.lse[at : at + 1]) for at in range(parts)]
    expected = merge(pieces)
    assert torch.equal(whole.out, expected.out)
    assert torch.equal(whole.lse, expected.lse)
