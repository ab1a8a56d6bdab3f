"""The life of a service process, as its parent and its signals see it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machine import scaled

TARGET = Path(__file__).with_name("rpc_process_target.py")
Start = Callable[..., "subprocess.Popen[str]"]


def command(*flags: str, **settings: str) -> list[str]:
    sets = [f"--set={name}={value}" for name, value in {"listen": "127.0.0.1:0", **settings}.items()]
    return [sys.executable, str(TARGET), *sets, *flags]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, environ: dict[str, str] | None = None, **settings: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*flags, **settings),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def logged(errors: str) -> list[dict[str, str]]:
    return [json.loads(entry) for entry in errors.splitlines()]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(start: Start, signum: int) -> None:
    process = start(drain_takes_s="0.2", instance_id="decode-x")
    assert line(process) == "ready decode-x"
    process.send_signal(signum)
    out, err = process.communicate(timeout=scaled(20))
    assert out.split() == ["stopping", "drained"]
    assert process.returncode == 0
    (entry,) = logged(err)
    assert (entry["message"], entry["instance"]) == ("draining", "decode-x")


def test_no_collection_of_garbage_goes_over_what_was_imported(start: Start) -> None:
    process = start(on_start="count", instance_id="decode-x")
    assert [line(process), line(process)] == ["ready decode-x", "0"]


def test_instances_get_names_of_their_own(start: Start) -> None:
    names = {line(start(host="hh")) for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("ready decode-hh-") for name in names)


def test_a_second_signal_ends_at_once(start: Start) -> None:
    process = start(drain_takes_s="60", drain_s="60")
    line(process)
    process.terminate()
    assert line(process) == "stopping"
    process.terminate()
    process.communicate(timeout=scaled(20))
    assert process.returncode == 128 + signal.SIGTERM


def test_the_drain_is_bounded(start: Start) -> None:
    process = start(drain_takes_s="60", drain_s="0.2")
    line(process)
    process.terminate()
    _, err = process.communicate(timeout=scaled(20))
    assert process.returncode == 1
    assert logged(err)[-1]["message"].startswith("not drained within 0.2 s")


def test_an_event_loop_that_is_stuck_is_ended(start: Start) -> None:
    process = start(blocks_while_draining="true", drain_s="0.2")
    line(process)
    process.terminate()
    _, err = process.communicate(timeout=scaled(20))
    assert process.returncode == 1
    assert logged(err)[-1]["message"] == "stuck while ending: ended"


def test_failures_are_logged_and_show_in_the_exit_code(start: Start) -> None:
    process = start(on_start="crash")
    _, err = process.communicate(timeout=scaled(20))
    assert process.returncode == 1
    assert "RuntimeError: boom" in logged(err)[-1]["exception"]
    process = start(on_start="unavailable")
    _, err = process.communicate(timeout=scaled(20))
    assert process.returncode == 1
    last = logged(err)[-1]
    assert (last["message"], last["level"], last["code"]) == (
        "the data directory is in use", "critical", "unavailable",
    )  # fmt: skip
    assert "exception" not in last


def test_wrong_settings_end_with_2_and_one_clear_line(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "kvcommons.toml"
    file.write_text("[decode]\non_strat = 1\n")
    process = start("--config", str(file))
    _, err = process.communicate(timeout=scaled(20))
    assert process.returncode == 2
    (entry,) = logged(err)
    assert "did you mean 'on_start'?" in entry["message"]
    file.write_text("[decode]\non_start = 'crash'\n")
    process = start("--config", str(file), environ={"KVCOMMONS_DECODE__ON_START": "unavailable"})
    _, err = process.communicate(timeout=scaled(20))
    assert logged(err)[-1]["message"] == "the data directory is in use"


def test_a_child_dies_with_its_parent(start: Start, tmp_path: Path) -> None:
    # The parent starts the child, tells us its pid and is killed, which it cannot pass on.
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([*sys.argv[1:], f'--parent-pid={os.getpid()}'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *command()],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + scaled(20)
    while _lives(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def test_a_parent_that_is_gone_already_is_noticed(start: Start) -> None:
    process = start("--parent-pid", "1" if os.getpid() != 1 else "2")
    _, err = process.communicate(timeout=scaled(20))
    assert process.returncode == 1
    assert "is gone" in logged(err)[-1]["message"]


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
