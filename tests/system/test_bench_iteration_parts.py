"""`kvcommons bench iteration-parts` on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.iteration_parts import PARTS, cells_of
from kvcommons.errors import InvalidInput
from tests.system.bench import bench


def test_a_cell_is_rows_or_a_chunk_behind_a_context() -> None:
    rows, chunk = cells_of(["8x512"], ["256x1024"])
    assert rows.name == "8 at once, context 512"
    assert [(one.count, one.history) for one in rows.rows] == [(1, 512)] * 8
    assert chunk.name == "a chunk of 256 behind 1,024"
    assert [(one.count, one.history) for one in chunk.rows] == [(256, 1024)]
    assert rows.room_tokens > 8 * 513
    assert chunk.room_tokens > 256 + 1024
    for wrong in ("8", "x512", "8x", "0x512", "ax1"):
        with pytest.raises(InvalidInput, match="is no cell"):
            cells_of([wrong], [])


@pytest.mark.slow
def test_parts_are_all_of_an_iteration(tmp_path: Path) -> None:
    report = bench(
        tmp_path / "report.json", "iteration-parts", "--random-model", "7m", "--decode", "1x64", "8x512",
        "--chunks", "128x64", "--rounds", "9", "--threads", "1",
    )  # fmt: skip
    one, eight, chunk = report["rows"]
    for row in report["rows"]:
        parts = {part: row[f"{part}, ms"] for part in PARTS}
        assert sum(parts.values()) == pytest.approx(row["ms"], rel=0.3), "medians, each of its own"
        assert all(value >= 0 for value in parts.values())
        assert 0 < row["of the bound"] < 1
    assert eight["attention, ms"] > one["attention, ms"]
    assert eight["attention at least, ms"] > one["attention at least, ms"]
    assert chunk["matrices, ms"] > one["matrices, ms"]
    assert chunk["sampling, ms"] == chunk["head, ms"] == 0, "it is not the last of its prompt"
