"""Keeps the children of a stack running, and ends them in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from devstack.child import Child
from devstack.logfile import LogFile
from devstack.plan import STOP_ORDER, Place, ProcessPlan
from devstack.terminal import Record, Terminal
from kvcommons.errors import Unavailable

RESTART_S_MIN = 0.2
RESTART_S_MAX = 10.0
# A child that lived this long did not die of its start: its next restart is prompt again.
SETTLED_S = 30.0
# A service drains for `drain_s` (10 by default); past this it is killed.
GRACE_S = 14.0
# What `rpc.process` exits with where starting again would not help: wrong settings, damaged data.
REFUSED = 2
# Levels that are shown; what the databases say is a diary, kept in its file.
_SHOWN = frozenset({"info", "warning", "error", "critical", "output"})
_SHOWN_OF_DATABASES = frozenset({"error", "critical"})
_DATABASES = ("etcd", "postgres")


def restart_delay_s(deaths: int) -> float:
    """Backoff before a restart after `deaths` deaths in a row."""
    return min(RESTART_S_MAX, RESTART_S_MIN * 2.0 ** (deaths - 1))


class Supervisor:
    """Starts all children at once; each that dies is named with its last lines and started again with
    backoff.

    `failed` is set, with the reason, when the stack cannot go on: wrong settings, damaged data, or a death
    without `restart`.
    """

    def __init__(
        self, plans: Sequence[ProcessPlan], place: Place, terminal: Terminal, *, restart: bool, log_bytes: int
    ) -> None:
        self._terminal = terminal
        self._restart = restart
        self._stopping = False
        self._keepers: list[asyncio.Task[None]] = []
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.children = [
            Child(plan, LogFile(place.logs / f"{plan.name}.jsonl", log_bytes), self._show) for plan in plans
        ]

    async def start(self) -> None:
        """Raises Unavailable when a program cannot be run at all."""
        for child in self.children:
            try:
                await child.start()
            except OSError as error:
                raise Unavailable(f"{child.name} cannot be started: {error}") from error
            self._keepers.append(asyncio.create_task(self._keep(child), name=f"keep {child.name}"))

    async def stop(self) -> None:
        """All children, service by service: each before what it calls."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for service in STOP_ORDER:
            children = [child for child in self.children if child.plan.service == service]
            clean = await asyncio.gather(*(child.stop(GRACE_S) for child in children))
            for child, went in zip(children, clean, strict=True):
                if not went:
                    self._terminal.say(
                        f"{child.name} did not end within {GRACE_S:g} s and was killed", "warning"
                    )
        for child in self.children:
            child.close()

    def kill(self) -> None:
        """All at once, without a drain."""
        self._stopping = True
        for child in self.children:
            child.kill()

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self.children if child.pid is not None}

    async def _keep(self, child: Child) -> None:
        deaths = 0
        while True:
            born = time.monotonic()
            status = await child.wait()
            if self._stopping:
                return
            deaths = 1 if time.monotonic() - born > SETTLED_S else deaths + 1
            self._report(child, status)
            if status == REFUSED:
                self._fail(
                    f"{child.name} refused to start: {child.last_lines[-1] if child.last_lines else ''}"
                )
                return
            if not self._restart:
                self._fail(f"{child.name} died")
                return
            delay_s = restart_delay_s(deaths)
            self._terminal.say(f"{child.name} is started again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                await child.start()
            except OSError as error:
                self._fail(f"{child.name} cannot be started again: {error}")
                return

    def _report(self, child: Child, status: int) -> None:
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        self._terminal.say(f"{child.name} died ({how}). Its last lines:", "error")
        for line in child.last_lines or ["(it said nothing)"]:
            self._terminal.say(f"    {line}", "error")

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    def _show(self, name: str, record: Record) -> None:
        # What goes well with a request is for the log files: a terminal would show nothing else.
        routine = record.level == "info" and "request_id" in record.fields
        shown = _SHOWN_OF_DATABASES if name in _DATABASES else _SHOWN
        if record.level in shown and not routine:
            self._terminal.child(name, record)
