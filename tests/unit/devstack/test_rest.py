"""The client of the server's REST doors."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import threading
from typing import Any

import pytest

from devstack.cli import main
from devstack.rest import RestClient
from tests.machine import scaled

EVENTS = b'data: {"piece": 1}\n\n' * 3
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def test_a_stream_that_is_left_closes_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and not when the collector comes by: an error that keeps the stream's frame may live long."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended: list[bytes] = []
        thread = threading.Thread(target=_serve_one, args=(server, ended))
        thread.start()
        stream = RestClient(f"http://127.0.0.1:{server.getsockname()[1]}").tokens([1])
        assert next(stream) == {"piece": 1}
        kept = _thrown_into(stream)
        thread.join(scaled(5))
        assert ended == [b""], "the server still waits for its client"
    del stream, kept
    gc.collect()
    assert not unraisable


def _serve_one(server: socket.socket, ended: list[bytes]) -> None:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(scaled(5))
        asked = b""
        while not asked.endswith(b"}"):  # the head and the body come apart
            asked += connection.recv(65536)
        connection.sendall(HEAD + EVENTS)
        with contextlib.suppress(TimeoutError):
            ended.append(connection.recv(1))


def _thrown_into(stream: Any) -> Exception:
    try:
        stream.throw(RuntimeError("the reader failed"))
    except RuntimeError as error:
        return error
    raise AssertionError("the stream kept the error")


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://host", "http://", "http://[::1", "http://host:99999", "http://host:a", "http://ho st",
        "http://a..b", "http://" + "a" * 80,
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["chat"], ["status"], ["prefill", "--session", "one"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--url", url])
        assert ended.value.code == 2
        assert f"--url: {url!r} is no address of a server" in capsys.readouterr().err


def test_a_key_that_no_header_takes_is_named_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCOMMONS_API_KEY", "key-of-ann\n")
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "KVCOMMONS_API_KEY" in said
    assert "key-of-ann" not in said


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b""])
@pytest.mark.parametrize("command", [["chat"], ["status"], ["prefill", "--session", "one"]])
def test_another_program_at_the_address_is_no_traceback(
    body: bytes, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_one, args=(server, answer))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        cancel = ["--cancel"] if command[0] == "prefill" else []
        assert main([*command, *cancel, "--url", url]) == 1
        thread.join(scaled(5))
    assert f"what answers at {url} is no kvcommons" in capsys.readouterr().err


def _answer_one(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(scaled(5))
        connection.recv(65536)
        connection.sendall(answer)


def test_a_missing_key_is_told_with_where_it_is_put(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"error": {"message": "no API key was given", "code": "invalid_api_key"}}'
    answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_one, args=(server, answer))
        thread.start()
        assert main(["status", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 1
        thread.join(scaled(5))
    assert "KVCOMMONS_API_KEY" in capsys.readouterr().err


def test_a_hint_has_the_address_where_it_is_another_one() -> None:
    assert RestClient().option == ""
    assert RestClient("127.0.0.1:8000/").option == ""
    assert RestClient("http://host:9").option == " --url http://host:9"
