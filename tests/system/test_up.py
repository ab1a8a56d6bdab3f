"""`kvcommons up`: what it starts is watched, and all of it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.machine import scaled
from tests.system.stack import Stack

ROOT = Path(__file__).parents[2]
# Issue: healthy within 15 s on two cores; other tests may run beside this one.
HEALTHY_S_MAX = 45.0
STACK_BYTES_MAX = 2 << 30
LIGHT_BYTES_MAX = 150 << 20
CHILDREN = 7  # etcd, and one of each service


def up(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "devstack", "up", "--no-demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60), check=False)


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def test_the_conversation_at_the_start_proves_itself_and_survives(tmp_path: Path) -> None:
    stack = Stack(tmp_path, no_demo=False)
    started = time.monotonic()
    with stack:
        assert time.monotonic() - started < HEALTHY_S_MAX
        stack.until(lambda: "Ctrl-C stops the stack" in stack.said(), 30, "the conversation did not end")
        said = stack.said()
        assert "A first conversation:" in said
        assert re.search(r"model  .*Zuzu", said.split("What is my cat called?")[1])
        proof = re.search(r"(\d+) of (\d+) prompt tokens came from cache", said)
        assert proof is not None
        assert int(proof[1]) >= 16
        assert int(proof[1]) % 16 == 0
    stack.assert_gone()
    with stack:
        stack.until(lambda: stack.said().count("Ctrl-C stops the stack") == 2, 30, "no second conversation")
        said = stack.said().rpartition("is still there")[2]
        assert re.search(r"model  .*Zuzu", said)
        proof = re.search(r"(\d+) of (\d+) prompt tokens came from cache", said)
        assert proof is not None
        assert int(proof[1]) >= int(proof[2]) // 2
    stack.assert_gone()


def test_an_idle_stack_is_light_and_only_rest_has_a_port(stack: Stack) -> None:
    sizes = {process.name: resident_bytes(process.pid) for process in stack.processes()}
    assert sizes.keys() == {
        "up",
        "etcd",
        "ledger",
        "kvstore",
        "prefill",
        "decode",
        "attention_pool",
        "router",
    }
    assert sum(sizes.values()) <= STACK_BYTES_MAX, sizes
    for name in ("router", "ledger", "kvstore"):
        assert sizes[name] <= LIGHT_BYTES_MAX, sizes
    inodes = {inode for process in stack.processes() for inode in sockets(process.pid)}
    listening = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    ports = {
        int(line[1].rpartition(":")[2], 16) for line in listening if line[3] == "0A" and line[9] in inodes
    }
    assert ports == {urlsplit(stack.url).port}


def sockets(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def test_a_data_directory_or_port_in_use_is_refused(stack: Stack, tmp_path: Path) -> None:
    second = up("--data", str(stack.data), "--port", "0")
    assert second.returncode == 2
    assert f"in use by another stack (process {stack.pid('up')})" in second.stdout
    port = str(urlsplit(stack.url).port)
    third = up("--data", str(tmp_path / "other"), "--port", port)
    assert third.returncode == 1
    assert f"port {port} is in use" in third.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "0"], "decode"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--model", "no/such/folder/at/all"], "no/such/folder/at/all"),
    ],
)
def test_wrong_arguments_end_the_start_with_a_reason(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    ended = up("--data", str(tmp_path / "data"), "--port", "0", *arguments)
    assert ended.returncode in (1, 2)
    assert message in ended.stdout


def test_an_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "kvcommons.toml"
    file.write_text("[decode]\ncapacity_token = 4096\n")
    ended = up("--data", str(tmp_path / "data"), "--port", "0", "--config", str(file))
    assert ended.returncode == 1
    assert "did you mean 'capacity_tokens'" in ended.stdout


def test_two_stacks_run_side_by_side_and_a_service_that_is_killed_is_named_and_comes_back(
    stack: Stack, tmp_path: Path
) -> None:
    with Stack(tmp_path) as other:
        assert other.url != stack.url
        assert other.client.healthy()
        assert stack.client.healthy()
        assert other.client.get("/v1/sessions")["data"] == []
        before = other.kill("kvstore")
        other.until(lambda: "kvstore died (killed by signal 9)" in other.said(), 10, "the death is not told")
        other.until(
            lambda: any(p.name == "kvstore" and p.pid != before for p in other.processes()),
            10,
            "kvstore is not started again",
        )
        other.until(other.client.healthy, 20, "the stack is not healthy again")
    other.assert_gone()
    assert stack.client.healthy()


@pytest.mark.slow
def test_without_restart_a_death_ends_the_stack(tmp_path: Path) -> None:
    stack = Stack(tmp_path, no_restart=True)
    stack.start()
    stack.kill("prefill")
    assert stack.wait(30) == 1
    assert "prefill died" in stack.said()
    stack.assert_gone()


def test_children_die_with_a_stack_that_is_killed_and_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.start()
    stack.kill("up")
    stack.until(lambda: not stack.processes(), 10, "children outlived `kvcommons up`")
    stack.start()
    started = time.monotonic()
    stack.kill("up", signal.SIGINT)
    stack.until(lambda: "Stopping" in stack.said(), 5, "the first Ctrl-C is not heard")
    stack.kill("up", signal.SIGINT)
    stack.wait(5)
    assert time.monotonic() - started < scaled(5)
    stack.assert_gone()


BENCHMARK = """
import sys, time
from pathlib import Path
from devstack.running import RunningStack
stack = RunningStack(Path(sys.argv[1]))
stack.start(ready=False)
stack.until(lambda: len(stack.processes()) > 1, 20, "no child")
print(*(process.pid for process in stack.processes()), flush=True)
time.sleep(60)
"""


def test_a_stack_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pids = program.stdout.readline().split()
        program.kill()
    assert len(pids) > 1
    deadline = time.monotonic() + 20
    while any(Path("/proc", pid).exists() for pid in pids):
        assert time.monotonic() < deadline, "the stack outlived the program that started it"
        time.sleep(0.05)


def _imports(stack: Stack) -> bool:
    return any("cygrpc" in Path(f"/proc/{process.pid}/maps").read_text() for process in stack.processes())


STAGES: dict[str, Callable[[Stack], object]] = {
    "importing": _imports,
    "its first child": lambda stack: len(stack.processes()) > 1,
    "all children": lambda stack: len(stack.processes()) == CHILDREN + 1,
    "the router answers": lambda stack: "router           serving" in stack.said(),
}


@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_while_it_starts_leaves_nothing_and_no_traceback(tmp_path: Path, stage: str) -> None:
    stack = Stack(tmp_path)
    stack.start(ready=False)
    stack.until(lambda: STAGES[stage](stack), 20, "it does not come so far")
    assert stack.stop() in (0, 130)
    assert stack.processes() == []
    assert "Traceback" not in stack.said()


INTERRUPTED = """
import asyncio.base_events, os, signal, sys
from devstack.cli import main
made = asyncio.base_events.BaseEventLoop.__init__
def interrupted(loop):
    os.kill(os.getpid(), signal.SIGINT)
    made(loop)
asyncio.base_events.BaseEventLoop.__init__ = interrupted
sys.exit(main(["up", "--data", sys.argv[1], "--port", "0"]))
"""


def test_ctrl_c_while_the_event_loop_is_made_ends_the_stack_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "data")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert ended.returncode in (0, 130)
    assert "Traceback" not in ended.stdout + ended.stderr
