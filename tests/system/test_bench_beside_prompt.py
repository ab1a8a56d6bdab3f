"""The benchmark of what others wait for beside a long prompt: each way of chunks has its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_way_of_chunks_has_its_row(tmp_path: Path) -> None:
    picture = tmp_path / "ways.png"
    sizes = ("--tokens", "4096", "--answer", "16", "--fixed", "256")
    report = bench(tmp_path / "ways.json", "beside-prompt", *sizes, "--picture", str(picture))
    ways = ["adaptive", "adaptive, of a document", "fixed 256"]
    assert [row["chunks"] for row in report["rows"]] == ways
    assert all(row["short requests"] > 0 and row["iteration ms"] > 0 for row in report["rows"])
    assert report["ratios"]["long prompt adaptive"] == 1
    assert picture.stat().st_size > 10_000
