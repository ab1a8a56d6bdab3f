"""The benchmark beside other servers: a second stack stands for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.model.synthetic import random_config, write_random_folder
from tests.system.bench import bench
from tests.system.stack import Stack


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_cell_has_its_servers_its_bound_and_its_ratio(tmp_path: Path) -> None:
    picture = tmp_path / "peers.png"
    model = str(tmp_path / "model")
    write_random_folder(tmp_path / "model", random_config("7m"))
    sizes = ("--model", model, "--cells", "1", "2", "5", "11", "--rounds", "2")
    sizes += ("--answer", "32", "--threads", "1")
    with Stack(tmp_path / "other", model=model, attention_pool=0) as other:
        sizes += ("--peer", f"other={other.url}", "--picture", str(picture))
        report = bench(tmp_path / "peers.json", "peers", *sizes, model=None)
    *rows, killed = report["rows"]
    assert "was started by somebody else" in killed["not measured"]
    assert [row["cell"] for row in rows] == [
        "first token of 8", "first token of 512", "decode, 1 at once, context 2,048",
    ]  # fmt: skip
    for row in rows:
        assert 0 < row["bound, ms"] < row["kvcommons, ms"]
        assert row["low"] <= row["over the better peer"] <= row["high"]
        assert row["better peer"] == "other"
    assert picture.stat().st_size > 5_000
