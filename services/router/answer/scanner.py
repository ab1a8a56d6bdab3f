"""Reads the JSON object of one call while its text comes, each character once. Pure."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any

_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\]+')  # in a string
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset((*_ARGUMENTS, "name", "id", "type"))


class _At(Enum):
    """What comes next in the call's object."""

    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    END = auto()


class CallScanner:
    """Finds where {"name": …, "arguments": {…}} ends, and its name and arguments on the way.

    `failed` once the text cannot be a call, `done` at its closing brace; then `valid` says whether it is JSON
    and a call. What is read is not checked further on the way."""

    def __init__(self, name: str | None = None) -> None:
        """`name`: of a call that stands before its object, which is its arguments then."""
        self.name = name
        self.failed = False
        self.done = False
        self._whole = name is not None
        self._at = _At.OBJECT
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = "arguments" if self._whole else ""
        self._word: list[str] = []  # the key, or the name, that is being read
        self._read: list[str] = []
        self._pieces: list[str] = []  # of the arguments, not taken yet
        self._value_begun = False
        self._seen: set[str] = set()  # keys of the object
        self.in_arguments = False  # they have begun, as an object: their text may be shown as it comes

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._read)

    def push(self, text: str) -> int:
        """How many characters were read: all, or those up to the call's end, or to where it `failed`."""
        at = 0
        while at < len(text) and not self.done:
            end = at + 1
            if self._in_string and not self._escaped and (plain := _PLAIN.match(text, at)):
                end = plain.end()
            self._step(text[at:end])
            if self.failed:
                break
            at = end
        self._read.append(text[:at])
        return at

    def take_arguments(self) -> str:
        """The text of the arguments that has come since this was called last."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def call(self) -> tuple[str, str] | None:
        """Name and arguments of a call that is `done`; None where it is no call after all."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        arguments = self.take_arguments() or "{}"
        if self._whole:
            return (self.name or "", arguments)
        given = next((value[key] for key in _ARGUMENTS if key in value), None)
        if isinstance(given, str):  # JSON in JSON
            arguments, given = given, _parsed(given)
        elif given is None:
            arguments, given = "{}", {}
        name = value.get("name")
        return (name, arguments) if isinstance(name, str) and isinstance(given, dict) else None

    def _step(self, text: str) -> None:
        """The next character, or several in a string."""
        if self._in_string:
            self._in_a_string(text)
        elif self._depth > (0 if self._whole else 1):
            self._collect(text)
            self._nest(text)
        elif self._at is _At.OBJECT:
            self._begin(text)
        elif self._at is _At.KEY and text == '"':
            self._in_string = True
            self._word.clear()
        elif self._at is _At.COLON and text == ":":
            self._at = _At.VALUE
            self._value_begun = False
            self._word.clear()
        elif self._at is _At.VALUE or text == "}":
            self._value(text)
        elif text not in _SPACE:
            self.failed = True

    def _begin(self, text: str) -> None:
        if text == "{":
            self._at = _At.KEY
            self._depth = 1
            self.in_arguments = self._whole
            if self._whole:
                self._collect(text)
        elif text not in _SPACE:
            self.failed = True

    def _in_a_string(self, text: str) -> None:
        if self._at is _At.KEY and not self._whole:
            if text != '"' or self._escaped:
                self._word.append(text)
        else:
            self._collect(text)
        if self._escaped:
            self._escaped = False
        elif text == "\\":
            self._escaped = True
        elif text == '"':
            self._in_string = False
            if self._at is _At.KEY and not self._whole:
                self._key = key = "".join(self._word)
                self._at = _At.COLON
                kind = "arguments" if key in _ARGUMENTS else key
                self.failed = key not in _KEYS or kind in self._seen
                self._seen.add(kind)

    def _value(self, text: str) -> None:
        """Between the values of the object, or at the beginning of one."""
        if text in ",}":
            self._value_ended()
            self._at = _At.KEY
            self.done = text == "}"
        elif text not in _SPACE:
            if self._key in _ARGUMENTS and not self._value_begun:
                self.in_arguments = text == "{"
            self._value_begun = True
            self._collect(text)
            self._nest(text)

    def _value_ended(self) -> None:
        if self._key == "name" and self._at is _At.VALUE:
            name = _parsed("".join(self._word))
            self.failed = not isinstance(name, str)
            self.name = name if isinstance(name, str) else None

    def _nest(self, text: str) -> None:
        if text == '"':
            self._in_string = True
        elif text in "{[":
            self._depth += 1
        elif text in "}]":
            self._depth -= 1
            self.done = self._whole and not self._depth

    def _collect(self, text: str) -> None:
        if self._key in _ARGUMENTS:
            self._pieces.append(text)
        elif self._key == "name":
            self._word.append(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
