"""Whom a data plane over TCP lets in, and whom its clients believe, where services know each other by
certificates or by a token: everybody else is refused, the log says so once for each, and others go on."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvcommons.errors import InvalidInput, KVCommonsError, Unavailable, UntrustedPeer
from kvcommons.pb import data_pb2 as pb
from kvcommons.security.authority import make_certificates
from kvcommons.security.certificate import ServiceCertificate
from kvcommons.security.credentials import OPEN, Credentials
from kvcommons.security.roles import Role
from kvcommons.security.token import SharedToken
from kvcommons.transport.addresses import connect, listen
from kvcommons.transport.client import DataClient
from kvcommons.transport.deadline import Deadline
from kvcommons.transport.server import DataServer
from tests.certificates import sign_certificate
from tests.contract import transport_peer as peer
from tests.machine import scaled
from tests.waiting import wait_until

TOKEN = Credentials(token=SharedToken(b"a token of this very stack"))
OTHER_TOKEN = Credentials(token=SharedToken(b"a token of another stack"))


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "pki", datetime.now(UTC))
    return tmp_path / "pki"


def of(pki: Path, service: str) -> Credentials:
    return Credentials(certificate=ServiceCertificate(pki / service, service))


@contextlib.contextmanager
def serving(credentials: Credentials, *, max_connections: int = 8) -> Iterator[str]:
    server = DataServer(
        "tcp:127.0.0.1:0",
        peer.answer,
        name="peer",
        credentials=credentials,
        max_connections=max_connections,
    )
    server.start()
    try:
        yield server.address
    finally:
        assert server.stop(scaled(10))


def echo(address: str, credentials: Credentials, role: Role = "holder") -> None:
    """A call as a service with these credentials makes it."""
    client = DataClient(address, role=role, credentials=credentials)
    back = bytearray(6)
    try:
        client.call(peer.request(peer.ECHO), [b"secret"], into=[back], deadline=Deadline.after(scaled(6)))
    finally:
        client.close()
    assert back == b"secret"


def raw(address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), scaled(10))


def said_by(address: str, context: ssl.SSLContext) -> bytes:
    """What a client of this context is told, when it asks for something as soon as it may."""
    with raw(address) as plain:
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            with context.wrap_socket(plain, server_hostname="holder.kvcommons") as tls:
                tls.sendall(peer_frame())
                return tls.recv(100)
    return b""


def peer_frame() -> bytes:
    """A whole request, byte by byte."""
    head = peer.request(peer.GIVE, number=8)
    head.deadline_ms = 5000
    text = head.SerializeToString()
    return b"KVCF" + bytes([1, 0, 0, 0]) + len(text).to_bytes(4, "little") + bytes(8) + text


def attacker(folder: Path | None, authority: Path) -> ssl.SSLContext:
    """A client with the certificate of a folder, which believes in our authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority / "ca.crt")
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]


def test_services_of_one_authority_serve_each_other(pki: Path) -> None:
    with serving(of(pki, "decode")) as address:
        echo(address, of(pki, "prefill"))
        echo(address, of(pki, "attention_pool"), role="decode")


def test_clients_without_a_services_certificate_get_nothing(
    pki: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path / "other", datetime.now(UTC))
    authority, role = pki / "authority", ["decode.kvcommons"]
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(authority / "ca.crt")
    old.load_cert_chain(pki / "decode" / "tls.crt", pki / "decode" / "tls.key")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    attacks = {
        "no certificate": attacker(None, authority),
        "another authority's": attacker(tmp_path / "other" / "decode", authority),
        "one that has ended": attacker(
            sign_certificate(authority, tmp_path / "ended", names=role, from_days=-9, to_days=-1), authority
        ),
        "one that has not begun": attacker(
            sign_certificate(authority, tmp_path / "unborn", names=role, from_days=2), authority
        ),
        "one that is no service's": attacker(
            sign_certificate(authority, tmp_path / "website", names=["chat.example.org"]), authority
        ),
        "a version of TLS before ours": old,
    }
    with serving(of(pki, "decode")) as address:
        for number, (name, attack) in enumerate(attacks.items(), 1):
            assert said_by(address, attack) == b"", name
            wait_until(lambda number=number: len(refusals(caplog)) == number)
        echo(address, of(pki, "prefill"))
    assert any("no service's of this stack" in line for line in refusals(caplog))


def test_a_client_without_tls_is_told_what_to_do(pki: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(of(pki, "decode")) as address:
        for credentials in (OPEN, TOKEN):
            with pytest.raises(KVCommonsError) as refused:
                echo(address, credentials)
            if credentials is OPEN:
                assert "have certificates in its settings" in refused.value.message
        echo(address, of(pki, "prefill"))
    assert "wrong version number" in caplog.text


def test_a_server_that_is_not_the_service_is_given_nothing(pki: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "other", datetime.now(UTC))
    caller = of(pki, "decode")
    for posing, says in (
        (of(tmp_path / "other", "kvstore"), "its certificate says otherwise"),
        (of(pki, "attention_pool"), "not kvstore.kvcommons of this stack"),
        (OPEN, "does not make a handshake"),
    ):
        taken: list[pb.DataRequest] = []
        server = DataServer(
            "tcp:127.0.0.1:0",
            lambda request, _, taken=taken: taken.append(request),
            name="posing",
            credentials=posing,
        )
        server.start()
        with pytest.raises(UntrustedPeer, match=says):
            echo(server.address, caller, role="kvstore")
        assert server.stop(scaled(10))
        assert taken == []


@pytest.mark.parametrize("kind", ["certificates", "token"])
def test_strangers_that_say_nothing_or_noise_keep_nobody_out(
    pki: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = of(pki, "decode") if kind == "certificates" else TOKEN
    with serving(credentials, max_connections=4) as address:
        noises = (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", bytes(99), b"KVCT")
        strangers = []
        for said in noises * 4:
            stranger = raw(address)
            strangers.append(stranger)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said)
        echo(address, credentials)  # beside those that stay, who give their places
        # And those that stay are gone in time, whether they began or not.
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                while stranger.recv(1000):
                    pass
            stranger.close()
        echo(address, credentials)


def test_known_connections_are_not_displaced_by_strangers(pki: Path) -> None:
    credentials = of(pki, "decode")
    with serving(credentials, max_connections=2) as address:
        client = DataClient(address, credentials=credentials)
        client.call(peer.request(peer.ECHO), [b"x"], deadline=Deadline.after(scaled(6)))
        strangers = [raw(address) for _ in range(12)]
        wait_until(lambda: sum(_is_closed(one) for one in strangers) >= 10)
        assert client.connected()
        client.call(peer.request(peer.ECHO), [b"x"], deadline=Deadline.after(scaled(6)))
        client.close()
        for stranger in strangers:
            stranger.close()


def _is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_server_that_never_finishes_its_handshake_costs_the_deadline(pki: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"tcp:127.0.0.1:{listening.getsockname()[1]}"
        for credentials in (of(pki, "decode"), TOKEN):
            started = time.monotonic()
            with pytest.raises(KVCommonsError, match="until the deadline"):
                connect(address, Deadline.after(0.3), credentials=credentials)
            assert time.monotonic() - started < scaled(2)


def test_stopping_does_not_wait_for_a_handshake(pki: Path) -> None:
    server = DataServer("tcp:127.0.0.1:0", peer.answer, name="peer", credentials=of(pki, "decode"))
    server.start()
    with raw(server.address) as stranger:
        stranger.sendall(b"\x16\x03\x01\x02\x00\x01")
        wait_until(lambda: server.connections == 1)
        assert server.stop(scaled(2)), "a thread of it has not ended"


def test_a_renewed_certificate_is_shown_to_the_next_connection(
    pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcommons.security.certificate.LOOK_S", 0.0)
    with serving(of(pki, "decode")) as address:
        before = of(pki, "prefill")
        kept = DataClient(address, credentials=before)
        kept.call(peer.request(peer.ECHO), [b"x"], deadline=Deadline.after(scaled(6)))
        monkeypatch.setattr("kvcommons.security.certificate.LOOK_S", 1e9)  # the client's stays as it is
        strange = of(pki, "prefill")
        monkeypatch.setattr("kvcommons.security.certificate.LOOK_S", 0.0)
        make_certificates(tmp_path / "anew", datetime.now(UTC))
        for name in ("ca.crt", "tls.key", "tls.crt"):
            (pki / "decode" / name).write_bytes((tmp_path / "anew" / "decode" / name).read_bytes())
        with pytest.raises(UntrustedPeer):
            echo(address, strange)
        echo(address, of(tmp_path / "anew", "prefill"))
        # Who was let in before goes on.
        kept.call(peer.request(peer.ECHO), [b"x"], deadline=Deadline.after(scaled(6)))
        kept.close()


def test_frames_of_many_small_and_large_buffers_arrive_as_they_were_sent(pki: Path) -> None:
    credentials = of(pki, "decode")
    payload = [bytes([n % 251]) * size for n, size in enumerate([1, 0, 16383, 16384, 16385, 3, 200_000] * 30)]
    size = sum(map(len, payload))
    with serving(credentials) as address:
        client = DataClient(address, credentials=credentials)
        back = [bytearray(size // 3), bytearray(size - size // 3)]
        client.call(peer.request(peer.ECHO), payload, into=back, deadline=Deadline.after(scaled(10)))
        assert b"".join(back) == b"".join(payload)
        client.close()


def test_a_token_lets_in_and_another_one_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with serving(TOKEN) as address:
        echo(address, TOKEN)
        with pytest.raises(UntrustedPeer, match="does not take this service's token"):
            echo(address, OTHER_TOKEN)
        with pytest.raises(UntrustedPeer, match="set token_file"):
            echo(address, OPEN)
        echo(address, TOKEN)
        wait_until(lambda: len(refusals(caplog)) == 2)
    with serving(OTHER_TOKEN) as address, pytest.raises(UntrustedPeer):
        echo(address, TOKEN)
    with serving(OPEN) as address, pytest.raises(KVCommonsError, match="until the deadline"):
        echo(address, TOKEN)


def test_a_proof_that_was_overheard_is_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    """A relay records what one client says, and says it again on a connection of its own."""
    with serving(TOKEN) as address:
        heard = bytearray()

        def relay(listening: socket.socket) -> None:
            client, _ = listening.accept()
            with client, raw(address) as server:

                def back() -> None:
                    with contextlib.suppress(OSError):
                        while said := server.recv(1 << 16):
                            client.sendall(said)

                answering = threading.Thread(target=back)
                answering.start()
                while said := client.recv(1 << 16):
                    heard.extend(said)
                    server.sendall(said)
                server.shutdown(socket.SHUT_RDWR)
                answering.join()

        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            relaying = threading.Thread(target=relay, args=(listening,))
            relaying.start()
            echo(f"tcp:127.0.0.1:{listening.getsockname()[1]}", TOKEN)
            relaying.join()
        assert b"secret" in heard  # a token seals nothing
        assert b"a token of" not in heard
        with raw(address) as again:
            assert again.recv(24, socket.MSG_WAITALL).startswith(b"KVCT")
            again.sendall(heard)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while said := again.recv(1000):
                    answer += said
            assert b"secret" not in answer
        assert "does not have this stack's token" in caplog.text


@pytest.mark.parametrize("kind", ["certificates", "token"])
def test_ucx_is_for_networks_that_are_said_to_be_private(pki: Path, kind: str) -> None:
    known = of(pki, "decode") if kind == "certificates" else TOKEN
    with pytest.raises(UntrustedPeer, match="private_network"):
        connect("ucx:127.0.0.1:1", Deadline.after(1), credentials=known)
    with pytest.raises(InvalidInput, match="private_network"):
        listen("ucx:127.0.0.1:0", credentials=known)
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("needs the extra ucx")
    private = Credentials(certificate=known.certificate, token=known.token, private_network=True)
    listen("ucx:127.0.0.1:0", credentials=private).close()
    with pytest.raises(Unavailable, match="is it running"):
        connect("ucx:127.0.0.1:1", Deadline.after(scaled(3)), credentials=private)


def test_services_of_two_authorities_meet_while_one_takes_the_others_place(pki: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path / "next", datetime.now(UTC))
    both = b"".join((folder / "authority" / "ca.crt").read_bytes() for folder in (pki, tmp_path / "next"))
    for folder in (pki, tmp_path / "next"):
        (folder / "decode" / "ca.crt").write_bytes(both)
    for serves, calls in ((pki, tmp_path / "next"), (tmp_path / "next", pki)):
        with serving(of(serves, "decode")) as address:
            echo(address, of(calls, "decode"))
