"""A process that stops in the middle of whatever it does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.machine import scaled


def pause(pid: int) -> None:
    """SIGSTOP. Returns once all its threads have stopped: until then some of them may go on, and answer."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + scaled(10)
    while not all(") T" in (task / "stat").read_text() for task in tasks.iterdir()):
        assert time.monotonic() < deadline, f"{pid} does not stop"
        time.sleep(0.002)
