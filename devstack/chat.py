"""`kvcommons chat`: a conversation in the terminal.

Ctrl-C stops the answer under way (such a turn is not kept), Ctrl-D or /exit leaves.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence

from devstack.program import program
from devstack.rest import Piece, RestClient, Turn
from kvcommons.errors import KVCommonsError, SessionNotFound, TurnInProgress

# A turn that was just stopped may still be leaving the server.
LEAVING_S_MAX = 3.0
# One or two tokens have come before the turn's end has, and a rate would say how long that took.
RATED_TOKENS_MIN = 3
# What is a word after a slash is meant as a command; a path is a message.
_COMMAND = re.compile(r"/[a-z]+")
_HELP = """\
/session      this session's id, how long it is, and how to go on with it
/session ID   go on with another one; an unused id begins a session
/exit         leave; the session stays
/help         this
Anything else is a message. Ctrl-C stops an answer, whose turn is then not kept."""


def chat(client: RestClient, session_id: str | None) -> int:
    """Talks until the end of input; the exit status."""
    try:
        models = [model["id"] for model in client.get("/v1/models")["data"]]
        if session_id is None:
            session_id = str(client.post("/v1/sessions", {})["id"])
        else:
            _recall(client, session_id)
    except KVCommonsError as error:
        print(f"kvcommons chat: {error.message}", file=sys.stderr)
        return 1
    return _Conversation(client, session_id).hold(models)


class _Conversation:
    def __init__(self, client: RestClient, session_id: str) -> None:
        self._client = client
        self._session_id = session_id
        self._failed = False

    def hold(self, models: Sequence[str]) -> int:
        """Line by line, until /exit or the end of input. The exit status: 1 where a line of a script (input
        that is no terminal) failed; a person has seen it."""
        if sys.stdin.isatty():
            import readline  # noqa: F401 - gives input() its line editing

            print(f"{', '.join(models)} at {self._client.url}, session {self._session_id}.")
            print("/help lists commands. Ctrl-C stops an answer, Ctrl-D leaves.")
        while True:
            try:
                line = input("you> " if sys.stdin.isatty() else "")
            except EOFError:
                print()
                break
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D leaves)")
                continue
            word, _, argument = line.rstrip().partition(" ")
            if word in ("/exit", "/quit"):
                break
            if _COMMAND.fullmatch(word):
                self._command(word, argument.strip())
            elif line.strip():
                self._answer(line)
        print(f"Go on later with: {self._again(self._session_id)}")
        return int(self._failed and not sys.stdin.isatty())

    def _command(self, word: str, argument: str) -> None:
        if word == "/help":
            print(_HELP)
        elif word == "/session":
            try:
                self._show() if not argument else self._go_to(argument)
            except KVCommonsError as error:
                self._fail(error)
            except KeyboardInterrupt:
                print()
        else:
            print(
                f"There is no command {word}: /help lists them. To send it as a message, begin with a space."
            )

    def _show(self) -> None:
        try:
            found = self._client.session(self._session_id)
        except SessionNotFound:
            print(f"{self._session_id} is a new session.")
        else:
            messages = len(found.get("messages") or [])
            print(f"{self._session_id}: {messages} messages, {found.get('tokens', 0)} tokens")
        print(f"To go on with it elsewhere: {self._again(self._session_id)}")

    def _go_to(self, session_id: str) -> None:
        _recall(self._client, session_id)
        self._session_id = session_id
        print(f"(session {session_id})")

    def _answer(self, message: str) -> None:
        try:
            _stream_once_free(self._client, message, self._session_id)
        except KVCommonsError as error:
            self._fail(error)
        except KeyboardInterrupt:
            print("\n(stopped; this turn is not kept)")

    def _fail(self, error: KVCommonsError) -> None:
        self._failed = True
        sys.stdout.flush()  # what was answered before comes before it where both go to one place
        print(f"error: {error.message}", file=sys.stderr)

    def _again(self, session_id: str) -> str:
        return f"{program()} chat{self._client.option} --session {shlex.quote(session_id)}"


def _recall(client: RestClient, session_id: str) -> None:
    """Shows where a session stands. An id that nobody has used begins a session, so its absence is no
    error."""
    try:
        messages = client.session(session_id).get("messages") or []
    except SessionNotFound:
        print(f"{session_id} is a new session.")
        return
    for message in messages[-4:]:
        print(f"{message['role']}> {message['content']}")


def _stream_once_free(client: RestClient, message: str, session_id: str) -> None:
    """Raises TurnInProgress where another turn of the session stays under way."""
    deadline = time.monotonic() + LEAVING_S_MAX
    while True:
        try:
            _stream(client, message, session_id)
            return
        except TurnInProgress:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _stream(client: RestClient, message: str, session_id: str) -> None:
    parts = client.chat(message, session_id)
    try:
        for part in parts:
            if isinstance(part, Piece):
                print(part.text, end="", flush=True)
            else:
                print(f"\n{_dim(_figures(part))}")
    finally:
        parts.close()


def _figures(turn: Turn) -> str:
    rate = f"{turn.tokens_per_s:.0f} tokens/s, " if turn.completion_tokens >= RATED_TOKENS_MIN else ""
    return (
        f"[first token {turn.ttft_s * 1000:.0f} ms, {rate}"
        f"{turn.cached_tokens} of {turn.prompt_tokens} prompt tokens cached]"
    )


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text
