"""A stack without `kvcommons up`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devstack import etcd, toml
from devstack.plan import Place, ProcessPlan, processes
from devstack.plan import tables as planned
from devstack.rest import RestClient
from devstack.settings import UpSettings
from tests.machine import scaled
from tests.system.stack import scaled_tables
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DRAIN_S = scaled(10.0)  # the services' own default, `drain_s`
STARTED_S_MAX = 20.0


class ByHand:
    """Each process is started, watched and stopped by the test."""

    def __init__(
        self,
        folder: Path,
        *,
        place: type[Place] = Place,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`place` gives addresses; `tables` are those of kvcommons.toml."""
        self.place = place(data=folder, runtime=Path(tempfile.mkdtemp(prefix="kvc-", dir="/tmp")))
        self.place.secret_file.write_text("0123456789abcdef" * 4)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = UpSettings(data=folder, port=port)
        cores = len(os.sched_getaffinity(0))
        user = scaled_tables(tables or {})
        del user["up"]
        self.place.settings_file.write_text(toml.dumps(planned(settings, self.place, cores, user)))
        plans = processes(settings, self.place, cores, port, os.environ, user=user)
        store = etcd.plan(folder / "etcd", self.place.runtime, os.environ)
        self.plans = {plan.name: plan for plan in (*plans, store)}
        self.client = RestClient(f"http://127.0.0.1:{port}")
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Returns once it listens: each has done what it can without the others then."""
        plan = self.plans[name]
        with (self.place.data / f"{name}.log").open("ab") as output:
            self.running[name] = subprocess.Popen(
                plan.command,
                cwd=plan.folder or ROOT,
                env=dict(plan.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        wait_until(
            lambda: self._listens(plan), f"{name} does not listen: {self.said(name)}", within_s=STARTED_S_MAX
        )

    def stop(self, name: str) -> tuple[int, float]:
        """SIGTERM; the exit status, and how long it took."""
        started = time.monotonic()
        self.running[name].send_signal(signal.SIGTERM)
        return self.running[name].wait(DRAIN_S + scaled(5)), time.monotonic() - started

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for path in self.place.runtime.iterdir():
            path.unlink()
        self.place.runtime.rmdir()

    def said(self, name: str) -> str:
        return (self.place.data / f"{name}.log").read_text()

    def _listens(self, plan: ProcessPlan) -> bool:
        process = self.running[plan.name]
        assert process.poll() is None, f"{plan.name} ended: {self.said(plan.name)}"
        return plan.sockets[0].exists()
