"""`kvcommons bench kv-parallel` over a short context."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench

pytestmark = pytest.mark.slow


def test_a_holder_has_its_share_of_the_bytes_and_of_the_computing(tmp_path: Path) -> None:
    report = bench(
        tmp_path / "report.json", "kv-parallel", "--contexts", "65536", "--holders", "4", "--rounds", "8",
        model=None,
    )  # fmt: skip
    rows = {(row["queries"], row["holders"]): row for row in report["rows"]}
    assert set(rows) == {(queries, holders) for queries in (1, 32) for holders in (1, 4)}
    for queries in (1, 32):
        one, four = rows[queries, 1], rows[queries, 4]
        assert one["MB a holder"] == 4 * four["MB a holder"]
        assert four["CPU of a holder"] < one["CPU of a holder"] / 2
    assert len(report["ratios"]) == 2
