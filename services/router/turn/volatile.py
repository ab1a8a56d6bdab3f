"""Lines at the head of a conversation that clients write anew for each request: who pays, what time it is to
the second, which request it is. Pure.

Whatever stands behind such a line is never found in cache, for a prompt is found as far as it is the same. So
they are left where they are, moved behind all that is cached, or dropped, as the setting says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcommons.errors import InvalidInput
from services.router.sessions.conversation import VOLATILE, Message, leading_system

MODES = ("keep", "move", "drop")
_LINE_CHARS_MAX = 200
# Of all system messages of a request, looked at in 15 µs each; what stands behind them stays where it is.
_LINES_MAX = 1_000

_MOMENT = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_HEX = r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{0,4}-?[0-9a-f]{0,16}"
_ID = r"(?=[\w-]*\d)[\w-]{16,72}"
_NAMED = r"request|trace|conversation|correlation|session|message|turn|run|span"
# A line is all of it, but for the signs with which lists and markup begin and end. What repeats gives nothing
# back (`*+`) or is short, so that no line takes a time that grows with the square of its length.
_EDGE = r"[\s*_#>`|•·+-]*+(?:<[\w-]{1,40}>)?\s*+"
_END = r"[\s*_`|.;]*+(?:</[\w-]{1,40}>)?\s*+"
_IS = r"[*_`]{0,4}\s*(?:[:=]| is)[*_`]{0,4}\s*+"
_LABEL = r"(?:[A-Za-z][\w ()/'-]{0,60}?[*_`]{0,4}(?:[:=]| is(?: now)?| at)[*_`]{0,4}\s*+)?"
_PATTERNS = (
    r"x-anthropic-billing-header\s*:.*",
    rf"{_EDGE}{_LABEL}{_MOMENT}{_END}",
    # A date alone changes once a day, which costs little.
    rf"{_EDGE}(?:the )?(?:current|present|local|exact)(?: local| utc)? "
    r"(?:date and time|date/time|date-time|datetime|timestamp|time)\b[^\n]*\d\d?:\d\d[^\n]*",
    rf"{_EDGE}(?:x-)?(?:{_NAMED})(?:[ _-]?u?u?id{_IS}\"?{_ID}|{_IS}\"?{_HEX})\"?{_END}",
)
_VOLATILE = re.compile("|".join(f"(?:{pattern})" for pattern in _PATTERNS), re.IGNORECASE)


def is_volatile(line: str) -> bool:
    """Whether a line says something that is another with each request."""
    return len(line) <= _LINE_CHARS_MAX and _VOLATILE.fullmatch(line.strip()) is not None


def check_mode(mode: str) -> None:
    """Raises InvalidInput for one that is none."""
    if mode not in MODES:
        raise InvalidInput(
            f"router volatile_lines is {', '.join(MODES[:-1])} or {MODES[-1]}, not {mode!r}",
            param="volatile_lines",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VolatileLines:
    """Those of one request, and its messages as they are served. `mode` says what became of the lines."""

    messages: Sequence[Message]
    lines: tuple[str, ...]
    mode: str

    @classmethod
    def of(cls, messages: Sequence[Message], mode: str) -> VolatileLines:
        """Looks through the system messages at the head. Moved lines are a message of their own behind the
        last one, which the model reads as the end of that."""
        heads = leading_system(messages)
        stable: list[Message] = []
        lines: list[str] = []
        left = _LINES_MAX
        for message in messages[:heads]:
            kept, found = split(message.content, left)
            left = max(0, left - 1 - message.content.count("\n"))
            lines += found
            if kept or not found:
                stable.append(replace(message, content=kept) if found else message)
        served = [*stable, *messages[heads:]]
        asks = bool(served) and served[-1].role != "assistant"
        if not lines or mode == "keep" or not served or (mode == "move" and not asks):
            return cls(messages=messages, lines=tuple(lines), mode="keep")
        if mode == "move":
            served.append(Message(role=VOLATILE, content="\n".join(lines)))
        return cls(messages=served, lines=tuple(lines), mode=mode)

    @property
    def head_changes(self) -> bool:
        """Whether the head is another one with each request still."""
        return self.mode == "keep" and bool(self.lines)

    @property
    def header(self) -> str | None:
        """What the answer's header says of them; None where there are none."""
        done = {"keep": "kept", "move": "moved", "drop": "dropped"}[self.mode]
        return f"{done} {len(self.lines)}" if self.lines else None


NO_VOLATILE_LINES = VolatileLines(messages=(), lines=(), mode="keep")


def split(text: str, lines_max: int = _LINES_MAX) -> tuple[str, list[str]]:
    """A text without its volatile lines, and they: of its first `lines_max`."""
    lines = text.split("\n")
    volatile = {at for at, line in enumerate(lines[:lines_max]) if is_volatile(line)}
    if not volatile:
        return text, []
    kept = [line for at, line in enumerate(lines) if at not in volatile]
    return "\n".join(kept).strip("\n"), [lines[at].strip() for at in sorted(volatile)]


def stable(text: str, mode: str) -> str:
    """What stays of a system prompt where it stands."""
    return text if mode == "keep" else split(text)[0]
