"""Events on the wire."""

from __future__ import annotations

import json

from services.router.api import sse


def test_an_event_is_one_line_whatever_the_text() -> None:
    text = "a\nb\r\n\u2028\u2029\x85 🙂 \x00"
    data = sse.event({"text": text})
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert len(data[6:-2].decode().splitlines()) == 1
    assert json.loads(data[6:])["text"] == text
