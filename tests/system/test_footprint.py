"""What the default stack takes of a machine that it idles on; that its services start in any order, and drain
when they are told to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from devstack.rest import Turn
from tests.machine import scaled
from tests.system.by_hand import DRAIN_S, ByHand, until
from tests.system.stack import Stack

ROOT = Path(__file__).parents[2]
# The bounds.
STACK_BYTES_MAX = 2 << 30
LIGHT_BYTES_MAX = 150 << 20
COMMAND_S_MAX = 0.5
# Ours: of one core, all processes together. Polling shows here first.
IDLE_CORES_MAX = 0.25
IDLE_S = 4.0
WITH_TORCH = ("prefill", "decode", "attention_pool")
WITHOUT_TORCH = ("router", "ledger", "kvstore", "up")
HEALTHY_S_MAX = 60.0


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """As `make up` leaves it: after its conversation."""
    stack = Stack(tmp_path_factory.mktemp("idle"), no_demo=False)
    with stack:
        stack.until(lambda: "Ctrl-C stops the stack" in stack.said(), 30, "the conversation did not end")
        yield stack
    stack.assert_gone()


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


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["chat", "--help"]])
def test_the_command_line_answers_at_once(arguments: list[str]) -> None:
    def seconds() -> float:
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "devstack", *arguments],
            cwd=ROOT,
            check=True,
            capture_output=True,
            timeout=scaled(30),
        )
        return time.monotonic() - started

    assert min(seconds() for _ in range(3)) < COMMAND_S_MAX  # others use the machine, too


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    stack = ByHand(tmp_path)
    try:
        yield stack
    finally:
        stack.end()


def test_services_start_in_any_order_and_drain_at_a_signal(by_hand: ByHand) -> None:
    """The last one first: each comes up and waits for what it needs, which is there only later."""
    for name in ("router", "attention_pool", "decode", "prefill", "kvstore"):
        by_hand.start(name)
    assert by_hand.client.reachable()
    assert not by_hand.client.healthy()
    by_hand.start("ledger")
    by_hand.start("etcd")
    until(by_hand.client.healthy, HEALTHY_S_MAX, "the stack is not healthy")
    assert by_hand.client.say("My cat is called Zuzu.", "s").finish_reason == "stop"

    # In the middle of a stream: it ends as it would have.
    answer = by_hand.client.chat("Tell me a story.", "s", max_tokens=300, ignore_eos=True)
    next(answer)
    exits: dict[str, tuple[int, float]] = {}
    draining = [
        threading.Thread(target=lambda name=name: exits.update({name: by_hand.stop(name)}), name=name)
        for name in ("router", "prefill", "decode")
    ]
    for thread in draining:
        thread.start()
    rest = list(answer)
    assert isinstance(rest[-1], Turn)
    assert (rest[-1].completion_tokens, rest[-1].finish_reason) == (300, "length")
    for thread in draining:
        thread.join(DRAIN_S + 6)
    for name, done in (("router", "answered"), ("decode", "generated")):
        said = by_hand.said(name)
        assert said.index('"draining"') < said.rindex(f'"{done}"'), said
    # The ledger without etcd, the store and the pool without a ledger.
    for name in ("etcd", "ledger", "kvstore", "attention_pool"):
        exits[name] = by_hand.stop(name)
    for name, (status, seconds) in exits.items():
        assert status == (-signal.SIGTERM if name == "etcd" else 0), (name, by_hand.said(name))
        assert seconds < DRAIN_S, exits
