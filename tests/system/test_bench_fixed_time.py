"""`kvcommons bench fixed-time` over short contexts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench

pytestmark = pytest.mark.slow


def test_all_kinds_of_iterations_are_measured_at_all_contexts(tmp_path: Path) -> None:
    report = bench(
        tmp_path / "report.json", "fixed-time", "--contexts", "4096", "1024", "--tokens", "80",
        "--chunks", "16", "--rounds", "2", "--sequences", "1", "4", model=None,
    )  # fmt: skip
    kinds = [f"{what}, KV {where}" for what in ("token", "chunk") for where in ("here", "on a holder")]
    alone, batches = report["rows"][:8], report["rows"][8:]
    assert [(row["what"], row["context"]) for row in alone] == [
        (kind, context) for kind in kinds for context in (1024, 4096)
    ]
    assert [row["what"] for row in batches] == ["batch of 1, KV here", "batch of 4, KV here"]
    assert all(row["ms"] > 0 and row["CPU ms of the engine"] > 0 for row in batches)
    for row in alone:
        assert min(row[name] for name in ("ms", "CPU ms of the engine", "CPU ms of the holder")) > 0
        assert row["over the shortest"] == 1 or row["context"] == 4096
    assert len(report["ratios"]) == 5
    assert "a further sequence, from 1 to 4, CPU us" in report["ratios"]
