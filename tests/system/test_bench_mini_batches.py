"""`kvcommons bench mini-batches` on a small model, a small batch and a link that is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench

pytestmark = pytest.mark.slow


def test_several_messages_hide_some_of_what_one_takes(tmp_path: Path) -> None:
    report = bench(
        tmp_path / "report.json", "mini-batches", "--batch", "24", "--context", "512", "--mbytes", "0", "8",
        "--mini-batches", "4", "--rounds", "2",
    )  # fmt: skip
    rows = {(row["MB/s"], row["mini-batches"].partition(":")[0]): row for row in report["rows"]}
    assert set(rows) == {(link, kind) for link in ("TCP", "8") for kind in ("1", "4", "auto")}
    # 24 rows of a thousand bytes take three milliseconds each way.
    assert rows["8", "1"]["a layer"] > 5
    assert rows["8", "1"]["messages, one mini-batch"] > rows["8", "1"]["attention"]
