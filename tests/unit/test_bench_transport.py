"""`kvcommons bench transport`: another process, real turns, figures of each transport."""

from __future__ import annotations

import pytest

from benchmarks.transport import measure


def test_each_transport_and_size_has_its_figures() -> None:
    reported: list[str] = []
    sizes = (4 << 10, 64 << 10)
    report = measure(["tcp", "shm"], sizes, reported.append, turns=20)
    assert [(row["size"], row["transport"]) for row in report.rows] == [
        ("4 KiB", "tcp"),
        ("4 KiB", "shm"),
        ("64 KiB", "tcp"),
        ("64 KiB", "shm"),
    ]
    for row in report.rows:
        assert 0 < float(row["round trip µs p50"]) <= float(row["p99"])
        share = float(row["one way GB/s"]) / float(row["memcpy GB/s"])
        assert float(row["of memcpy"]) == pytest.approx(share)
    assert list(report.ratios) == [
        f"{name}: µs of a round trip with 64 KiB each way" for name in ("tcp", "shm")
    ]
    assert len(reported) == 3 * 2 * 2
