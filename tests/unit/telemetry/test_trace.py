"""Tracing without an endpoint; with one: tests/contract/test_rpc_trace.py."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvcommons.telemetry.trace import Tracer, current_traceparent, trace_id

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_ids_pass_through() -> None:
    tracer = Tracer.off()
    with tracer.span("a", parent=PARENT) as outer:
        assert outer.traceparent == current_traceparent() == PARENT
        with tracer.span("b") as inner:
            assert inner.traceparent == PARENT
        assert current_traceparent() == PARENT
    assert current_traceparent() == ""


@pytest.mark.parametrize(
    "bad", ["", "junk", PARENT[:-1], PARENT.upper(), "01" + PARENT[2:], f"00-{'0' * 32}-{'1' * 16}-00"]
)
def test_what_is_no_parent_begins_a_trace(bad: str) -> None:
    assert trace_id(bad) == ""
    with Tracer.off().span("a", parent=bad) as one, Tracer.off().span("b", parent="") as other:
        assert len(trace_id(one.traceparent)) == 32
        assert trace_id(one.traceparent) != trace_id(other.traceparent)


def test_a_failed_body_leaves_nothing_current() -> None:
    with pytest.raises(ValueError, match="x"), Tracer.off().span("a"):
        raise ValueError("x")
    assert current_traceparent() == ""


def test_threads_have_their_own_current_span() -> None:
    tracer = Tracer.off()
    seen: list[str] = []

    def work(parent: str) -> None:
        seen.append(current_traceparent())
        with tracer.span("b", parent=parent):
            seen.append(current_traceparent())

    with tracer.span("a", parent=PARENT) as span:
        thread = threading.Thread(target=work, args=(span.traceparent,))
        thread.start()
        thread.join()
    assert seen == ["", PARENT]


def test_opentelemetry_is_not_imported_without_an_endpoint() -> None:
    code = (
        "import sys; import kvcommons.rpc.process, kvcommons.rpc.directory, kvcommons.rpc.server;"
        "print([m for m in sys.modules if m.split('.')[0] in ('opentelemetry', 'torch', 'aiohttp')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
