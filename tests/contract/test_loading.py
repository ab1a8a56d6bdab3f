"""What loading leaves behind: nothing that slows what is computed, and memory that is there if asked for."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from kvcommons.backend.memory import BlockMemory
from kvcommons.engine.core import load_core
from kvcommons.engine.settings import EngineSettings
from kvcommons.model.synthetic import random_config, write_random_folder
from services.attention_pool.pool import open_pool

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


def _resident_pages(memory: BlockMemory) -> tuple[int, int]:
    """Pages that the system has given, of all."""
    start, size = memory.tensor.data_ptr(), memory.tensor.nbytes
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), found) == 0
    return sum(page & 1 for page in found), pages


@pytest.mark.skipif(sys.platform != "linux", reason="mincore as Linux has it")
@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize("service", ["engine", "pool"])
def test_memory_is_there_at_the_start_where_it_is_asked_for(
    tmp_path: Path, service: str, touched: bool
) -> None:
    write_random_folder(tmp_path / "model", random_config("7m"))
    settings = EngineSettings(model=str(tmp_path / "model"), capacity_tokens=131072, touch_memory=touched)
    opened = load_core(settings) if service == "engine" else open_pool(settings, "pool").holder
    resident, pages = _resident_pages(opened.memory)
    assert pages > 1000
    assert resident == pages if touched else resident < pages // 2
