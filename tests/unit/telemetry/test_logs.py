from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc

from kvcommons.telemetry import logs
from kvcommons.telemetry.trace import Tracer


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level, hook = root.handlers[:], root.level, threading.excepthook
    stream = io.StringIO()
    logs.configure("decode", "decode-a-1", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    threading.excepthook = hook


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_with_what_is_bound(stream: io.StringIO) -> None:
    log = logging.getLogger("services.decode")
    with logs.bound(request_id="r1", session_id="s\n1"), Tracer.off().span("turn") as span:
        log.info("two\nlines %d", 5, extra={"tokens": 17})
    log.debug("not shown")
    log.warning("after")
    first, second = lines(stream)
    assert first["ts"].endswith("+00:00")  # type: ignore[attr-defined]
    del first["ts"], second["ts"]
    assert first == {
        "level": "info",
        "service": "decode",
        "instance": "decode-a-1",
        "logger": "services.decode",
        "message": "two\nlines 5",
        "request_id": "r1",
        "session_id": "s\n1",
        "trace_id": span.traceparent[3:35],
        "tokens": 17,
    }
    assert set(second) == {"level", "service", "instance", "logger", "message"}


def test_exceptions_are_part_of_the_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = lines(stream)
    assert line["level"] == "error"
    assert "ValueError: no" in str(line["exception"])


def test_an_answer_whose_caller_is_gone_is_not_logged_and_a_mistake_is(stream: io.StringIO) -> None:
    library = logging.getLogger("grpc._cython.cygrpc")
    for error in (cygrpc.ExecuteBatchError("Failed"), ValueError("a mistake")):
        try:
            raise error
        except Exception:
            library.exception("raised by servicer method [/kvcommons.v1.Decode/Generate]")
    (line,) = lines(stream)
    assert "a mistake" in str(line["exception"])


def test_a_thread_that_dies_is_logged(stream: io.StringIO) -> None:
    def die() -> None:
        raise KeyError("lost")

    thread = threading.Thread(target=die, name="engine")
    thread.start()
    thread.join()
    (line,) = lines(stream)
    assert (line["level"], line["dead_thread"]) == ("critical", "engine")
    assert "KeyError: 'lost'" in str(line["exception"])
