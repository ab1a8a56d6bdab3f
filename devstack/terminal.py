"""What people see of a running stack: a line per log record, bearing its service's name, and a progress
line."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

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

    def json(self) -> str:
        """The record as one line of JSON, also where the child wrote none."""
        fields = self.fields or {"ts": time.time(), "level": self.level, "message": self.text}
        return json.dumps(fields, ensure_ascii=False)

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
    """Writes lines above one progress line that is redrawn in place; without a terminal the progress line is
    printed as it changes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._progress = ""
        self._open = True

    def say(self, text: str = "") -> None:
        """Something of the stack itself."""
        self._write(text)

    def child(self, name: str, text: str, level: str = "info") -> None:
        stamp = time.strftime("%H:%M:%S")
        label = self._paint(f"{name:<{NAME_WIDTH}}", _NAME_COLOURS[sum(name.encode()) % len(_NAME_COLOURS)])
        mark = (
            ""
            if level in ("info", "output", "debug")
            else self._paint(f"{level}: ", _LEVEL_COLOURS.get(level, "31"))
        )
        for line in text.splitlines() or [""]:
            self._write(f"{self._paint(stamp, '2')} {label} {mark}{line}")

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
                self._emit(f"{text}\n")

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
