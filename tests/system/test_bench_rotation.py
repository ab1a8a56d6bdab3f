"""`kvcommons bench rotation` on a small model: real processes, and the batches that each kind says it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rotation import shares
from tests.system.bench import bench


def test_batches_are_alike_and_the_first_has_two_in_rotation() -> None:
    assert shares("one batch", 12, 2) == [6, 0]
    assert shares("fixed", 12, 3) == [4, 4, 4]
    assert shares("rotational", 12, 2) == [8, 4]
    assert shares("rotational", 13, 3) == [7, 3, 3]


@pytest.mark.slow
def test_every_kind_is_reported(tmp_path: Path) -> None:
    picture = tmp_path / "rotation.png"
    sizes = ("--replicas", "2", "--sequences", "6", "--context", "64", "--answer", "20", "--pools", "1")
    turns = ("--rounds", "1", "--seconds", "1.5", "--picture", str(picture))
    report = bench(tmp_path / "rotation.json", "rotation", *sizes, *turns)
    rows = {row["how"]: row for row in report["rows"]}
    assert [(how, row["batches"], row["sequences"]) for how, row in rows.items()] == [
        ("one batch", 1, 3), ("fixed", 2, 6), ("rotational", 3, 6), ("auto", 2, 6)
    ]  # fmt: skip
    for how, row in rows.items():
        assert row["tokens/s"] > 0
        assert row["slices ms"] > 0
        assert row["attention KiB/token"] > 0
        assert (row["slices elsewhere"] > 0) == (row["activations KiB/token"] > 0) == (how == "rotational")
    assert set(report["ratios"]) == {"rotational_over_fixed", "auto_over_fixed"}
    assert picture.stat().st_size > 10_000
