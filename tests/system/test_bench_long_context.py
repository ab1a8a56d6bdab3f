"""`kvcommons bench long-context` on small models: all of its parts on real stacks, in both ways each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_part_is_told(tmp_path: Path) -> None:
    picture = tmp_path / "long.png"
    sizes = (
        "--migrated-model",
        "7m",
        "--holder",
        "512",
        "--reach",
        "1200",
        "--holders",
        "2",
        "--answer",
        "96",
    )
    batches = ("--room", "512", "--contexts", "128", "640", "--rates-room", "512", "--long-shares", "0.1")
    few = ("--rates", "4", "8", "--requests", "6", "--picture", str(picture))
    report = bench(tmp_path / "long.json", "long-context", *sizes, *batches, *few)
    rows = {part: [row for row in report["rows"] if row["part"] == part] for part in parts(report)}
    assert {part: [row["how"] for row in found] for part, found in rows.items()} == {
        "migration": ["memory of others", "a larger instance"],
        "1,200 tokens": ["3 holders of 512", "one large"],
        "contexts": ["two that share"] * 2 + ["one large"] * 2,
        "rates": ["two that share"] * 2 + ["one large"] * 2,
    }
    assert all(row["TTFT s"] > 0 and row["ms/token"] > 0 for row in rows["1,200 tokens"])
    borrowing, moving = rows["migration"]
    assert borrowing["delay s"] < moving["started s"] < moving["delay s"]
    assert [(row["context"], row["batch"]) for row in rows["contexts"]] == [(128, 3), (640, 1)] * 2
    assert [(row["requests/s"], row["long"]) for row in rows["rates"]] == [(4, 1), (8, 1)] * 2
    assert all(row["tokens/s"] > 0 for row in rows["contexts"] + rows["rates"])
    assert set(report["ratios"]) == {
        "migration, delay s",
        "1,200 tokens, TTFT s",
        *(f"contexts {context}, tokens/s" for context in (128, 640)),
        *(f"rates {rate} 10.0, {figure}" for rate in (4.0, 8.0) for figure in ("tokens/s", "s/answer")),
    }
    assert picture.stat().st_size > 10_000


def parts(report: dict[str, list[dict[str, str]]]) -> list[str]:
    return list(dict.fromkeys(row["part"] for row in report["rows"]))
