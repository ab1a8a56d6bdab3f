"""Children are kept running, end in order, and never outlive their parent. Real processes."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from devstack.logfile import LogFile
from devstack.plan import Place, ProcessPlan
from devstack.supervisor import Supervisor
from devstack.terminal import Record, Terminal
from tests.machine import scaled
from tests.waiting import eventually

LIVES = "import time; print('here', flush=True); time.sleep(60)"


def plan(name: str, code: str, service: str = "decode") -> ProcessPlan:
    command = (sys.executable, "-c", textwrap.dedent(code))
    return ProcessPlan(name=name, service=service, command=command, environment=dict(os.environ))


class Bench:
    """A supervisor over small programs, and what it said."""

    def __init__(self, folder: Path, *plans: ProcessPlan, restart: bool = True) -> None:
        self.out = io.StringIO()
        self.place = Place(data=folder, runtime=folder)
        self.place.logs.mkdir()
        self.supervisor = Supervisor(
            plans, self.place, Terminal(self.out), restart=restart, log_bytes=1 << 20
        )

    def alive(self, pid: int) -> bool:
        return Path(f"/proc/{pid}").exists()


async def test_a_child_that_dies_is_named_with_its_last_lines_and_started_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan("decode-1", LIVES))
    await bench.supervisor.start()
    try:
        await eventually(lambda: "here" in bench.out.getvalue())
        first = bench.supervisor.pids()["decode-1"]
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: bench.supervisor.pids().get("decode-1", first) != first)
        await eventually(lambda: bench.out.getvalue().count("decode-1") >= 3)
        said = bench.out.getvalue()
        assert "decode-1 died (killed by signal 9). Its last lines:\n    here" in said
        assert not bench.supervisor.failed.done()
    finally:
        await bench.supervisor.stop()
    assert not bench.supervisor.pids()


async def test_without_restart_a_death_ends_the_stack(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan("decode", "raise SystemExit(1)"), restart=False)
    await bench.supervisor.start()
    try:
        assert await asyncio.wait_for(asyncio.shield(bench.supervisor.failed), 20) == "decode died"
    finally:
        await bench.supervisor.stop()


async def test_wrong_settings_end_the_stack_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan("kvstore", "print('no such setting'); raise SystemExit(2)"))
    await bench.supervisor.start()
    try:
        reason = await asyncio.wait_for(asyncio.shield(bench.supervisor.failed), 20)
        assert reason == "kvstore refused to start: no such setting"
    finally:
        await bench.supervisor.stop()


async def test_children_end_in_the_order_of_their_needs(tmp_path: Path) -> None:
    code = """
        import signal, sys, time
        def end(*_):
            print("ended", flush=True)
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        time.sleep(60)
    """
    services = ("ledger", "kvstore", "router", "decode")
    bench = Bench(tmp_path, *(plan(service, code, service) for service in services))
    await bench.supervisor.start()
    await eventually(lambda: bench.out.getvalue().count("up") == len(services))
    await bench.supervisor.stop()
    ended = [line.split()[2] for line in bench.out.getvalue().splitlines() if line.endswith("ended")]
    assert ended == ["router", "decode", "kvstore", "ledger"]


async def test_kill_ends_children_that_ignore_sigterm(tmp_path: Path) -> None:
    code = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(60)
    """
    bench = Bench(tmp_path, plan("decode", code))
    await bench.supervisor.start()
    await eventually(lambda: "up" in bench.out.getvalue())
    pid = bench.supervisor.pids()["decode"]
    stopping = asyncio.create_task(bench.supervisor.stop())
    await asyncio.sleep(0.05)
    bench.supervisor.kill()
    await asyncio.wait_for(stopping, scaled(5))
    assert not bench.alive(pid)


@pytest.mark.parametrize(
    "account",
    [
        None,
        # The kernel forgets what was asked of it where a process changes its account.
        pytest.param(
            "nobody",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account"),
        ),
    ],
)
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path, account: str | None) -> None:
    code = f"""
        import asyncio, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from devstack.plan import Place, ProcessPlan
        from devstack.supervisor import Supervisor
        from devstack.terminal import Terminal
        async def main():
            place = Place(data=Path({str(tmp_path)!r}), runtime=Path({str(tmp_path)!r}))
            place.logs.mkdir()
            command = ("sh", "-c", "echo here; sleep 60")
            plan = ProcessPlan(
                name="a", service="decode", command=command, environment={{}}, account={account!r}
            )
            supervisor = Supervisor([plan], place, Terminal(sys.stderr), restart=True, log_bytes=1 << 16)
            await supervisor.start()
            while not supervisor.children[0].last_lines:
                await asyncio.sleep(0.01)
            print(supervisor.pids()["a"], flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(timeout=10)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and state(child) != "Z":
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)


def state(pid: int) -> str:
    """Z for a process that is dead and waits to be read by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


async def test_what_children_say_is_kept_as_json(tmp_path: Path) -> None:
    code = """
        import time
        print('{"ts": "t", "level": "warning", "message": "slow", "tokens": 7}')
        print("plain", flush=True)
        print("x" * 200_000, flush=True)
        time.sleep(60)
    """
    bench = Bench(tmp_path, plan("decode", code))
    await bench.supervisor.start()
    try:
        await eventually(lambda: "plain" in bench.out.getvalue())
        assert re.search(
            r"^\d\d:\d\d:\d\d warning +decode +slow  tokens=7$", bench.out.getvalue(), re.MULTILINE
        )
    finally:
        await bench.supervisor.stop()
    lines = (bench.place.logs / "decode.jsonl").read_text().splitlines()
    assert [Record(line).text for line in lines][:2] == ["slow", "plain"]


def test_a_log_is_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.jsonl", 1 << 16)
    for number in range(5_000):
        log.write(f"{number:060d}")
    log.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 1 << 16
    assert (tmp_path / "a.jsonl").read_text().splitlines()[-1].endswith("4999")


def test_a_full_disk_costs_lines_not_the_stack(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "missing" / "a.jsonl", 1 << 16)
    log.write("lost")
    assert log.lines_lost == 1


@pytest.mark.parametrize("line", ["{broken", "[1]", "", "42"])
def test_any_line_is_a_record(line: str) -> None:
    assert Record(line).human() == line
