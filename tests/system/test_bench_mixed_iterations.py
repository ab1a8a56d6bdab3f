"""`kvcommons bench mixed-iterations` on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench

pytestmark = pytest.mark.slow


def test_chunks_are_measured_beside_rows_and_by_themselves(tmp_path: Path) -> None:
    report = bench(
        tmp_path / "report.json", "mixed-iterations", "--random-model", "7m", "--chunks", "32", "256",
        "--batch", "1", "8", "--context", "256", "--rounds", "5",
    )  # fmt: skip
    rows = {(row["chunk"], row["rows"]): row for row in report["rows"]}
    assert set(rows) == {(c, r) for c in (0, 32, 256) for r in (0, 1, 8)} - {(0, 0)}
    assert rows[256, 0]["ms"] > rows[32, 0]["ms"]
    assert rows[256, 0]["predicted ms"] > rows[32, 0]["predicted ms"]
    assert all(0 < rows[chunk, 0]["MFU"] < 1 for chunk in (32, 256))
    assert all(0 < rows[0, count]["MBU"] < 1 for count in (1, 8))
