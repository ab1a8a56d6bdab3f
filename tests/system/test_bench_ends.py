"""Whatever ends a benchmark, nothing of it is left: no server that it started, and no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.rest_stack import free_port

SOON_S = 60.0
SERVER = """
import signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

signal.signal(signal.SIGTERM, signal.SIG_IGN)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.peers.servers import Peer, Plan

server, port, log = sys.argv[1:]
plan = Plan(command=[sys.executable, "-c", server, port], environment={"IT_IS": log})
with Peer("other", plan, int(port), Path(log)):
    print("up", flush=True)
    time.sleep(600)
"""


def until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.05)


def running(mark: str) -> list[int]:
    """Processes whose environment names it."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended, or is somebody else's
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_of_others_ends_with_the_benchmark_that_started_it(tmp_path: Path, number: int) -> None:
    """However much it wants to stay."""
    log = tmp_path / "other.log"
    command = [sys.executable, "-c", BENCHMARK, SERVER, str(free_port()), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "up\n"
        assert len(running(f"IT_IS={log}")) == 2  # it, and what watches it
        benchmark.send_signal(number)
    until(lambda: not running(f"IT_IS={log}"), "the server is left")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_benchmark_that_is_told_to_end_leaves_nothing(tmp_path: Path, number: int, status: int) -> None:
    command = [sys.executable, "-m", "devstack", "bench", "first-token"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "said"
    with log.open("wb") as said, subprocess.Popen(command, env=environment, stderr=said) as bench:
        try:
            until(lambda: len(running(f"TMPDIR={tmp_path}")) > 4, "the stack is not there")
            bench.send_signal(number)
            assert bench.wait(SOON_S) == status, log.read_text()
        finally:
            bench.kill()
    until(lambda: not running(f"TMPDIR={tmp_path}"), "a process is left")
    assert [one.name for one in tmp_path.iterdir()] == ["said"]
