"""`kvcommons bench overlap` on a small model: every kind of trial runs, and says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.bench import bench


@pytest.mark.slow
def test_every_kind_of_trial_is_reported(tmp_path: Path) -> None:
    picture = tmp_path / "overlap.png"
    sizes = ("--history", "128", "--new", "20", "--prompts", "64", "128", "--rounds", "1")
    report = bench(tmp_path / "overlap.json", "overlap", *sizes, "--picture", str(picture))
    loads = [row["how"] for row in report["rows"] if row["figure"] == "19"]
    buffers = [f"buffer of {layers} layers" for layers in (0, 5, 10, 15)]
    assert loads == ["no pre-loading", *buffers, "buffer by the formula", "nothing to load"]
    saves = [row["how"] for row in report["rows"] if row["figure"] == "20"]
    assert saves == [
        f"{tokens} tokens, {how}"
        for tokens in (64, 128)
        for how in ("saved after", "saved meanwhile", "nothing saved")
    ]
    assert set(report["ratios"]) == {
        *(f"prefill_{how.replace(' ', '_')}" for how in loads[1:]),
        *(f"round_{tokens}_{how}" for tokens in (64, 128) for how in ("saved_meanwhile", "nothing_saved")),
    }
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert picture.stat().st_size > 10_000
