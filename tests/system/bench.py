"""`kvcommons bench` as people run it, on a model that is small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH_S_MAX = 180.0


def bench(report: Path, *arguments: str, model: str | None = "7m") -> Any:
    """What the benchmark wrote to `report`, a JSON file. `model`: None for one that takes none."""
    sized = ["--random-model", model] if model is not None else []
    done = _run(*arguments, *sized, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text())


def refused(*arguments: str) -> str:
    """What it says of arguments that it refuses."""
    done = _run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from benchmarks.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=BENCH_S_MAX,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
