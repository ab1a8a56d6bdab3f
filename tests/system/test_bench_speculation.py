"""The benchmark of drafts: each kind of prompt has its row, and the sessions are what they are said to be."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.agent_sessions import agent_session
from tests.system.bench import bench


def test_a_session_repeats_its_file_with_two_changes_and_asks_for_a_third() -> None:
    for seed in range(20):
        messages = agent_session(seed)
        assert messages == agent_session(seed)
        assert messages != agent_session(seed + 1)
        assert messages[0]["role"] == "system"
        assert messages[-1]["role"] == "user"
        files = [one["content"] for one in messages if "```python\n" in one["content"]]
        assert len(files) == 3
        texts = [set(file.split("```python\n")[1].splitlines()) for file in files]
        assert all(1 <= len(before - after) <= 2 for before, after in pairwise(texts))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_kind_has_its_row(tmp_path: Path) -> None:
    picture = tmp_path / "drafts.png"
    sizes = ("--random-model", "7m", "--dtype", "float32", "--batches", "1", "2")
    few = ("--prompts", "2", "--answer", "16", "--rounds", "1", "--picture", str(picture))
    report = bench(tmp_path / "drafts.json", "speculation", *sizes, *few)
    assert len(report["rows"]) == 10
    assert all(row["ratio"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in report["rows"])
    assert all(row["same answers"] == 1.0 for row in report["rows"])
    assert picture.stat().st_size > 10_000
