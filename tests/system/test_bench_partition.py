"""`kvcommons bench partition` on a small model and short sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench

pytestmark = pytest.mark.slow


def test_a_batch_is_attended_over_by_requests_and_by_heads(tmp_path: Path) -> None:
    report = bench(
        tmp_path / "report.json", "partition", "--long", "2048", "--short", "256", "--number", "2",
        "--rounds", "2",
    )  # fmt: skip
    assert [row["batch"] for row in report["rows"]] == ["1 of 2,048", "1 of 2,048, 2 of 256", "4 of 256"]
    assert all(row[kind] > 0 for row in report["rows"] for kind in ("by requests", "by heads"))
