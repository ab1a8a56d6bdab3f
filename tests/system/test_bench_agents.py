"""The benchmark of agents' sessions: what is played of a trace, and a row for each way of chunks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import AgentTurn, sessions_of
from benchmarks.replay.trace import read_trace
from tests.system.bench import bench


def written(folder: Path) -> Path:
    """Two sessions of three turns, the second one's last beyond any window."""
    rows: list[dict[str, Any]] = []
    for session in range(2):
        for turn, blocks in enumerate((8, 10, 400 if session else 12)):
            rows.append(
                {
                    "session": f"s{session}", "t": 10.0 * turn, "input_length": 64 * blocks,
                    "output_length": 20, "think_time": 0.4 * turn, "block_tokens": 64,
                    "hash_runs": [[1, blocks]],
                }
            )  # fmt: skip
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_session_has_the_turns_that_fit(tmp_path: Path) -> None:
    options = argparse.Namespace(scale=4, hurry=2.0, window=1024, turns=5, sessions=8)
    first, second = sessions_of(read_trace(written(tmp_path)).jobs, options)
    assert [len(turn.run) for turn in first] == [8, 10, 12]
    assert [len(turn.run) for turn in second] == [8, 10]
    assert first[1].run[:8] == first[0].run
    assert not set(first[0].run) & set(second[0].run), "sessions share nothing"
    assert first[2] == AgentTurn(run=first[2].run, answer_tokens=5, pause_s=0.4)
    options.turns, options.sessions = 2, 1
    ((one, other),) = sessions_of(read_trace(written(tmp_path)).jobs, options)
    assert (len(one.run), len(other.run)) == (8, 10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_way_of_chunks_has_its_row(tmp_path: Path) -> None:
    picture = tmp_path / "ways.png"
    sizes = (str(written(tmp_path)), "--window", "1024", "--fixed", "64", "--picture", str(picture))
    report = bench(tmp_path / "ways.json", "agents", *sizes)
    assert [row["chunks"] for row in report["rows"]] == ["adaptive", "fixed 64"]
    assert all(row["token p99 ms"] > 0 and row["first token p50 ms"] > 0 for row in report["rows"])
    assert report["ratios"]["seconds adaptive"] == 1
    assert picture.stat().st_size > 10_000
