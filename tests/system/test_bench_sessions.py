"""Benchmarks of sessions on a small model: they measure what their rows say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench

pytestmark = pytest.mark.slow


def test_a_lone_session_is_read_from_the_store(tmp_path: Path) -> None:
    sizes = ("--history", "512", "--new", "32", "--sessions", "1", "--turns", "1")
    report = bench(tmp_path / "sessions.json", "sessions", *sizes)
    reused, computed = report["rows"]
    assert reused["cached share"] > 0.9
    assert computed["cached share"] == 0
    assert reused["device share"] < 0.5


def test_the_share_of_history_is_the_one_asked_for(tmp_path: Path) -> None:
    picture = tmp_path / "ratios.png"
    sizes = ("--tokens", "200", "--new", "80", "--sessions", "1", "--picture", str(picture))
    report = bench(tmp_path / "ratios.json", "attention-store", "ratios", *sizes)
    (row,) = report["rows"]
    assert row["history/new"] == "120/80"
    assert row["pairs"] == 1
    # The new ones, and what is in the history's last block, which is not full.
    assert 70 <= row["tokens computed"] <= 80 + 16
    assert set(report["ratios"]) == {"prefill_120_80"}
    assert picture.stat().st_size > 10_000
