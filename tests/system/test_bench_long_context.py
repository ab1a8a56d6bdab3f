"""`kvcommons bench long-context` on small models: all of its parts on real stacks, in both ways each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_one_long_sequence(tmp_path: Path) -> None:
    sizes = ("--holder", "512", "--reach", "1200", "--holders", "2", "--answer", "96")
    parts = ("--parts", "reach", "migration", "--migrated-model", "7m")
    report = bench(tmp_path / "long.json", "long-context", *parts, *sizes)
    borrowing, moving, spread, large = report["rows"]
    assert [row["part"] for row in report["rows"]] == ["migration"] * 2 + ["1,200 tokens"] * 2
    assert (spread["how"], large["how"]) == ("3 holders of 512", "one large")
    assert all(row["TTFT s"] > 0 and row["ms/token"] > 0 for row in (spread, large))
    assert (borrowing["how"], moving["how"]) == ("memory of others", "a larger instance")
    assert borrowing["delay s"] < moving["started s"] < moving["delay s"]
    assert set(report["ratios"]) == {"migration, delay s", "1,200 tokens, TTFT s"}


def test_batches_of_two_that_share_and_of_one_large(tmp_path: Path) -> None:
    picture = tmp_path / "long.png"
    contexts = ("--capacity", "512", "--contexts", "128", "640", "--answer", "96")
    rates = ("--rates-capacity", "512", "--long-shares", "0.1", "--rates", "4", "8", "--requests", "6")
    parts = ("--parts", "contexts", "rates", "--picture", str(picture))
    report = bench(tmp_path / "long.json", "long-context", *parts, *contexts, *rates)
    rows = report["rows"]
    assert [(row["part"], row["how"]) for row in rows] == [
        (part, how) for part in ("contexts", "rates") for how in ("two that share", "one large") for _ in "12"
    ]
    assert [(row["context"], row["batch"]) for row in rows[:4]] == [(128, 3), (640, 1)] * 2
    assert [(row["requests/s"], row["long"]) for row in rows[4:]] == [(4, 1), (8, 1)] * 2
    assert all(row["tokens/s"] > 0 for row in rows)
    assert set(report["ratios"]) == {
        *(f"contexts {context}, tokens/s" for context in (128, 640)),
        *(f"rates {rate} 10.0, {figure}" for rate in (4.0, 8.0) for figure in ("tokens/s", "s/answer")),
    }
    assert picture.stat().st_size > 10_000
