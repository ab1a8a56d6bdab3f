"""What every transport must do for calls that go well, and for peers that answer with errors."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvcommons.errors import DataLoss, Internal, InvalidInput, StaleEpoch, TooLarge
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport.base import Limits, Observation
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer, Exchange
from tests.contract import transport_peer as peer
from tests.machine import scaled


def soon() -> Deadline:
    return Deadline.after(scaled(20))


@pytest.fixture
def server(address: str) -> Iterator[DataServer]:
    server = DataServer(address, peer.answer, name="peer")
    server.start()
    yield server
    assert server.stop(scaled(10))


@pytest.fixture
def client(server: DataServer) -> Iterator[DataClient]:
    client = DataClient(server.address)
    yield client
    client.close()


@pytest.mark.parametrize("size", [0, 1, 65536, 64 << 20])
def test_payload_comes_back_as_it_was_sent(client: DataClient, size: int) -> None:
    payload, got = random.Random(size).randbytes(size), bytearray(size)
    reply = client.call(peer.request(peer.ECHO), [payload], into=[got], deadline=soon())
    assert reply.WhichOneof("op") == "done"
    assert got == payload


def test_more_buffers_than_one_system_call_takes(client: DataClient) -> None:
    random_sizes = random.Random(5)
    count = 3 * os.sysconf("SC_IOV_MAX") + 17
    payload = [random_sizes.randbytes(random_sizes.choice((0, 1, 700, 5000))) for _ in range(count)]
    total = b"".join(payload)
    parts = [bytearray(size) for size in (7, len(total) // 2, 0)]
    parts += [bytearray(1) for _ in range(count)]
    parts.append(bytearray(len(total) - sum(map(len, parts))))
    client.call(peer.request(peer.ECHO), payload, into=parts, deadline=soon())
    assert b"".join(parts) == total


def test_buffers_of_other_shapes_and_into_chosen_by_the_reply(client: DataClient) -> None:
    seen: list[tuple[str | None, int]] = []
    got = bytearray(48)

    def choose(reply: pb.DataReply, payload_bytes: int) -> list[memoryview]:
        seen.append((reply.WhichOneof("op"), payload_bytes))
        return [memoryview(got).cast("f", (3, 4))]

    payload = memoryview(bytes(range(48))).cast("d", (2, 3))
    client.call(peer.request(peer.ECHO), [payload], into=choose, deadline=soon())
    assert seen == [("done", 48)]
    assert got == bytes(range(48))


def test_clients_at_the_same_time(server: DataServer, client: DataClient) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        try:
            for turn in range(20):
                payload = bytes([number, turn]) * (5000 + number)
                got = bytearray(len(payload))
                client.call(peer.request(peer.ECHO), [payload], into=[got], deadline=soon())
                if got != payload:
                    wrong.append((number, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(20))
    assert not wrong
    assert 1 <= server.connections <= 12


def test_a_connection_is_used_again(server: DataServer, client: DataClient) -> None:
    for _ in range(5):
        client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    assert server.connections == 1


def test_begun_calls_overlap(address: str) -> None:
    all_there = threading.Barrier(4)

    def answer(request: pb.DataRequest, exchange: Exchange) -> None:
        all_there.wait(scaled(15))
        peer.answer(request, exchange)

    server = DataServer(address, answer, name="peer")
    server.start()
    client = DataClient(server.address)
    calls = [client.begin(peer.request(peer.ECHO), [b"ab"], deadline=soon()) for _ in range(4)]
    got = [bytearray(2) for _ in calls]
    for call, into in zip(calls, got, strict=True):
        call.finish([into])
    assert got == [b"ab"] * 4
    client.close()
    assert server.stop(scaled(10))


def test_an_error_arrives_as_its_class_and_the_connection_stays(
    server: DataServer, client: DataClient
) -> None:
    with pytest.raises(StaleEpoch, match="reserve again") as caught:
        client.call(peer.request(peer.STALE), [bytes(3 << 20)], deadline=soon())
    assert (caught.value.param, caught.value.retry_after_ms) == ("epoch", 7)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    assert server.connections == 1


def test_a_mistake_in_the_handler_is_internal_and_logged(
    client: DataClient, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Internal, match="RuntimeError in write_blocks"):
        client.call(peer.request(peer.CRASH), [b"x"], deadline=soon())
    assert "a mistake" in caplog.text


def test_a_handler_that_does_not_answer_is_internal(client: DataClient) -> None:
    with pytest.raises(Internal, match="no answer"):
        client.call(peer.request(peer.SILENT), [bytes(1 << 20)], deadline=soon())


def test_unread_payload_is_thrown_away(server: DataServer, client: DataClient) -> None:
    for _ in range(3):
        client.call(peer.request(peer.IGNORE_PAYLOAD), [bytes(20 << 20)], deadline=soon())
    got = bytearray(5)
    client.call(peer.request(peer.PART, number=5), [b"hello, all of you"], into=[got], deadline=soon())
    assert got == b"hello"
    assert server.connections == 1


def test_big_payloads_in_both_directions_do_not_lock_up(client: DataClient) -> None:
    got = bytearray(32 << 20)
    client.call(peer.request(peer.GIVE, number=len(got)), [bytes(32 << 20)], into=[got], deadline=soon())


def test_a_payload_shorter_than_the_handler_needs_is_refused(client: DataClient) -> None:
    with pytest.raises(InvalidInput, match="3 bytes left where 5 belong"):
        client.call(peer.request(peer.PART, number=5), [b"abc"], deadline=soon())


def test_a_reply_of_another_size_is_data_loss(client: DataClient) -> None:
    with pytest.raises(DataLoss, match="sent 9 bytes where 8 were due"):
        client.call(peer.request(peer.GIVE, number=9), into=[bytearray(8)], deadline=soon())
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())


def test_a_stream_yields_each_reply(server: DataServer, client: DataClient) -> None:
    into = bytearray(1000)
    wanted = pb.DataRequest(get_layers=pb.GetLayers(layers=5, first_layer=99))
    layers = []
    for reply in client.stream(wanted, into=[into], replies=5, deadline=soon()):
        layers.append((reply.got_layer.layer, into[0]))
    assert layers == [(layer, layer) for layer in range(5)]
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    assert server.connections == 1


def test_a_stream_ends_where_the_peer_fails(client: DataClient) -> None:
    wanted = pb.DataRequest(get_layers=pb.GetLayers(layers=5, first_layer=1))
    stream = client.stream(wanted, into=None, replies=5, deadline=soon())
    assert [next(stream).got_layer.layer, next(stream).got_layer.layer] == [0, 1]
    with pytest.raises(StaleEpoch, match="in the middle"):
        next(stream)


def test_an_abandoned_stream_gives_its_connection_up(client: DataClient) -> None:
    wanted = pb.DataRequest(get_layers=pb.GetLayers(layers=5, first_layer=99))
    stream = client.stream(wanted, into=None, replies=5, deadline=soon())
    assert next(stream).got_layer.layer == 0
    stream.close()  # type: ignore[attr-defined]
    got = bytearray(1)
    client.call(peer.request(peer.ECHO), [b"y"], into=[got], deadline=soon())
    assert got == b"y"


def test_limits_hold_at_both_ends(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer", limits=Limits(head_bytes=100, payload_bytes=1000))
    server.start()
    strict = DataClient(server.address, limits=Limits(payload_bytes=1000))
    loose = DataClient(server.address)
    with pytest.raises(TooLarge, match="payload of 1001 bytes; the limit is 1000"):
        strict.call(peer.request(peer.ECHO), [bytes(1001)], deadline=soon())
    with pytest.raises(TooLarge, match="payload of 1001 bytes; the limit is 1000"):
        loose.call(peer.request(peer.ECHO), [bytes(1001)], deadline=soon())
    long_head = pb.DataRequest(put_layer=pb.PutLayer(tenant="t" * 200))
    with pytest.raises(TooLarge, match="head of"):
        loose.call(long_head, deadline=soon())
    loose.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    strict.close()
    loose.close()
    assert server.stop(scaled(10))


def test_connections_of_several_threads_come_and_go_at_once(address: str) -> None:
    """Some are left as soon as they are there. In a process of its own: a library that takes its memory down
    twice ends it."""
    command = [sys.executable, "-m", peer.__name__, address, "come and go"]
    done = subprocess.run(command, timeout=scaled(60), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_ends_observe(address: str) -> None:
    at_server: list[Observation] = []
    at_client: list[Observation] = []
    server = DataServer(address, peer.answer, name="peer", observer=at_server.append)
    server.start()
    client = DataClient(server.address, observer=at_client.append)
    client.call(peer.request(peer.ECHO), [bytes(300)], into=[bytearray(300)], deadline=soon())
    with pytest.raises(StaleEpoch):
        client.call(peer.request(peer.STALE), [bytes(100)], deadline=soon())
    client.close()
    assert server.stop(scaled(10))
    assert [(o.op, o.sent_bytes, o.received_bytes, o.error) for o in at_client] == [
        ("write_blocks", 300, 300, ""),
        ("write_blocks", 100, 0, "stale_epoch"),
    ]
    assert [(o.op, o.sent_bytes, o.error) for o in at_server] == [
        ("write_blocks", 300, ""),
        ("write_blocks", 0, "stale_epoch"),
    ]
    assert all(0 < o.seconds < 10 for o in at_client + at_server)
