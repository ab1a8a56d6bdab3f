"""`kvcommons up`: what it starts is watched, and all of it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from devstack.rest import RestClient
from tests.machine import scaled
from tests.system.conftest import LOADS
from tests.system.stack import Stack

ROOT = Path(__file__).parents[2]
STACK_BYTES_MAX = 2 << 30
LIGHT_BYTES_MAX = 150 << 20
# Of one core, all processes together. Polling shows here first.
IDLE_CORES_MAX = 0.25
IDLE_S = 4.0
WITH_TORCH = ("prefill", "decode", "attention_pool")
WITHOUT_TORCH = ("router", "ledger", "kvstore", "up")
CHILDREN = 7  # etcd, and one of each service


def up(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "devstack", "up", "--no-demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60), check=False)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As `make up` leaves it: after its conversation."""
    stack = Stack(tmp_path_factory.mktemp("idle"), tables={"prefill": LOADS}, no_demo=False)
    with stack:
        until_told(stack, conversations=1)
        yield stack
    stack.assert_gone()


def until_told(stack: Stack, conversations: int) -> None:
    stack.until(
        lambda: stack.said().count("Ctrl-C stops the stack") == conversations,
        30,
        "the conversation did not end",
    )


def reused(said: str) -> tuple[int, int]:
    """What the conversation says of its last turn: tokens from cache, and all of the prompt."""
    proof = re.search(r"(\d+) of (\d+) prompt tokens came from cache", said)
    assert proof is not None
    return int(proof[1]), int(proof[2])


def test_the_conversation_at_the_start_proves_itself(idle: Stack) -> None:
    said = idle.said()
    assert "A first conversation:" in said
    assert re.search(r"model  .*Zuzu", said.split("What is my cat called?")[1])
    cached, _ = reused(said)
    assert cached >= 16
    assert cached % 16 == 0
    what_it_says_to_type_talks_to_it(idle)


def what_it_says_to_type_talks_to_it(stack: Stack, key: str = "") -> None:
    """As a shell runs it, with one's key where one is needed."""
    stack.until(lambda: "Ctrl-C stops the stack" in stack.said(), 10, "the stack does not say what to type")
    found = re.search("^To talk to it, in another terminal: (.*)$", stack.said(), re.MULTILINE)
    assert found is not None, stack.said()
    reported = found[1]
    assert f"chat --url {stack.url}" in reported
    assert ("KVCOMMONS_API_KEY=KEY " in reported) == bool(key)
    command = reported.replace("=KEY ", f"={key} ")
    ended = subprocess.run(
        command, shell=True, cwd=ROOT, input="Hello.\n/exit\n", capture_output=True, text=True,
        timeout=scaled(60), check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended
    assert "Go on later with" in ended.stdout


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident; and its share of it, where pages that several processes map count once in all."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = {
        name: int(size) << 10 for name, size in re.findall(r"^(Rss|Pss):\s+(\d+) kB", rollup, re.MULTILINE)
    }
    return found["Rss"], found["Pss"]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_stack_is_light(idle: Stack) -> None:
    sizes = {process.name: memory_bytes(process.pid) for process in idle.processes()}
    assert sizes.keys() == {*WITH_TORCH, *WITHOUT_TORCH, "etcd"}
    # Even without counting shared pages once.
    assert sum(resident for resident, _ in sizes.values()) <= STACK_BYTES_MAX, sizes
    for name in ("router", "ledger", "kvstore"):  # of the kvstore's DRAM tier little is touched yet
        assert sizes[name][0] <= LIGHT_BYTES_MAX, sizes


def test_only_services_that_compute_load_torch(idle: Stack) -> None:
    for name in (*WITH_TORCH, *WITHOUT_TORCH):
        maps = Path(f"/proc/{idle.pid(name)}/maps").read_text()
        assert ("libtorch" in maps) == (name in WITH_TORCH), name


def test_an_idle_stack_leaves_the_cores_alone(idle: Stack) -> None:
    before = {process: cpu_s(process.pid) for process in idle.processes()}
    time.sleep(IDLE_S)  # the one thing to do here is nothing
    used = {process.name: (cpu_s(process.pid) - spent_s) / IDLE_S for process, spent_s in before.items()}
    assert sum(used.values()) < IDLE_CORES_MAX, used


def test_only_rest_listens_on_tcp(idle: Stack) -> None:
    names = {inode: process.name for process in idle.processes() for inode in sockets(process.pid)}
    listening = [
        (names[row[9]], int(row[1].rpartition(":")[2], 16))
        for kind in ("tcp", "tcp6")
        for row in map(str.split, Path(f"/proc/net/{kind}").read_text().splitlines()[1:])
        if row[3] == "0A" and row[9] in names
    ]
    assert listening == [("router", urlsplit(idle.url).port)]
    for kind in ("udp", "udp6"):
        rows = map(str.split, Path(f"/proc/net/{kind}").read_text().splitlines()[1:])
        assert not [row for row in rows if row[9] in names]
    on_unix = {
        Path(row[7]).name
        for row in map(str.split, Path("/proc/net/unix").read_text().splitlines())
        if len(row) > 7 and row[7].startswith(f"{idle.runtime}/") and row[6] in names
    }
    assert {"ledger.c", "kvstore.c", "kvstore.d", "decode.d", "attention_pool.d", "prefill.m"} <= on_unix


def sockets(pid: int) -> set[str]:
    """Inodes."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue
    return found


def test_a_data_directory_or_port_in_use_is_refused(idle: Stack, tmp_path: Path) -> None:
    second = up("--data", str(idle.data), "--port", "0")
    assert second.returncode == 2
    assert f"in use by another stack (process {idle.pid('up')})" in second.stdout
    port = str(urlsplit(idle.url).port)
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
    assert ended.returncode == 2
    assert message in ended.stdout


def test_an_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "kvcommons.toml"
    file.write_text("[kvstore]\ndram_byte = 4096\n")
    ended = up("--data", str(tmp_path / "data"), "--port", "0", "--config", str(file))
    assert ended.returncode == 2
    assert "did you mean 'dram_bytes'" in ended.stdout


def test_two_stacks_run_side_by_side_and_a_service_that_is_killed_is_named_and_comes_back(
    idle: Stack, tmp_path: Path
) -> None:
    """One with keys, beside one without; and a second Ctrl-C kills."""
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann-1\n")
    with Stack(tmp_path / "other", colocated=True, attention_pool=0, api_key_file=str(keys)) as other:
        assert other.url != idle.url
        assert other.client.healthy()
        assert idle.client.healthy()
        assert RestClient(other.url, api_key="key-of-ann-1").get("/v1/sessions")["data"] == []
        what_it_says_to_type_talks_to_it(other, key="key-of-ann-1")
        before = other.kill("kvstore")
        other.until(lambda: "kvstore died (killed by signal 9)" in other.said(), 10, "the death is not told")
        other.until(
            lambda: any(p.name == "kvstore" and p.pid != before for p in other.processes()),
            10,
            "kvstore is not started again",
        )
        other.until(other.client.healthy, 20, "the stack is not healthy again")
        other.kill("kvstore", signal.SIGSTOP)  # it does not end before the second
        other.kill("up", signal.SIGINT)
        other.until(lambda: "Stopping" in other.said(), 5, "the first Ctrl-C is not heard")
        other.kill("up", signal.SIGINT)
        assert other.wait(5) in (0, 130)
        assert "Killed" in other.said()
    other.assert_gone()
    assert idle.client.healthy()


def test_the_conversation_survives_and_children_die_with_a_stack_that_is_killed(idle: Stack) -> None:
    """The last of the tests that share this stack."""
    idle.stop()
    idle.assert_gone()
    idle.start()
    until_told(idle, conversations=2)
    said = idle.said().rpartition("is still there")[2]
    assert re.search(r"model  .*Zuzu", said)
    cached, prompt = reused(said)
    assert cached >= prompt // 2

    idle.kill("up")
    idle.until(lambda: not idle.processes(), 10, "children outlived `kvcommons up`")
    idle.start(ready=False)  # it takes away what the killed one left
    idle.until(lambda: len(idle.processes()) == CHILDREN + 1, 20, "it does not start again")


@pytest.mark.slow
def test_without_restart_a_death_ends_the_stack(tmp_path: Path) -> None:
    stack = Stack(tmp_path, no_restart=True)
    stack.start()
    stack.kill("prefill")
    assert stack.wait(30) == 1
    assert "prefill died" in stack.said()
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
TELLING = ("importing", "the router answers")  # the first and the last


@pytest.mark.parametrize(
    "stage", [stage if stage in TELLING else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES]
)
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
