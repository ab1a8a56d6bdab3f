"""A data server for the transport's conformance suite, in-process or as a process of its own that tests may
kill.

A request says in WriteBlocks.layer what it wants done; see `answer`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcommons.errors import StaleEpoch
from kvcommons.pb import data_pb2 as pb
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.security.token import SharedToken
from kvcommons.transport import addresses
from kvcommons.transport.addresses import connect
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer, Exchange
from kvcommons.transport.tcp import TcpTransport

# In the environment: a file with a token, or a folder with certificates, by which all in a test's processes
# know each other over TCP.
NETWORK = "TEST_NETWORK"

ECHO, SLEEP, STALE, CRASH, IGNORE_PAYLOAD, SILENT, GIVE, PART = range(8)


def request(what: int, *, number: int = 0) -> pb.DataRequest:
    return pb.DataRequest(write_blocks=pb.WriteBlocks(layer=what, blocks=number))


def answer(request: pb.DataRequest, exchange: Exchange) -> None:
    if request.WhichOneof("op") == "get_layers":
        for layer in range(request.get_layers.layers):
            reply = pb.DataReply(got_layer=pb.GotLayer(layer=layer))
            exchange.reply(reply, [bytes([layer]) * 1000])
            if layer == request.get_layers.first_layer:
                raise StaleEpoch("gone in the middle")
        return
    what, number = request.write_blocks.layer, request.write_blocks.blocks
    payload: list[bytearray] = []
    if what in (ECHO, SLEEP):
        payload = [bytearray(exchange.payload_bytes)]
        exchange.receive_payload(payload)
    if what == SLEEP:
        time.sleep(number / 1000)
    elif what == STALE:
        raise StaleEpoch("the holder has restarted: reserve again", param="epoch", retry_after_ms=7)
    elif what == CRASH:
        raise RuntimeError("a mistake")
    elif what == SILENT:
        return
    elif what == GIVE:
        payload = [bytearray(number)]
    elif what == PART:
        payload = [bytearray(number)]
        exchange.receive_payload(payload)
    exchange.reply(pb.DataReply(done=pb.Done()), payload)


def connect_raw(address: str) -> socket.socket:
    """A connection on which bytes are frames, or not: a peer that wants neither shared memory nor UCX."""
    scheme, _, rest = address.partition(":")
    on_port = scheme in ("tcp", "ucx")
    raw = socket.socket(socket.AF_INET if on_port else socket.AF_UNIX)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", int(rest.rpartition(":")[2])) if on_port else rest)
    if scheme == "tcp":
        return _introduced(raw)
    if scheme == "shm":
        assert raw.recv(16, socket.MSG_WAITALL).startswith(b"KVCM")
        raw.sendall(b"KVCM" + bytes([1, 0]) + bytes(10))
    if scheme == "ucx":
        greeting = raw.recv(12, socket.MSG_WAITALL)
        assert greeting.startswith(b"KVCX")
        raw.recv(int.from_bytes(greeting[8:], "little"), socket.MSG_WAITALL)
        raw.sendall(b"KVCX" + bytes([2, 0]) + bytes(6))
    return raw


def network() -> Credentials:
    shown = os.environ.get(NETWORK)
    if shown is None:
        return OPEN
    if Path(shown).is_dir():
        return Credentials(certificate=ServiceCertificate(Path(shown), "decode"))
    return Credentials(token=SharedToken.read(Path(shown)))


def secured_transport(role: Role, credentials: Credentials) -> TcpTransport:
    """In the place of TcpTransport: with the network's credentials, whatever the test gives."""
    return TcpTransport(role, network())


def _introduced(raw: socket.socket) -> socket.socket:
    credentials = network()
    if credentials.certificate is not None:
        context = credentials.certificate.files().client
        return context.wrap_socket(raw, server_hostname="holder.kvcommons")
    if credentials.token is not None:
        challenge = raw.recv(24, socket.MSG_WAITALL)
        assert challenge.startswith(b"KVCT")
        drawn = bytes(16)
        raw.sendall(challenge[:8] + drawn + credentials.token.prove(b"connect", challenge[8:], drawn))
        assert len(raw.recv(40, socket.MSG_WAITALL)) == 40
    return raw


def come_and_go(address: str) -> None:
    """Connections of several threads, both ends of each in this process."""
    server = DataServer(address, answer, name="peer")
    server.start()

    def connect_and_leave(number: int) -> None:
        for turn in range(16):
            if (turn + number) % 2:
                connect(server.address, Deadline.after(60)).close()
                continue
            client = DataClient(server.address)
            client.call(request(ECHO), [bytes(300_000)], deadline=Deadline.after(60))
            client.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(connect_and_leave, range(3)))
    assert server.stop(60)


def main() -> None:
    addresses.TcpTransport = secured_transport  # type: ignore[misc,assignment]
    if sys.argv[2:] == ["come and go"]:
        come_and_go(sys.argv[1])
        return
    server = DataServer(sys.argv[1], answer, name="peer")
    server.start()
    print(server.address, flush=True)
    threading.Event().wait(60)


if __name__ == "__main__":
    main()
