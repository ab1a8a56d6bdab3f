"""What every transport must do when peers die, stall, leave, or are none."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

import pytest

from kvcommons.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    InvalidInput,
    KVCommonsError,
    Overloaded,
    Unavailable,
    UnsupportedParameter,
)
from kvcommons.pb import data_pb2 as pb
from kvcommons.transport.addresses import connect, listen
from kvcommons.transport.base import Limits
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.frame import pack
from kvcommons.transport.server import DataServer, Exchange
from tests.contract import transport_peer as peer
from tests.machine import scaled
from tests.pausing import pause
from tests.waiting import wait_until


def soon() -> Deadline:
    return Deadline.after(scaled(10))


def turned_away(why: str) -> AbstractContextManager[object]:
    """What a client hears of a server that cannot serve it: `why`, where it need not show first who it is."""
    if peer.network().keeps_out:
        return pytest.raises(Unavailable, match=r"closed the connection|went away")
    return pytest.raises(Overloaded, match=why)


class Held:
    """A handler that answers once it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, request: pb.DataRequest, exchange: Exchange) -> None:
        self.begun.set()
        self.go.wait(scaled(60))
        peer.answer(request, exchange)


@pytest.fixture
def process(address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A data server in a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, str(Path(peer.__file__)), address], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        yield process, process.stdout.readline().strip()
        process.kill()
        process.wait(10)


def test_a_call_past_its_deadline_fails_in_time_and_the_client_goes_on(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer")
    server.start()
    client = DataClient(server.address)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="until the deadline"):
        client.call(peer.request(peer.SLEEP, number=3000), deadline=Deadline.after(0.2))
    assert 0.2 <= time.monotonic() - started < scaled(3)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()
    assert server.stop(20)


def test_a_killed_peer_is_noticed_at_once(process: tuple[subprocess.Popen[str], str]) -> None:
    child, address = process
    client = DataClient(address)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    threading.Timer(0.2, child.kill).start()
    deadline = soon()
    with pytest.raises(Unavailable, match=r"went away|closed the connection"):
        client.call(peer.request(peer.SLEEP, number=9000), deadline=deadline)
    assert deadline.left() > 2
    child.wait(10)
    with pytest.raises(Unavailable, match="is it running"):
        client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()


def test_a_peer_killed_while_it_is_sent_to_is_noticed(process: tuple[subprocess.Popen[str], str]) -> None:
    child, address = process
    client = DataClient(address)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    pause(child.pid)
    threading.Timer(0.3, child.kill).start()
    deadline = soon()
    with pytest.raises(Unavailable, match=r"went away|closed the connection"):
        client.call(peer.request(peer.ECHO), [bytes(64 << 20)], deadline=deadline)
    assert deadline.left() > 2
    client.close()


@pytest.mark.parametrize("size", [1, 64 << 20])
def test_a_paused_peer_costs_the_deadline(process: tuple[subprocess.Popen[str], str], size: int) -> None:
    child, address = process
    client = DataClient(address)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    pause(child.pid)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="slow, paused or unreachable"):
        client.call(peer.request(peer.ECHO), [bytes(size)], deadline=Deadline.after(0.3))
    assert 0.3 <= time.monotonic() - started < scaled(8)
    client.close()


def test_a_restarted_peer_is_called_again_without_an_error(socket_folder: Path) -> None:
    address = f"unix:{socket_folder}/data"
    first = DataServer(address, peer.answer, name="first")
    first.start()
    client = DataClient(address)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    assert first.stop(scaled(10))
    second = DataServer(address, peer.answer, name="second")
    second.start()
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()
    assert second.stop(scaled(10))


def test_stopping_a_server_fails_the_calls_under_way(address: str) -> None:
    held = Held()
    server = DataServer(address, held, name="peer")
    server.start()
    client = DataClient(server.address)
    call = client.begin(peer.request(peer.ECHO), deadline=soon())
    assert held.begun.wait(scaled(10))
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(server.stop, scaled(20))
        with pytest.raises(Unavailable):
            call.finish()
        held.go.set()
        assert stopping.result(), "the handler was let go"
    with pytest.raises(Unavailable, match="is it running"):
        client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()


def test_stop_is_bounded_where_a_handler_is_not(address: str) -> None:
    held = Held()
    server = DataServer(address, held, name="peer")
    server.start()
    client = DataClient(server.address)
    call = client.begin(peer.request(peer.ECHO), deadline=soon())
    assert held.begun.wait(scaled(10))
    assert not server.stop(0.2)
    held.go.set()
    call.cancel()
    client.close()
    wait_until(lambda: not server.connections)


def test_a_waiting_call_can_be_aborted_from_another_thread(address: str) -> None:
    held = Held()
    server = DataServer(address, held, name="peer")
    server.start()
    client = DataClient(server.address)
    call = client.begin(peer.request(peer.ECHO), deadline=soon())
    threading.Timer(0.05, call.abort).start()
    with pytest.raises(Unavailable):
        call.finish()
    held.go.set()
    client.close()
    assert server.stop(scaled(10))


def test_one_connection_too_many_gets_an_error(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer", max_connections=2)
    server.start()
    clients = [DataClient(server.address) for _ in range(3)]
    for client in clients[:2]:
        client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    for size in (1, 8 << 20):
        with turned_away("2 connections already"):
            clients[2].call(peer.request(peer.ECHO), [bytes(size)], deadline=soon())
    clients[0].close()
    wait_until(lambda: server.connections < 2)
    clients[2].call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    for client in clients:
        client.close()
    assert server.stop(scaled(10))


def test_a_server_that_can_start_no_thread_says_so_and_serves_the_next(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = DataServer(address, peer.answer, name="peer")
    server.start()
    client = DataClient(server.address)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if "-data-" in thread.name:
            raise RuntimeError("can't start new thread")  # what Python says where the system has no memory
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with turned_away("no thread for a connection"):
            client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    assert server.connections == 0
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()
    assert server.stop(scaled(10))


@pytest.mark.parametrize(
    ("sent", "error", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", DataLoss, "not a data frame"),
        (b"KVCF" + bytes([2, 0]) + bytes(14), DataLoss, "version 2"),
        (pack(5, 0, Limits()) + b"\xff" * 5, DataLoss, "no DataRequest"),
        (pack(0, 0, Limits()), InvalidInput, "no deadline"),
    ],
)
def test_garbage_is_refused_with_a_reason(
    address: str, sent: bytes, error: type[KVCommonsError], message: str
) -> None:
    server = DataServer(address, peer.answer, name="peer")
    server.start()
    raw = peer.connect_raw(server.address)
    raw.sendall(sent)
    answer = raw.recv(10000)
    detail = pb.DataReply.FromString(answer[20:]).error
    assert detail.code == error.code
    assert message in detail.message
    raw.close()
    client = DataClient(server.address)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()
    assert server.stop(scaled(10))


def test_a_thread_that_is_about_to_end_is_waited_for(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is gone already when the server is stopped. It ends once it is waited for."""
    join, waited_for = threading.Thread.join, threading.Event()

    def joining(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name.startswith("lingering-data"):
            waited_for.set()
        join(thread, timeout)

    def linger(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_name == "_serve":
            waited_for.wait(scaled(20))

    monkeypatch.setattr(threading.Thread, "join", joining)

    threading.setprofile(linger)
    try:
        server = DataServer(f"unix:{socket_folder}/data", peer.answer, name="lingering")
        server.start()
        client = DataClient(server.address)
        client.call(peer.request(peer.ECHO), [b"1"], deadline=soon())
        client.close()
        wait_until(lambda: not server.connections)
        assert server.stop(scaled(5))
        assert not [one.name for one in threading.enumerate() if one.name.startswith("lingering")]
    finally:
        threading.setprofile(None)
        waited_for.set()


def test_no_descriptor_and_no_thread_is_left(address: str) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    gc.collect()  # of what tests before this one left
    before = count()
    chance = random.Random(3)
    for _ in range(3):
        server = DataServer(address, peer.answer, name="peer", max_connections=4)
        server.start()
        clients = [DataClient(server.address, kept_max=1) for _ in range(3)]
        for _ in range(30):
            what = chance.choice((peer.ECHO, peer.STALE, peer.IGNORE_PAYLOAD, peer.GIVE))
            try:
                into = [bytearray(4)] if chance.random() < 0.2 else None
                chance.choice(clients).call(peer.request(what), [bytes(100_000)], into=into, deadline=soon())
            except KVCommonsError:
                pass
        for client in clients:
            client.close()
        assert server.stop(scaled(10))
    wait_until(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))


def test_an_address_in_use_is_an_error_and_a_dead_ones_socket_is_not(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    child, address = process
    with pytest.raises(AlreadyExists, match="in use"):
        listen(address)
    client = DataClient(address)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())  # still served
    client.close()
    child.kill()
    child.wait(10)
    server = DataServer(address, peer.answer, name="heir")
    server.start()
    assert server.address == address
    assert server.stop(scaled(10))


def test_a_stopped_unix_server_leaves_no_file_and_takes_no_other(socket_folder: Path) -> None:
    path = socket_folder / "data"
    first = DataServer(f"unix:{path}", peer.answer, name="first")
    path.unlink()
    second = DataServer(f"unix:{path}", peer.answer, name="second")
    first.stop(scaled(1))
    assert path.is_socket()
    second.stop(1)
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(AlreadyExists, match="no socket"):
        listen(f"unix:{path}")
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("host:1", InvalidInput, "no data address"),
        ("", InvalidInput, "no data address"),
        ("tcp:host", InvalidInput, "tcp:host:port"),
        ("tcp:host:70000", InvalidInput, "tcp:host:port"),
        ("unix:relative", InvalidInput, "write unix: and an absolute path"),
        ("shm:relative", InvalidInput, "write shm: and an absolute path"),
        ("unix:/" + "x" * 120, InvalidInput, "at most 107"),
    ],
)
def test_a_bad_address_says_what_is_wrong(bad: str, error: type[KVCommonsError], message: str) -> None:
    with pytest.raises(error, match=message):
        connect(bad, soon())
    with pytest.raises(error, match=message):
        listen(bad)


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is not None, reason="the extra ucx is installed")
def test_ucx_without_its_package_names_the_extra() -> None:
    for use in (lambda: connect("ucx:host:1", soon()), lambda: listen("ucx:127.0.0.1:0")):
        with pytest.raises(UnsupportedParameter, match=r"kvcommons\[ucx\]"):
            use()


def test_a_name_that_does_not_exist_is_unavailable() -> None:
    with pytest.raises((Unavailable, DeadlineExceeded)):
        connect("tcp:no-such-host.invalid:1", Deadline.after(3))


def test_a_name_is_looked_up() -> None:
    server = DataServer("tcp:localhost:0", peer.answer, name="peer")
    server.start()
    client = DataClient(server.address)
    client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()
    assert server.stop(scaled(10))
