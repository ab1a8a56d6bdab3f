"""Clients without a key that hold connections, headers or answers back: others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.rest_stack import MODEL_FOLDER, KvStore, Stack, free_port, listens, stack
from tests.machine import scaled
from tests.waiting import eventually

pytest_plugins = ("tests.contract.rest_fixtures",)

KEY = "key-of-ann-1"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CLOSED = "kvcommons_http_connections_closed_total"
WAIT_S = scaled(60.0)
PATIENCE_S = scaled(1.0)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Settings of a router with one key."""
    (tmp_path / "keys").write_text(f"ann {KEY} operator\n")
    (tmp_path / "secret").write_bytes(b"s" * 32)
    return {"api_keys": str(tmp_path / "keys"), "secret_file": str(tmp_path / "secret")}


@pytest.fixture
async def keyed(socket_folder: Path, rest_store: KvStore, keys: dict[str, str]) -> AsyncIterator[Stack]:
    """A router that is quick to lose its patience."""
    settings: dict[str, Any] = {
        **keys,
        "head_s": PATIENCE_S,
        "body_s": PATIENCE_S,
        "client_stall_s": 1.0,
        "max_connections": 8,
    }
    async with stack(socket_folder, rest_store, settings=settings) as served:
        await served.show(headers=HEADERS)
        yield served


async def open_to(served: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def closed(served: Stack, reason: str) -> float:
    """How many connections the router closed for `reason`."""
    async with served.http.get("/metrics", headers=HEADERS) as response:
        assert response.status == 200
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith(f'{CLOSED}{{reason="{reason}"}}')]
    return float(lines[0].split()[-1]) if lines else 0.0


@pytest.mark.parametrize("sent", [b"", b"GET /heal", b"GET /health HTTP/1.1\r\nHost: x\r\nA: "])
async def test_headers_have_to_come_in_time(keyed: Stack, sent: bytes) -> None:
    """However they drip."""
    reader, writer = await open_to(keyed)
    writer.write(sent)
    ended = asyncio.create_task(reader.read())
    async with asyncio.timeout(WAIT_S):
        while not ended.done():
            if sent:
                writer.write(b"a")
            await asyncio.wait([ended], timeout=0.2)
    with contextlib.suppress(ConnectionError):
        ended.result()
    writer.close()
    assert await closed(keyed, "head") == 1


async def test_endless_headers_end(keyed: Stack) -> None:
    _, writer = await open_to(keyed)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    with contextlib.suppress(ConnectionError):
        for number in range(100):
            writer.write(b"A%d: " % number + b"x" * 60_000 + b"\r\n")
            await writer.drain()
    writer.close()
    await eventually(lambda: _is(closed(keyed, "head"), 1))


@pytest.mark.parametrize("headers", [HEADERS, {}], ids=["with a key", "without"])
async def test_a_body_has_to_come_in_time(keyed: Stack, headers: dict[str, str]) -> None:
    """One without a key is refused before its body is there."""
    reader, writer = await open_to(keyed)
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: 9\r\n\r\n{{".encode())
    async with asyncio.timeout(WAIT_S):
        answer = await reader.read()  # to the end: the connection is closed
    writer.close()
    assert int(answer.split()[1]) == (503 if headers else 401)
    assert (f"the body did not come within {PATIENCE_S:g} s".encode() in answer) is bool(headers)


@pytest.mark.parametrize(
    "request_head",
    [
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", id="without a key"),
        pytest.param(
            b"GET /" + b"x" * 150 + b" HTTP/1.1\r\nHost: x\r\n\r\n", id="no such path", marks=pytest.mark.slow
        ),
    ],
)
async def test_answers_have_to_be_read(keyed: Stack, request_head: bytes) -> None:
    """Refusals too, which need no key."""
    host, _, port = keyed.url.removeprefix("http://").rpartition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        with contextlib.suppress(ConnectionError):
            deadline_s = time.monotonic() + WAIT_S
            while await closed(keyed, "unread") == 0:
                with contextlib.suppress(BlockingIOError):
                    client.send(request_head * 100)
                assert time.monotonic() < deadline_s, "a client that reads nothing keeps its connection"
                await asyncio.sleep(0.01)
    assert await closed(keyed, "unread") == 1


async def test_idle_connections_give_way_and_streams_go_on(keyed: Stack) -> None:
    keyed.says("one two three four")
    keyed.script.delay_s = 0.3
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with keyed.http.post("/v1/chat/completions", json=body, headers=HEADERS) as streaming:
        assert streaming.status == 200
        kept = [await open_to(keyed) for _ in range(40)]
        async with aiohttp.ClientSession(keyed.url) as another:
            async with another.get("/v1/models", headers=HEADERS) as response:
                assert response.status == 200
        assert (await streaming.read()).endswith(b"data: [DONE]\n\n")
    for _, writer in kept:
        writer.close()
    assert await closed(keyed, "displaced") >= 30


async def test_a_client_that_finds_no_place_gets_an_error(socket_folder: Path, rest_store: KvStore) -> None:
    async with stack(socket_folder, rest_store, settings={"max_connections": 2}) as served:
        await served.show()
        served.says("one two three four")
        served.script.delay_s = 0.5
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with (
            served.http.post("/v1/chat/completions", json=body) as first,
            served.http.post("/v1/chat/completions", json=body) as second,
            aiohttp.ClientSession(served.url) as third,
        ):
            assert first.status == second.status == 200
            async with third.get("/v1/models") as refused:
                assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
                assert (await refused.json())["error"]["code"] == "overloaded"
            for stream in (first, second):
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")


@pytest.fixture
def router_url(tmp_path: Path, socket_folder: Path, keys: dict[str, str]) -> Iterator[str]:
    """A router process that may open 1,024 files, as processes may by default, until it asks for more."""
    port = free_port()
    settings = {
        "LISTEN": f"unix:{socket_folder}/router.sock",
        "LEDGER": f"unix:{socket_folder}/nobody.sock",
        "MODEL": str(MODEL_FOLDER),
        "PORT": str(port),
        "API_KEYS": keys["api_keys"],
        "SECRET_FILE": keys["secret_file"],
    }
    log = (tmp_path / "log").open("w+b")
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"ulimit -Sn 1024; exec {sys.executable} -m services.router"],
        env=os.environ | {f"KVCOMMONS_ROUTER__{name}": value for name, value in settings.items()},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not listens(port):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WAIT_S)
        log.close()


async def test_a_flood_of_connections_keeps_no_key_out(router_url: str) -> None:
    """1,100 of them, from the address from which the client comes, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    host, _, port = router_url.removeprefix("http://").rpartition(":")
    kept = []
    try:
        for _ in range(1100):
            kept.append(await asyncio.open_connection(host, int(port)))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as client:
            async with client.get(f"{router_url}/metrics", headers=HEADERS) as response:
                assert response.status == 200
    finally:
        for _, writer in kept:
            writer.transport.abort()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _is(found: Any, expected: Any) -> bool:
    return bool(await found == expected)
