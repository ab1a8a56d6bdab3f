"""What a running stack writes: for people a line per log record (time, level, service, message) and a
progress line, for programs a JSON object a line."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

_LEVELS = {"warn": "warning", "dpanic": "error", "panic": "critical", "fatal": "critical"}
_LEVEL_COLOURS = {"warning": "33", "error": "31", "critical": "31"}
_NAME_COLOURS = ("36", "32", "35", "34", "96", "92", "95", "94")
# In every line of a service, and said otherwise (by its name, its time) or of no use to a person.
_UNSHOWN = {
    "ts",
    "time",
    "level",
    "service",
    "instance",
    "logger",
    "caller",
    "message",
    "msg",
    "exception",
    "trace_id",
}
NAME_WIDTH = 16
LEVEL_WIDTH = 8
_OWN_NAME = "up"  # as whom the stack itself speaks

LogFormat = Literal["auto", "text", "json"]


class Record:
    """One line that a child wrote: a JSON log record, or whatever else it said."""

    __slots__ = ("fields", "level", "text")

    def __init__(self, line: str) -> None:
        self.fields: dict[str, Any] = {}
        try:
            document = json.loads(line) if line.startswith("{") else None
        except ValueError:
            document = None
        if isinstance(document, dict):
            self.fields = document
            level = str(document.get("level", "info")).lower()
            self.level = _LEVELS.get(level, level)
            self.text = str(document.get("message") or document.get("msg") or "")
        else:
            self.level = "output"  # not a log record: a traceback, a library's print
            self.text = line

    def json(self, **more: str) -> str:
        """The record as one line of JSON, also where the child wrote none; `more` are further fields."""
        fields = self.fields or {"ts": _now(), "level": self.level, "message": self.text}
        return json.dumps({**fields, **more}, ensure_ascii=False)

    def summary(self) -> str:
        """As `human`, without the way to an exception."""
        *_, last = str(self.fields.get("exception", "")).strip().splitlines() or [""]
        return f"{self.text}: {last}" if last else self.human()

    def human(self) -> str:
        extras = [
            f"{name}={value}" for name, value in self.fields.items() if name not in _UNSHOWN and value != ""
        ]
        text = "  ".join([self.text, *extras])
        return f"{text}\n{self.fields['exception']}" if "exception" in self.fields else text


class Terminal:
    """Writes lines above one progress line that is redrawn in place; where that cannot be, the progress line
    is printed as it changes."""

    def __init__(self, stream: TextIO | None = None, form: LogFormat = "text") -> None:
        """`form`: "auto" is text on a terminal, else JSON."""
        self._stream = stream or sys.stdout
        self._progress = ""
        self._open = True
        self.write_as(form)

    def write_as(self, form: LogFormat) -> None:
        """From now on."""
        terminal = self._stream.isatty()
        self._json = form == "json" or (form == "auto" and not terminal)
        self._live = terminal and not self._json

    def say(self, text: str = "", level: str = "info") -> None:
        """Something of the stack itself."""
        self._write(self._own(text, level))

    def child(self, name: str, record: Record) -> None:
        if self._json:
            self._write(record.json(process=name))
            return
        stamp = self._paint(time.strftime("%H:%M:%S"), "2")
        level = self._paint(f"{record.level:<{LEVEL_WIDTH}}", _LEVEL_COLOURS.get(record.level, "2"))
        label = self._paint(f"{name:<{NAME_WIDTH}}", _NAME_COLOURS[sum(name.encode()) % len(_NAME_COLOURS)])
        for line in record.human().splitlines() or [""]:
            self._write(f"{stamp} {level} {label} {line}")

    def progress(self, text: str, *, tick: str = "") -> None:
        """Replaces the progress line; empty text removes it. `tick` moves, and is for a terminal only."""
        if self._live:
            line = f"{tick}{text}"
            if line != self._progress:
                self._progress = line
                self._emit(f"\r\x1b[K{line}")
        elif text != self._progress:
            self._progress = text
            if text:
                self._emit(f"{self._own(text)}\n")

    def _own(self, text: str, level: str = "info") -> str:
        if not self._json:
            return text
        return json.dumps(
            {"ts": _now(), "level": level, "service": _OWN_NAME, "message": text}, ensure_ascii=False
        )

    def _write(self, text: str) -> None:
        if self._live and self._progress:
            self._emit(f"\r\x1b[K{text}\n{self._progress}")
        else:
            self._emit(f"{text}\n")

    def _emit(self, text: str) -> None:
        """A terminal that has gone away must not take the stack's orderly end with it."""
        if not self._open:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._open = False

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._live else text


def _now() -> str:
    """As services write it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
