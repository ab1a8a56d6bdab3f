"""Whatever comes in: a clear error of the right status in OpenAI's shape, nothing lost, nothing hung."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.machine import scaled
from tests.system.stack import Stack

CHAT = "/v1/chat/completions"


def send(stack: Stack, body: bytes | None, *, path: str = CHAT, method: str = "POST") -> tuple[int, Any]:
    address = urlsplit(stack.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=scaled(30))
    try:
        connection.request(method, path, body=body, headers={"Content-Type": "application/json"})
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())
    finally:
        connection.close()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}).encode()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (None, 400, None),
        (b"", 400, None),
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
        (chat(messages="Hi"), 400, "messages"),
        (chat(messages=[]), 400, "messages"),
        (chat(messages=[{"role": "wizard", "content": "Hi"}]), 400, None),
        (chat(temperature=-1), 400, "temperature"),
        (chat(temperature="warm"), 400, "temperature"),
        (chat(max_tokens=0), 400, "max_tokens"),
        (chat(n=0), 400, "n"),
        (chat(n=2, session_id="s"), 400, "n"),
        (chat(logit_bias={"x": 1}), 400, None),
        (chat(no_such_field=1), 400, "no_such_field"),
        (chat(tools=[{"type": "function"}]), 400, "tools"),
        (chat(truncation="auto"), 400, "truncation"),
        (chat(model="no-such-model"), 404, "model"),
        (chat(session_id="x" * 10_000), 400, "session_id"),
        (chat(session_id=""), 400, "session_id"),
        (chat(messages=[{"role": "user", "content": "word " * 3000}]), 400, None),
        (chat(messages=[{"role": "user", "content": "x" * (10 << 20)}]), 413, None),
    ],
    ids=lambda value: value[:60].decode(errors="replace") if isinstance(value, bytes) else None,
)
def test_bad_bodies(stack: Stack, body: bytes | None, status: int, param: str | None) -> None:
    found, answer = send(stack, body)
    assert found == status, answer
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] is not None
        assert error["param"].startswith(param)
    assert send(stack, chat())[0] == 200


def test_a_prompt_that_is_too_long_says_so(stack: Stack) -> None:
    status, answer = send(stack, chat(messages=[{"role": "user", "content": "word " * 3000}]))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/sessions/no-such-session", 404),
        ("DELETE", "/v1/sessions/no-such-session", 404),
        ("POST", "/v1/sessions/no-such-session/fork", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("GET", "/v1/sessions?limit=many", 400),
    ],
)
def test_paths_that_lead_nowhere(stack: Stack, method: str, path: str, status: int) -> None:
    found, answer = send(stack, None, path=path, method=method)
    assert found == status
    assert answer["error"].keys() == {"message", "type", "param", "code"}


def test_what_a_user_writes_stays_text(stack: Stack) -> None:
    """A control token's text in a message makes more tokens than the control token would."""

    def prompt_tokens(text: str) -> int:
        _, answer = send(stack, chat(messages=[{"role": "user", "content": text}]))
        return int(answer["usage"]["prompt_tokens"])

    assert prompt_tokens("a<|im_end|>b<|endoftext|></s>") > prompt_tokens("ab") + 6


def test_a_client_that_goes_away_frees_its_turn(stack: Stack) -> None:
    address = urlsplit(stack.url)
    body = chat(max_tokens=1500, stream=True, ignore_eos=True, session_id="left")
    for _ in range(3):
        with socket.create_connection(
            (address.hostname or "", address.port or 0), timeout=scaled(30)
        ) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200" in connection.recv(64)
        stack.assert_no_block_is_held(5)
    # What was broken off is not part of the session, which is free for its next turn.
    deadline = time.monotonic() + 5
    while (answer := send(stack, chat(session_id="left")))[0] == 409:
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    assert answer[0] == 200, answer


def test_a_second_turn_at_once_is_a_conflict(stack: Stack) -> None:
    parts = stack.client.chat("Hi", "busy", max_tokens=1500, ignore_eos=True)
    next(parts)
    status, answer = send(stack, chat(session_id="busy"))
    parts.close()
    assert (status, answer["error"]["code"]) == (409, "turn_in_progress")
