"""`kvcommons bench offload` on a small model: every kind runs on real pools, as large a batch as there is
room for, and parts of a step add up to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench


@pytest.mark.slow
def test_every_kind_is_reported(tmp_path: Path) -> None:
    picture = tmp_path / "offload.png"
    sizes = ("--contexts", "64", "512", "--batch", "2", "--answer", "20", "--rounds", "1", "--seconds", "1.5")
    report = bench(tmp_path / "offload.json", "offload", *sizes, "--picture", str(picture))
    assert [(row["context"], row["how"]) for row in report["rows"]] == [
        (context, how) for context in (64, 512) for how in ("local", "offload", "offload, pipelined")
    ]
    for row in report["rows"]:
        # Two sequences of 2,048 and their answers take 66 blocks of 64 tokens.
        fit = 66 // (2 if row["context"] == 64 else 9)
        assert row["batch"] == (fit if row["how"] == "local" else 3 * fit)
        assert row["tokens/s"] > 0
        parts = [row[f"{part} ms"] for part in ("slices", "attention", "network", "waiting", "rest")]
        if row["how"] != "offload, pipelined":  # of which two are under way at the same time
            assert sum(parts) <= 1.05 * row["step ms"]
        assert (row["pool's attention ms"] > 0) == (row["how"] != "local")
    assert set(report["ratios"]) == {
        f"{how}_{context}" for context in (64, 512) for how in ("offload", "offload_pipelined")
    }
    assert picture.stat().st_size > 10_000
