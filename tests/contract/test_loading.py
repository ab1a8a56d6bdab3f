"""A model that is loaded leaves nothing behind that slows what is computed with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcommons.model.synthetic import random_config, write_random_folder

_SCRIPT = """
import os, sys, time, torch
from kvcommons.engine.core import load_core
from kvcommons.engine.settings import EngineSettings

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
before = threads()
core = load_core(EngineSettings(model=sys.argv[1], threads=2, capacity_tokens=1024))
until_s = time.monotonic() + 5
while threads() > before and time.monotonic() < until_s:
    time.sleep(0.01)
print(threads() - before, torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_loading_leaves_no_team_of_threads(tmp_path: Path) -> None:
    """Two teams on two cores would not wait awake for their next operation."""
    write_random_folder(tmp_path / "model", random_config("7m"))
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    left, threads = (int(word) for word in done.stdout.split())
    assert left == 0
    assert threads == 2
