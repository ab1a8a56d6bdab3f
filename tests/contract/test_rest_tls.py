"""The REST API by HTTPS: what it says to clients without TLS, how certificates are renewed, and that clients
who open connections, or leave answers unread, are bounded as without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from devstack.rest import RestClient
from kvcommons.config import Node
from kvcommons.errors import InvalidInput, Unavailable
from services.router.config import RouterConfig
from services.router.http.certificate import Certificate
from tests.certificates import write_certificate
from tests.contract.rest_stack import KvStore, Stack, stack
from tests.machine import scaled
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

CHAT = "/v1/chat/completions"
CLOSED = "kvcommons_http_connections_closed_total"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@contextlib.asynccontextmanager
async def secured(folder: Path, store: KvStore, **settings: object) -> AsyncIterator[Stack]:
    cert, key = write_certificate(folder, "server")
    tls = {"tls_cert": str(cert), "tls_key": str(key), **settings}
    async with stack(folder, store, settings=tls) as served:
        await served.show()
        yield served


def port_of(served: Stack) -> int:
    return int(served.url.rpartition(":")[2])


def certificate_of(served: Stack) -> bytes:
    """Of the certificate that a new connection sees, as DER."""
    trust = ssl.create_default_context()
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port_of(served)), scaled(10)) as plain:
        with trust.wrap_socket(plain) as connection:
            der = connection.getpeercert(binary_form=True)
    assert der is not None
    return der


async def test_the_api_is_served_by_tls_and_clients_know_by_whom(
    socket_folder: Path, rest_store: KvStore
) -> None:
    async with secured(socket_folder, rest_store) as served:
        served.says("hello there")
        cert = str(socket_folder / "server.pem")
        for client in (RestClient(served.url, ca=cert), RestClient(served.url, own=cert)):
            turn = await asyncio.to_thread(client.say, "hi", None, max_tokens=8)
            assert turn.text == "hello there"
            assert f"--url {served.url} --ca {cert}" in client.option
        other, _ = write_certificate(socket_folder, "other")
        for stranger in (
            RestClient(served.url),
            RestClient(served.url, ca=str(other)),
            RestClient(served.url, own=str(other)),
        ):
            with pytest.raises(Unavailable, match="--ca"):
                await asyncio.to_thread(stranger.get, "/v1/models")


async def test_a_command_is_told_what_to_set_where_it_cannot_know_the_server(
    socket_folder: Path, rest_store: KvStore
) -> None:
    """With http:// where it serves HTTPS, the reverse, an authority that is not known, and another name."""

    async def said(url: str, ca: str = "") -> str:
        client = RestClient(url, ca=ca)
        with pytest.raises(Unavailable) as asked:
            await asyncio.to_thread(client.get, "/v1/status")
        with pytest.raises(Unavailable) as reported:
            await asyncio.to_thread(client.say, "hi", None)
        assert asked.value.message == reported.value.message
        return asked.value.message

    async with secured(socket_folder, rest_store) as served:
        plain = served.url.replace("https", "http")
        assert f"it serves HTTPS: set --url {served.url} (KVCOMMONS_URL)" in await said(plain)
        unknown = await said(served.url)
        assert "set --ca (KVCOMMONS_CA) to a PEM file with its authority" in unknown
        cert = str(socket_folder / "server.pem")
        named = f"https://localhost:{port_of(served)}"
        assert "call it by a name" in await said(named, cert)
    async with stack(socket_folder, rest_store) as served:
        await served.show()
        secure = served.url.replace("http", "https")
        hint = f"it serves without TLS: set --url {served.url} (KVCOMMONS_URL)"
        assert hint in await said(secure)
        assert hint in await said(secure, cert)


async def test_a_call_without_tls_is_told_what_to_do(socket_folder: Path, rest_store: KvStore) -> None:
    async with secured(socket_folder, rest_store, head_s=scaled(1)) as served:
        async with aiohttp.ClientSession() as http:
            async with http.post(f"http://127.0.0.1:{port_of(served)}{CHAT}", json=HI) as response:
                error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "invalid_value")
        assert "https://" in error["message"]
        assert served.engines[0].decode.jobs == []
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(served))
        writer.write(b"\x00 noise")  # and stays
        assert b"https://" in await reader.read()
        writer.close()


async def test_connections_that_do_not_finish_their_handshake_make_room(
    socket_folder: Path, rest_store: KvStore
) -> None:
    async with secured(
        socket_folder, rest_store, max_connections=4, max_connections_per_address=4, head_s=scaled(2)
    ) as served:
        served.says("hello")
        opened = [await asyncio.open_connection("127.0.0.1", port_of(served)) for _ in range(12)]
        for at, (_, writer) in enumerate(opened):
            writer.write(b"\x16" if at % 2 else b"\x16\x03\x01\x02\x00\x01")  # as TLS begins
        assert (await served.post(CHAT, HI))[0] == 200
        for reader, _ in opened:  # each was displaced, or its time for a request ran out
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), scaled(15))
        for _, writer in opened:
            writer.close()
        assert (await served.post(CHAT, HI))[0] == 200


async def test_a_client_that_reads_nothing_by_tls_loses_its_connection(
    socket_folder: Path, rest_store: KvStore
) -> None:
    async with secured(socket_folder, rest_store, client_stall_s=1.0) as served:
        trust = ssl.create_default_context(cafile=str(socket_folder / "server.pem"))
        asking = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20
        with socket.socket() as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.settimeout(scaled(10))
            await asyncio.to_thread(plain.connect, ("127.0.0.1", port_of(served)))
            with await asyncio.to_thread(trust.wrap_socket, plain, server_hostname="127.0.0.1") as client:
                client.setblocking(False)

                async def given_up() -> bool:
                    with contextlib.suppress(ssl.SSLWantWriteError, OSError):
                        client.send(asking)
                    async with served.http.get("/metrics") as response:
                        return f'{CLOSED}{{reason="unread"}} 1.0' in await response.text()

                await eventually(given_up, within_s=60)


async def test_a_renewed_certificate_is_served_and_a_damaged_one_is_not(
    socket_folder: Path, rest_store: KvStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with secured(socket_folder, rest_store) as served:
        served.says("hello")
        cert, key = socket_folder / "server.pem", socket_folder / "server.key"
        seen = await asyncio.to_thread(certificate_of, served)
        renewed = write_certificate(socket_folder, "renewed")
        ended = write_certificate(socket_folder, "ended", from_days=-9, to_days=-1)
        damages = {
            "key values mismatch": (renewed[0].read_bytes(), key.read_bytes()),
            "ended on": (ended[0].read_bytes(), ended[1].read_bytes()),
            "no PEM certificate": (b"garbage", key.read_bytes()),
        }
        for reason, (one, other) in damages.items():
            caplog.clear()
            cert.write_bytes(one)
            key.write_bytes(other)
            await eventually(lambda reason=reason: reason in caplog.text)
            assert "stays as it was" in caplog.text
            assert await asyncio.to_thread(certificate_of, served) == seen
        cert.write_bytes(renewed[0].read_bytes())
        key.write_bytes(renewed[1].read_bytes())
        await eventually(lambda: "another one now" in caplog.text)
        now = await asyncio.to_thread(certificate_of, served)
        assert now == ssl.PEM_cert_to_DER_cert(renewed[0].read_text())
        # The connection that is open since before goes on.
        assert (await served.post(CHAT, HI))[0] == 200


def test_what_cannot_be_served_is_said_at_the_start(tmp_path: Path) -> None:
    cert, key = (str(path) for path in write_certificate(tmp_path, "server"))
    assert isinstance(Certificate(cert, key).context, ssl.SSLContext)
    other = str(write_certificate(tmp_path, "other")[1])
    late = [str(path) for path in write_certificate(tmp_path, "late", from_days=1, to_days=2)]
    ended = [str(path) for path in write_certificate(tmp_path, "ended", from_days=-2, to_days=-1)]
    sealed = [str(path) for path in write_certificate(tmp_path, "sealed", passphrase=b"secret")]
    for files, reason in (
        ((cert, other), "mismatch"),
        ((cert, str(tmp_path / "none")), "cannot be read"),
        ((key, key), "no PEM certificate"),
        ((cert, cert), "cannot be served"),
        (late, "begins on"),
        (ended, "ended on"),
        (sealed, "passphrase"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            Certificate(*files)
    settings = {"node": Node(listen="unix:/x"), "ledger": ("unix:/y",), "model": "z"}
    for given in ("tls_cert", "tls_key"):
        with pytest.raises(InvalidInput, match=f"{given} without"):
            RouterConfig(**settings, **{given: cert})  # type: ignore[arg-type]


def test_a_client_says_what_is_wrong_with_its_ca(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    for ca in ("empty", "none"):
        with pytest.raises(InvalidInput, match="authority"):
            RestClient("https://127.0.0.1:1", ca=str(tmp_path / ca))
    with pytest.raises(InvalidInput, match="without TLS"):
        RestClient("http://127.0.0.1:1", ca=str(tmp_path / "empty"))
