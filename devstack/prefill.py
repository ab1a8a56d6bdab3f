"""`kvcommons prefill`: gives a session a document and shows how far it is.

The stack goes on with it whatever becomes of this command: it can be called again without a file to look on.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from devstack.program import program
from devstack.rest import RestClient
from kvcommons.errors import KVCommonsError, NotFound, TurnInProgress, Unavailable

State = dict[str, Any]

AWAY_S_MAX = 600.0  # a server that does not answer for so long is given up
_RETRY_S = 1.0
_INTERRUPTED = 130


def prefill(
    client: RestClient,
    session_id: str,
    file: str | None,
    *,
    role: str | None,
    model: str | None,
    cancel: bool,
) -> int:
    """The exit status. `file`: "-" reads standard input; None looks at the document that is on its way."""
    path = f"/v1/sessions/{quote(session_id, safe='')}/prefill"
    again = f"{program()} prefill{client.option} --session {shlex.quote(session_id)}"
    try:
        if cancel:
            state = client.delete(path)
            print(f"Ended at {_figures(state)}: the session is as it was before.")
            return 0
        if file is not None:
            _begin(client, path, _read(file), role, model)
        try:
            return _watch(client, path)
        except KeyboardInterrupt:
            print(f"\nThe document goes on without this command. To see it: {again}")
            print(f"To end it: {again} --cancel")
            return _INTERRUPTED
    except KVCommonsError as error:
        print(f"kvcommons prefill: {error.message}", file=sys.stderr)
        return 1
    except (OSError, UnicodeDecodeError) as error:
        print(f"kvcommons prefill: {file} cannot be read as text: {error}", file=sys.stderr)
        return 1


def _read(file: str) -> str:
    return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")


def _begin(client: RestClient, path: str, content: str, role: str | None, model: str | None) -> None:
    """Once, though the answer may be lost: where there is a document then, it is this one."""
    body = {"content": content} | ({"role": role} if role else {}) | ({"model": model} if model else {})
    try:
        client.post(path, body)
    except TurnInProgress as error:
        try:
            client.get(path)
        except NotFound:
            raise error from None
        print("A document is on its way into this session already, and this one was not taken.")
    except Unavailable:
        if not client.reachable():
            time.sleep(_RETRY_S)
        try:
            client.get(path)
        except NotFound:
            client.post(path, body)


def _watch(client: RestClient, path: str) -> int:
    shown = _shown()
    try:
        for state in _states(client, path):
            shown.update(state)
    finally:
        shown.close()
    if state["status"] == "completed":
        print(f"{state['tokens']} tokens are in the session {state['session_id']}. To talk about them:")
        print(f"{program()} chat{client.option} --session {shlex.quote(state['session_id'])}")
        return 0
    why = f": {state['error']['message']}" if state["error"] else ""
    print(f"The document {state['status']} at {_figures(state)}{why}", file=sys.stderr)
    return 1


def _states(client: RestClient, path: str) -> Iterator[State]:
    """To the last one, over as many connections as it takes. Raises Unavailable, NotFound."""
    heard_s = time.monotonic()
    state: State = {}
    while True:
        try:
            with closing(client.events(f"{path}?stream=true")) as events:
                for state in events:
                    heard_s = time.monotonic()
                    yield state
                    if state["status"] != "running":
                        return
        except Unavailable:  # loading and the store's absence are that, too
            if time.monotonic() - heard_s > AWAY_S_MAX:
                raise
        except NotFound:  # it came to its end, and so did the router that knows how
            if not state or client.session(state["session_id"])["tokens"] < state["tokens"]:
                raise
            yield state | {"status": "completed"}
            return
        time.sleep(_RETRY_S)


class _Shown(Protocol):
    def update(self, state: State) -> None: ...

    def close(self) -> None: ...


def _shown() -> _Shown:
    return _Bar() if sys.stdout.isatty() else _Lines()


class _Lines:
    """One for each state that is new."""

    def __init__(self) -> None:
        self._last = ""

    def update(self, state: State) -> None:
        line = _figures(state)
        if line != self._last:
            print(line, flush=True)
        self._last = line

    def close(self) -> None:
        """Nothing is open."""


class _Bar:
    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn  # takes long to import

        self._progress = Progress(BarColumn(bar_width=None), TextColumn("{task.description}"), expand=True)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def update(self, state: State) -> None:
        done, total = state["computed_tokens"], state["tokens"]
        self._progress.update(self._task, description=_figures(state), completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()


def _figures(state: State) -> str:
    parts = [f"{state['percent']:g}% of {state['tokens']} tokens"]
    if state["tokens_per_s"]:
        parts.append(f"{state['tokens_per_s']:.0f} tokens/s")
    if state["seconds_left"]:
        parts.append(f"{_duration(state['seconds_left'])} left")
    if state["waits_for"]:
        parts.append(f"waits: {state['waits_for']}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
