"""What `kvcommons up` writes, for people and for programs."""

from __future__ import annotations

import io
import json
import re

import pytest

from devstack.terminal import LogFormat, Record, Terminal

LINE = '{"ts": "2026-01-02T03:04:05.678+00:00", "level": "info", "message": "serving", "n": 7}'


class _Screen(io.StringIO):
    """A terminal, as far as a program asks whether it is one."""

    def isatty(self) -> bool:
        return True


def _written(stream: io.StringIO, form: LogFormat) -> str:
    terminal = Terminal(stream, form)
    terminal.child("router-1", Record(LINE))
    terminal.child("router-1", Record("a print"))
    terminal.progress("waiting")
    terminal.progress("")
    terminal.say("Ready")
    terminal.say("gone", "error")
    return stream.getvalue()


@pytest.mark.parametrize(("stream", "form"), [(_Screen, "auto"), (_Screen, "text"), (io.StringIO, "text")])
def test_people_get_time_level_service_and_message(stream: type[io.StringIO], form: LogFormat) -> None:
    written = re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", _written(stream(), form))
    served, printed, *rest = written.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d info +router-1 +serving  n=7", served)
    assert re.fullmatch(r"\d\d:\d\d:\d\d output +router-1 +a print", printed)
    assert "Ready" in "".join(rest)


@pytest.mark.parametrize(
    ("stream", "form"), [(io.StringIO, "auto"), (io.StringIO, "json"), (_Screen, "json")]
)
def test_programs_get_an_object_a_line(stream: type[io.StringIO], form: LogFormat) -> None:
    served, printed, waiting, ready, gone = map(json.loads, _written(stream(), form).splitlines())
    assert served == {**json.loads(LINE), "process": "router-1"}
    assert (printed["level"], printed["message"], printed["process"]) == ("output", "a print", "router-1")
    for line, level, message in (
        (waiting, "info", "waiting"),
        (ready, "info", "Ready"),
        (gone, "error", "gone"),
    ):
        assert (line["level"], line["service"], line["message"]) == (level, "up", message)
        assert line["ts"].endswith("+00:00")
