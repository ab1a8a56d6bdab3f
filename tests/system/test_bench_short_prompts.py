"""The benchmark of who computes short prompts: each way answers, and has its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_way_has_its_row(tmp_path: Path) -> None:
    picture = tmp_path / "ways.png"
    sizes = ("--prompts", "32", "--answer", "8", "--clients", "2", "--requests", "1", "--rounds", "1")
    report = bench(tmp_path / "ways.json", "short-prompts", *sizes, "--picture", str(picture))
    assert [row["way"] for row in report["rows"]] == ["separate", "local", "colocated"]
    assert {row["prompt"] for row in report["rows"]} == {32}
    assert all(row["requests/s"] > 0 for row in report["rows"])
    assert report["ratios"].keys() >= {"first p50 ms local 32", "first p50 ms colocated 32"}
    assert picture.stat().st_size > 10_000
