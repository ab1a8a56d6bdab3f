"""One child process: born to die with its parent, its output read line by line."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable

from devstack import launch
from devstack.logfile import LogFile
from devstack.plan import ProcessPlan
from devstack.terminal import Record

LAST_LINES = 12
LINE_BYTES_MAX = 64 << 10
# Its imports are the standard library's: without packages and a user's own settings it starts in 20 ms.
_LAUNCH = (sys.executable, "-I", "-S", launch.__file__)


class Child:
    """A process of the plan, through all of its lives. `on_record` gets what it writes, as it writes it."""

    def __init__(self, plan: ProcessPlan, log: LogFile, on_record: Callable[[str, Record], None]) -> None:
        self.plan = plan
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._log = log
        self._on_record = on_record
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Raises FileNotFoundError where there is no such program."""
        assert not self.running, self.name
        plan = self.plan
        for socket in plan.sockets:
            socket.unlink(missing_ok=True)
        self.last_lines.clear()
        name, *arguments = plan.command
        found = shutil.which(name, path=plan.environment.get("PATH"))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        self._process = await asyncio.create_subprocess_exec(
            *_LAUNCH,
            str(os.getpid()),
            plan.account or "",
            os.path.abspath(found),  # the plan's folder is not ours
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(plan.environment),
            cwd=plan.folder,
            # A group of its own in our session: a terminal's Ctrl-C reaches us alone, and we stop it in
            # order.
            process_group=0,
        )
        self._reader = asyncio.create_task(self._read(self._process))

    async def wait(self) -> int:
        """The exit status of this life, once all of its output is read."""
        assert self._process is not None
        assert self._reader is not None
        status = await self._process.wait()
        # What the process started itself may hold the pipe; the group goes with its leader.
        self._signal_group(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reader, timeout=1.0)
        return status

    async def stop(self, grace_s: float) -> bool:
        """Its signal to stop, then SIGKILL after `grace_s`. Returns whether it went by itself."""
        if not self.running:
            return True
        assert self._process is not None
        self._signal(self.plan.stop_signal)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
            return False
        return True

    def kill(self) -> None:
        if self.running:
            self._signal_group(signal.SIGKILL)

    def close(self) -> None:
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(LINE_BYTES_MAX):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, data: bytes) -> None:
        line = data.decode(errors="replace").rstrip()
        if not line:
            return
        record = Record(line)
        self._log.write(record.json())
        self.last_lines.append(record.summary())
        self._on_record(self.name, record)
