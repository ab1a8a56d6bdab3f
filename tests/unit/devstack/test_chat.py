"""What a conversation in the terminal takes besides messages, against a server of the test's own."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from devstack.cli import main
from tests.machine import scaled


class _Server(BaseHTTPRequestHandler):
    """The paths that chat asks; every message is answered with its length. What a real router makes of them
    is the business of tests/system/test_terminal.py."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": "demo"}]})
        elif self.path == "/v1/sessions/told":
            messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
            self._send(200, {"id": "told", "messages": messages, "tokens": 17})
        else:
            error = {"code": "session_not_found", "message": "no such session"}
            self._send(404, {"error": error})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/sessions":
            self._send(201, {"id": "sess-new"})
            return
        said = body["messages"][0]["content"]
        if said == "fail":
            self._send(503, {"error": {"code": "unavailable", "message": "nothing is ready"}})
            return
        heard = {"choices": [{"delta": {"content": f"{body['session_id']} heard {said!r}"}}]}
        usage = {"prompt_tokens": 7, "completion_tokens": said.count(" ") + 1}
        events = [heard, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._reply(200, text.encode())

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._reply(status, json.dumps(body).encode())

    def _reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is the test's."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(scaled(5))


@pytest.fixture
def chatting(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def chat(text: str, *arguments: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["chat", "--url", url, *arguments]) == status
        captured = capsys.readouterr()
        assert captured.err == ("error: nothing is ready\n" if status else "")
        return str(captured.out)

    return chat


def test_help_lists_the_commands_and_exit_leaves(chatting: Any, url: str) -> None:
    said = chatting("/help\n/exit\nnot sent\n")
    for word in ("/help", "/session", "/exit"):
        assert word in said
    assert "heard" not in said
    assert said.splitlines()[-1].endswith(f"chat --url {url} --session sess-new")


def test_session_shows_where_one_is_and_goes_elsewhere(chatting: Any) -> None:
    said = chatting("/session\nfirst\n/session told\n/session\nsecond\n")
    assert "sess-new is a new session." in said
    assert "sess-new heard 'first'" in said
    assert "user> hello" in said
    assert "told: 2 messages, 17 tokens" in said
    assert "told heard 'second'" in said
    assert said.splitlines()[-1].endswith("--session told")


def test_what_is_no_command_is_told_or_sent(chatting: Any) -> None:
    said = chatting("/halp\n /halp\n/etc/hosts is a file\n")
    assert "There is no command /halp" in said
    assert "heard ' /halp'" in said
    assert "heard '/etc/hosts is a file'" in said
    assert said.count("heard") == 2


def test_an_answer_that_is_an_error_fails_a_script_and_goes_to_stderr(chatting: Any) -> None:
    said = chatting("fail\nhello\n", status=1)
    assert "error" not in said
    assert "heard 'hello'" in said


def test_an_answer_of_a_token_or_two_has_no_rate(chatting: Any) -> None:
    one, two, three = (chatting(text).splitlines()[1] for text in ("a\n", "a b\n", "a b c\n"))
    for tiny in (one, two):
        assert tiny.startswith("[first token ")
        assert "tokens/s" not in tiny
    assert "tokens/s, 0 of 7 prompt tokens cached]" in three


def test_an_id_that_a_shell_would_divide_is_quoted(chatting: Any) -> None:
    assert chatting("", "--session", "my cat").splitlines()[-1].endswith("--session 'my cat'")


def test_ctrl_c_at_the_prompt_says_how_to_leave(chatting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([KeyboardInterrupt, "/exit"])

    def typed(_: str) -> str:
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    monkeypatch.setattr("builtins.input", typed)
    said = chatting("")
    assert "/exit or Ctrl-D leaves" in said
    assert "--session sess-new" in said
