"""The benchmark of conversations at given rates: this server, and itself once more as a peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench
from tests.system.stack import Stack


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_servers_have_the_same_conversations(stack: Stack, tmp_path: Path) -> None:
    picture = tmp_path / "serve.png"
    sizes = ("--conversations", "3", "--turns", "2", "--new", "100", "--answer", "4", "--rates", "4")
    report = bench(
        tmp_path / "serve.json", "serve", *sizes, "--think", "0.1", "--memory-mb", "64", "--peer",
        f"itself={stack.url}", "--picture", str(picture),
    )  # fmt: skip
    assert [row["server"] for row in report["rows"]] == ["kvcommons", "itself"]
    assert [(row["turns"], row["failed"]) for row in report["rows"]] == [(6, 0), (6, 0)]
    assert all(row["output tokens/s"] > 0 for row in report["rows"])
    assert report["rows"][0]["prompt from cache"] > 0
    assert {"goodput at 4/s over itself's", "output tokens/s at 4/s over itself's"} <= report["ratios"].keys()
    assert picture.stat().st_size > 10_000
