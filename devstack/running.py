"""A stack that another program starts, kills and starts again: for benchmarks and system tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from devstack import toml
from devstack.rest import RestClient
from kvcommons.errors import Internal, Unavailable

# Twenty times what a stack of seven processes takes on two quiet cores, and what each further instance takes
# there.
READY_S_MAX, INSTANCE_READY_S_MAX = 60.0, 16.0
STOP_S_MAX = 40.0
KILL_S_MAX = 10.0
POLL_S = 0.02
SHOWN_CHARS = 8000  # of what the stack said, in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the stack, as /proc shows it."""

    pid: int
    name: str  # "decode-1", "etcd"; "up" for the one that started the others


class RunningStack:
    """`kvcommons up` as a child, in a process session of its own. Starts with the context and ends with it;
    `start` after `stop` or `kill_all` takes the same data up again."""

    # How many times as long as on a quiet machine of two cores everything may take.
    wait_scale = 1.0

    def __init__(
        self,
        folder: Path,
        *,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        **flags: str | int | bool,
    ) -> None:
        """`tables` are those of kvcommons.toml; `flags` those of `kvcommons up` (`no_restart=True`,
        `decode=2`). Data and output land in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        self.output = folder / "up.log"
        self.url = ""
        self.runtime = Path()
        self._settings = folder / "kvcommons.toml"
        self._settings.write_text(toml.dumps(tables or {}))
        self._flags: dict[str, str | int | bool] = {"no_demo": True, "port": 0, "log_format": "text", **flags}
        self._up: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def client(self) -> RestClient:
        return RestClient(self.url)

    def start(self, *, ready: bool = True) -> None:
        """Raises Unavailable, with what the stack said, when it is not ready in time."""
        if self._up is not None:
            self._up.wait(STOP_S_MAX * self.wait_scale)
        command = [sys.executable, "-m", "devstack", "up", "--data", str(self.data)]
        command += ["--config", str(self._settings), "--parent", str(os.getpid())]
        for name, value in self._flags.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [] if value is False else [flag, str(value)]
        with self.output.open("ab") as output:
            self._up = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        if ready:
            more = sum(int(self._flags.get(name, 1)) - 1 for name in ("prefill", "decode", "attention_pool"))
            wait_s = READY_S_MAX + INSTANCE_READY_S_MAX * max(more, 0)
            self.until(self._is_ready, wait_s, "the stack is not ready")

    def stop(self) -> int:
        """Ctrl-C; the exit status. A stack that does not end in time is killed and raises Internal."""
        if self._up is None:
            return 0
        self._up.send_signal(signal.SIGINT)
        wait_s = STOP_S_MAX * self.wait_scale
        try:
            return self._up.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise Internal(f"the stack did not end within {wait_s} s:\n{self.said()}") from None

    def wait(self, wait_s: float) -> int:
        """The exit status of a stack that ends by itself."""
        return self._process().wait(wait_s * self.wait_scale)

    def processes(self) -> list[Process]:
        """All that live in the stack's process session, whoever started them."""
        session = self._process().pid
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [found for pid in pids if (found := _read_process(pid, session)) is not None]

    def pid(self, name: str) -> int:
        """Of a child by its name. Raises Unavailable unless it runs."""
        for process in self.processes():
            if process.name == name:
                return process.pid
        raise Unavailable(f"{name} does not run")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signals a child; returns the pid it had."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def kill_all(self) -> None:
        """kill -9 of everything at once."""
        for process in self.processes():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process().wait(KILL_S_MAX * self.wait_scale)
        self.until(lambda: not self.processes(), KILL_S_MAX, "killed processes are still there")

    def restart(self) -> None:
        """kill -9 of everything, and the same data taken up again."""
        self.kill_all()
        self.start()

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, condition: Callable[[], object], wait_s: float, otherwise: str) -> None:
        """Polls; `wait_s` is scaled. Raises Unavailable with what the stack said."""
        wait_s *= self.wait_scale
        deadline = time.monotonic() + wait_s
        while not condition():
            if time.monotonic() > deadline:
                raise Unavailable(f"{otherwise} after {wait_s} s:\n{self.said()[-SHOWN_CHARS:]}")
            time.sleep(POLL_S)

    def _process(self) -> subprocess.Popen[bytes]:
        if self._up is None:
            raise Unavailable("the stack was never started")
        return self._up

    def _is_ready(self) -> bool:
        up = self._process()
        if up.poll() is not None:
            raise Unavailable(f"`kvcommons up` ended ({up.returncode}):\n{self.said()[-SHOWN_CHARS:]}")
        try:
            record = json.loads((self.data / "stack.json").read_text())
            self.url, self.runtime = record["url"], Path(record["runtime"])
        except (OSError, ValueError, KeyError):
            return False
        return record["pid"] == up.pid and bool(record.get("ready"))


def _read_process(pid: int, session: int) -> Process | None:
    """The process, if it belongs to the session and is alive (a zombie is not)."""
    try:
        state, _, _, own_session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if int(own_session) != session or state == "Z":
        return None
    listening = [word for word in command if word.startswith("listen=unix:")]
    if listening:
        return Process(pid=pid, name=Path(listening[0]).stem)
    return Process(pid=pid, name="up" if pid == session else Path(command[0]).name)
