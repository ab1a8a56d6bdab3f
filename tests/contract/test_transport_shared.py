"""shm: addresses: who makes the memory, who may do without, and what happens where there is none."""

from __future__ import annotations

import array
import contextlib
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcommons.errors import DataLoss, DeadlineExceeded, InvalidInput
from kvcommons.transport import rings
from kvcommons.transport.addresses import connect, listen
from kvcommons.transport.base import Limits
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.framed import FramedConnection
from kvcommons.transport.server import DataServer
from kvcommons.transport.shared import SharedTransport
from kvcommons.transport.sockets import SocketStream
from tests.contract import transport_peer as peer
from tests.machine import scaled

ROOT = Path(__file__).parents[2]
PAYLOAD = random.Random(7).randbytes(9 << 20)


def soon() -> Deadline:
    return Deadline.after(scaled(20))


def mappings() -> int:
    """How many connections' memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:kvcommons-rings")


def descriptors() -> int:
    """Of such memory that are open here: what else tests before left open may be closed at any time."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += "memfd:kvcommons-rings" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def echo(address: str) -> None:
    client = DataClient(address)
    got = bytearray(len(PAYLOAD))
    client.call(peer.request(peer.ECHO), [PAYLOAD], into=[got], deadline=soon())
    assert got == PAYLOAD
    client.close()


@pytest.fixture
def address(socket_folder: Path) -> str:
    return f"shm:{socket_folder}/data"


@pytest.mark.parametrize("ring_bytes", [rings.RING_BYTES_MIN, rings.RING_BYTES, 32 << 20])
def test_both_ends_map_the_memory_and_give_it_back(address: str, ring_bytes: int) -> None:
    server = DataServer(address, peer.answer, name="peer", ring_bytes=ring_bytes)
    server.start()
    client = DataClient(address)
    got = bytearray(len(PAYLOAD))
    for _ in range(2):
        client.call(peer.request(peer.ECHO), [PAYLOAD], into=[got], deadline=soon())
        assert got == PAYLOAD
    assert mappings() == 2
    client.close()
    assert server.stop(scaled(10))
    assert mappings() == 0


def test_a_client_may_decline(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer")
    server.start()
    client = DataClient(address, rings=False)
    got = bytearray(len(PAYLOAD))
    client.call(peer.request(peer.ECHO), [PAYLOAD], into=[got], deadline=soon())
    assert got == PAYLOAD
    assert mappings() == 0
    connections = [connection for connection, _ in client._kept] + list(server._serving)
    assert [connection.bare() is not None for connection in connections] == [True, True]
    client.close()
    assert server.stop(scaled(10))


def test_a_server_may_offer_none(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer", ring_bytes=0)
    server.start()
    connection = connect(address, soon())
    assert mappings() == 0
    connection.close()
    echo(address)
    assert server.stop(scaled(10))


def test_where_the_system_gives_none_frames_go_over_the_socket(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = DataServer(address, peer.answer, name="peer", ring_bytes=64 << 20)
    server.start()
    # Shared memory counts as a file here.
    with limited(resource.RLIMIT_FSIZE, 32 << 20):
        echo(address)
    assert "no shared memory" in caplog.text
    assert server.stop(scaled(10))


@contextlib.contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def limit_room() -> None:
    """Takes from this process the room for two rings of 256 MiB; stacks and arenas of some threads fit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + (450 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def serve_where_nothing_can_be_mapped(address: str) -> None:
    """Serves until its input ends."""
    server = DataServer(address, peer.answer, name="peer", ring_bytes=rings.RING_BYTES_MAX)
    limit_room()
    server.start()
    print(flush=True)
    sys.stdin.read()
    assert server.stop(scaled(10))
    assert mappings() == 0


def echo_where_nothing_can_be_mapped(address: str) -> None:
    limit_room()
    echo(address)
    assert mappings() == 0


@contextlib.contextmanager
def limited_process(function: Callable[[str], None], address: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `function` in a process of its own: what else comes and goes in pytest's would change the room.
    Ends with what it logged in `stderr`, and without a process."""
    code = f"from {__name__} import {function.__name__} as run; run({address!r})"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def test_where_the_server_cannot_map_it_frames_go_over_the_socket(address: str) -> None:
    with limited_process(serve_where_nothing_can_be_mapped, address) as child:
        assert child.stdout is not None
        child.stdout.readline()
        echo(address)
        _, logged = child.communicate(timeout=scaled(20))
        assert child.returncode == 0, logged
    assert "cannot map shared memory" in logged
    assert mappings() == 0


def test_where_the_client_cannot_map_it_frames_go_over_the_socket(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer", ring_bytes=rings.RING_BYTES_MAX)
    server.start()
    with limited_process(echo_where_nothing_can_be_mapped, address) as child:
        _, logged = child.communicate(timeout=scaled(20))
        assert child.returncode == 0, logged
    assert "cannot map shared memory" in logged
    assert server.stop(scaled(10))
    assert mappings() == 0


def test_a_peer_that_takes_none_is_served_over_the_socket(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer")
    server.start()
    raw = FramedConnection(SocketStream(peer.connect_raw(address), address), address, Limits())
    request = peer.request(peer.ECHO)
    request.deadline_ms = 10_000
    raw.send(request.SerializeToString(), [b"hello"], soon())
    got = bytearray(5)
    assert raw.receive_head(soon())[1] == 5
    raw.receive_payload([got], soon())
    assert got == b"hello"
    assert mappings() == 0
    raw.close()
    assert server.stop(scaled(10))


def test_a_ring_of_an_odd_size_is_refused(address: str) -> None:
    for size in (1, rings.RING_BYTES_MIN + 1, 2 * rings.RING_BYTES_MAX):
        with pytest.raises(InvalidInput, match="whole pages"):
            listen(address, ring_bytes=size)


def test_a_peer_that_speaks_without_greeting_gets_an_error(address: str) -> None:
    server = DataServer(address, peer.answer, name="peer")
    server.start()
    client = DataClient(address.replace("shm:", "unix:"))
    with pytest.raises(DataLoss, match="begins with b'KVCM'"):
        client.call(peer.request(peer.ECHO), [b"x"], deadline=soon())
    client.close()
    assert server.stop(scaled(10))


def greeting(ring_bytes: int, *, version: int = 1, flags: int = 1) -> bytes:
    return struct.pack("<4sHHQ", b"KVCM", version, flags, ring_bytes)


@pytest.fixture
def offers(socket_folder: Path) -> Iterator[socket.socket]:
    """A socket on which a test offers what it likes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{socket_folder}/data")
        listener.listen(5)
        yield listener


@pytest.mark.parametrize(
    ("said", "memory", "message"),
    [
        (b"HTTP/1.1 400 Bad", None, "not a greeting"),
        (greeting(rings.RING_BYTES)[:9], None, "not a greeting"),
        (greeting(rings.RING_BYTES, version=2), rings.RING_BYTES, "version 2"),
        (greeting(0), rings.RING_BYTES, "run one version"),
        (greeting(rings.RING_BYTES), None, "without its descriptor"),
        (greeting(rings.RING_BYTES), rings.RING_BYTES_MIN, "shared memory of 131072 bytes"),
    ],
)
def test_a_bad_offer_is_refused_and_its_descriptor_closed(
    offers: socket.socket, address: str, said: bytes, memory: int | None, message: str
) -> None:
    before = descriptors()

    def offer() -> None:
        sock, _ = offers.accept()
        with sock:
            if memory is None:
                sock.sendall(said)
            else:
                descriptor = rings.create(memory)
                ancillary = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
                sock.sendmsg([said], [ancillary])
                os.close(descriptor)
            sock.recv(1)

    thread = threading.Thread(target=offer)
    thread.start()
    with pytest.raises(DataLoss, match=message):
        connect(address, soon())
    thread.join(10)
    assert descriptors() == before
    assert mappings() == 0


def test_a_listener_that_offers_nothing_costs_the_deadline(offers: socket.socket, address: str) -> None:
    with pytest.raises(DeadlineExceeded):
        SharedTransport().connect(address.removeprefix("shm:"), Limits(), Deadline.after(0.1))
