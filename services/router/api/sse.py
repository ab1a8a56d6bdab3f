"""Server-sent events: a `data:` line and a blank line each, for some APIs with an `event:` line before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that buffer would hold back tokens
}

# ASCII only: some clients end lines at U+2028 and U+0085 too, which a text may hold.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def event(value: Mapping[str, Any], *, name: str = "") -> bytes:
    """`name`: for APIs whose events have one. JSON has no raw newline in it, so the data is one line whatever
    the text."""
    data = b"data: " + _ENCODER.encode(value).encode("ascii") + b"\n\n"
    return b"event: " + name.encode("ascii") + b"\n" + data if name else data
