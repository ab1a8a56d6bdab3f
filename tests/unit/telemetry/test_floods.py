from __future__ import annotations

import json
import logging
from io import StringIO

from kvcommons.telemetry import logs
from kvcommons.telemetry.floods import KINDS_MAX, LINES_MAX, WINDOW_S, FloodFilter
from tests.clock import Clock


def record(text: str = "refused: %s", level: int = logging.INFO, *values: object) -> logging.LogRecord:
    return logging.LogRecord("router", level, "file", 1, text, values, None)


def test_a_flood_leaves_a_few_lines_and_says_how_many_there_were() -> None:
    clock = Clock()
    flood = FloodFilter(clock=clock)
    kept = [flood.filter(record("refused: %s", logging.INFO, at)) for at in range(100_000)]
    assert kept == [True] * LINES_MAX + [False] * (100_000 - LINES_MAX)
    assert flood.filter(record("something else"))  # others are not lost in it
    clock.now_s = WINDOW_S
    again = record()
    assert flood.filter(again)
    assert again.left_out == 100_000 - LINES_MAX  # type: ignore[attr-defined]
    quiet = record()
    assert flood.filter(quiet)
    assert not hasattr(quiet, "left_out")


def test_what_is_critical_or_debugged_goes_through() -> None:
    flood = FloodFilter(lines_max=1, clock=Clock())
    for level, kept in ((logging.CRITICAL, 9), (logging.DEBUG, 9), (logging.ERROR, 1), (logging.WARNING, 1)):
        assert sum(flood.filter(record("the same", level)) for _ in range(9)) == kept


def test_kinds_are_bounded() -> None:
    flood = FloodFilter(clock=Clock())
    for at in range(3 * KINDS_MAX):
        flood.filter(record(f"built {at}"))
    assert len(flood._began_s) <= KINDS_MAX


def test_the_log_of_a_process_is_bounded() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = StringIO()
    try:
        logs.configure("router", "r1", stream=stream)
        for at in range(1_000):
            logging.getLogger("somewhere").info("refused: %s", at)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == [f"refused: {at}" for at in range(LINES_MAX)]
