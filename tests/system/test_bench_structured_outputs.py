"""The benchmark of what holding answers to a schema costs: both ways have their figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_ways_have_their_figures(tmp_path: Path) -> None:
    picture = tmp_path / "ways.png"
    sizes = ("--batch", "2", "--answer", "16", "--rounds", "2", "--schemas", "2")
    report = bench(tmp_path / "ways.json", "structured-outputs", *sizes, "--picture", str(picture))
    assert [row["way"] for row in report["rows"]] == ["free", "held"]
    assert all(row["tokens/s"] > 0 for row in report["rows"])
    assert report["ratios"].keys() >= {
        "token p50 ms, held over free",
        "new schema, ms more to the first token, p50",
    }
    assert picture.stat().st_size > 5_000
