"""`kvcommons chat`: a conversation in the terminal.

Ctrl-C stops the answer under way (such a turn is not kept), Ctrl-D leaves.
"""

from __future__ import annotations

import shlex
import sys
import time

from devstack.program import program
from devstack.rest import Piece, RestClient, Turn
from kvcommons.errors import KVCommonsError, SessionNotFound, TurnInProgress

# A turn that was just stopped may still be leaving the server.
LEAVING_S_MAX = 3.0


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
    if sys.stdin.isatty():
        import readline  # noqa: F401 - gives input() its line editing

        print(f"{', '.join(models)} at {client.url}, session {session_id}.")
        print("Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            message = input("you> " if sys.stdin.isatty() else "")
        except EOFError:
            print(f"\nGo on later with: {program()} chat{client.option} --session {shlex.quote(session_id)}")
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if message.strip():
            _answer(client, message, session_id)


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


def _answer(client: RestClient, message: str, session_id: str) -> None:
    deadline = time.monotonic() + LEAVING_S_MAX
    while True:
        try:
            _stream(client, message, session_id)
        except TurnInProgress as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            print(f"error: {error.message}")
        except KVCommonsError as error:
            print(f"error: {error.message}")
        except KeyboardInterrupt:
            print("\n(stopped; this turn is not kept)")
        return


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
    return (
        f"[first token {turn.ttft_s * 1000:.0f} ms, {turn.tokens_per_s:.0f} tokens/s,"
        f" {turn.cached_tokens} of {turn.prompt_tokens} prompt tokens cached]"
    )


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text
