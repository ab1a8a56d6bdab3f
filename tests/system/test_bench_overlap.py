"""`kvcommons bench overlap` on a small model: every kind of trial runs, and says what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_kind_of_trial_is_told(tmp_path: Path) -> None:
    result, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    code = "import sys; from benchmarks.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--random-model", "7m", "--history", "128", "--new", "20", "--prompts", "64", "128"]
    command = [sys.executable, "-c", code, "overlap", *options, "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(result), "--picture", str(picture)],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    loads = [row["how"] for row in report["rows"] if row["figure"] == "19"]
    buffers = [f"buffer of {layers} layers" for layers in (0, 5, 10, 15)]
    assert loads == ["no pre-loading", *buffers, "buffer by the formula"]
    saves = [row["how"] for row in report["rows"] if row["figure"] == "20"]
    assert saves == [
        f"{tokens} tokens, saved {when}" for tokens in (64, 128) for when in ("after", "meanwhile")
    ]
    assert set(report["ratios"]) == {
        *(f"prefill_{how.replace(' ', '_')}" for how in loads[1:]),
        "round_64_saved_meanwhile",
        "round_128_saved_meanwhile",
    }
    assert all(ratio > 0 for ratio in report["ratios"].values())
    assert picture.stat().st_size > 10_000
