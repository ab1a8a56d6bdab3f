"""A real etcd for tests, on Unix sockets in its own folder; it can be killed, paused and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from devstack import etcd
from tests.machine import scaled
from tests.pausing import pause

START_S = scaled(20.0)


class RealEtcd:
    def __init__(self, *, quota_bytes: int | None = None) -> None:
        self._quota = [f"--quota-backend-bytes={quota_bytes}"] if quota_bytes else []
        self.folder = Path(tempfile.mkdtemp(prefix="kve-"))  # short, for the socket's path
        self.endpoint = etcd.endpoint(self.folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        plan = etcd.plan(self.folder / "data", self.folder, os.environ)
        for socket in plan.sockets:
            socket.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*plan.command, *self._quota],
                cwd=plan.folder,
                env=dict(plan.environment),
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not etcd.accepts(self.folder):
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "etcd does not take connections"
            time.sleep(0.02)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        pause(self._process.pid)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
