"""Processes that share the cores of their host one after another, and what becomes of the lock of one that
dies."""

from __future__ import annotations

import fcntl
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvcommons.backend.host_device import HostDevice
from kvcommons.engine.core_lock import CoreLock, _Byte
from kvcommons.errors import InvalidInput
from tests.contract.test_long_chunks import LAYERS, Chunk, Clock, alone, creditor
from tests.machine import scaled
from tests.pausing import pause
from tests.waiting import wait_until

LONG_S = scaled(20.0)


class Child:
    """A process that has an end of the lock."""

    def __init__(self, path: Path, deadline_s: float = LONG_S) -> None:
        command = [sys.executable, "-m", "tests.contract.core_lock_child", str(path), str(deadline_s)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.answer() == "ready"

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self._answers.get(timeout=LONG_S)

    def ask(self, command: str) -> str:
        self.tell(command)
        return self.answer()

    @property
    def answered(self) -> bool:
        return not self._answers.empty()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LONG_S)
        self._reader.join(LONG_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line.strip())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@pytest.fixture
def seen(path: Path) -> Iterator[CoreLock]:
    """The test's own end."""
    with closing(CoreLock(path, deadline_s=LONG_S)) as lock:
        yield lock


@pytest.fixture
def children(path: Path) -> Iterator[list[Child]]:
    """Three."""
    made = [Child(path) for _ in range(3)]
    yield made
    for child in made:
        child.kill()


def test_processes_compute_one_after_another(seen: CoreLock, children: list[Child]) -> None:
    first, second, _ = children
    for _ in range(3):
        assert first.ask("acquire") == "True"
        assert not seen.wanted
        second.tell("acquire")
        wait_until(lambda: seen.wanted)
        assert not second.answered
        assert first.ask("release") == "released"
        # It would be quicker than the one that waits, but does not go before it.
        first.tell("acquire")
        assert second.answer() == "True"
        assert not first.answered
        assert second.ask("release") == "released"
        assert first.answer() == "True"
        assert first.ask("release") == "released"


@pytest.mark.parametrize("dies", ["holder", "waiter"])
def test_one_that_dies_is_in_nobody_s_way(seen: CoreLock, children: list[Child], dies: str) -> None:
    holds, waits, other = children
    assert holds.ask("acquire") == "True"
    waits.tell("acquire urgently")
    wait_until(lambda: seen.urgently_wanted)
    if dies == "holder":
        holds.kill()
        assert waits.answer() == "True"
        return
    waits.kill()
    wait_until(lambda: not seen.wanted and not seen.urgently_wanted)
    other.tell("acquire")
    wait_until(lambda: seen.wanted)
    assert holds.ask("release") == "released"
    assert other.answer() == "True"


def test_who_generates_comes_before_chunks_and_overtakes_each_once(
    seen: CoreLock, children: list[Child]
) -> None:
    first, chunk, tokens = children
    assert first.ask("acquire") == "True"
    chunk.tell("acquire")
    wait_until(lambda: seen.wanted)
    tokens.tell("acquire urgently")
    wait_until(lambda: seen.urgently_wanted)
    first.tell("release")
    assert tokens.answer() == "True"
    assert not chunk.answered
    # Again: now the chunk comes first, once it has looked.
    wait_until(lambda: seen.wanted)
    tokens.tell("release")
    tokens.tell("acquire urgently")
    assert tokens.answer() == "released"
    assert chunk.answer() == "True"
    assert not tokens.answered
    chunk.tell("release")
    assert tokens.answer() == "True"


def test_a_chunk_gives_way_until_who_is_urgent_has_looked(seen: CoreLock, children: list[Child]) -> None:
    """On a busy machine it is not its turn to compute for a while."""
    first, chunk, tokens = children
    assert first.ask("acquire") == "True"
    chunk.tell("acquire")
    wait_until(lambda: seen.wanted)
    pause(chunk.process.pid)  # it is the next
    tokens.tell("acquire urgently")
    wait_until(lambda: seen.urgently_wanted)
    pause(tokens.process.pid)
    chunk.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not seen.wanted)
    assert first.ask("release") == "released"
    time.sleep(0.02)
    assert not chunk.answered
    tokens.process.send_signal(signal.SIGCONT)
    assert tokens.answer() == "True"
    tokens.tell("release")
    assert chunk.answer() == "True"


def test_a_chunk_that_is_held_up_before_it_takes_the_cores_gives_way(
    seen: CoreLock, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is urgent comes between its look and its lock."""
    tokens, try_ = children[0], seen._try

    def late(byte: _Byte, kind: int = fcntl.LOCK_EX) -> bool:
        if byte is _Byte.CORES and not reported:
            reported.extend(["acquire urgently", "release"])
            for command in reported:
                tokens.tell(command)
            wait_until(lambda: seen.urgently_wanted)
        return try_(byte, kind)

    reported: list[str] = []
    monkeypatch.setattr(seen, "_try", late)
    assert seen.acquire(urgent=False)
    assert (tokens.answer(), tokens.answer()) == ("True", "released")


def test_who_does_not_get_it_in_time_goes_on_and_has_it_again_when_it_is_free(
    path: Path, children: list[Child]
) -> None:
    stuck = children[0]
    with closing(CoreLock(path, deadline_s=0.05)) as lock:
        assert lock.acquire(urgent=True)
        lock.release()
        assert stuck.ask("acquire") == "True"
        for _ in range(3):
            assert not lock.acquire(urgent=True)
            lock.release()
        assert lock.timeouts == 3
        assert lock.waited_s >= 0.05
        assert stuck.ask("release") == "released"
        assert lock.acquire(urgent=True)
        assert (lock.timeouts, lock.held) == (3, True)
        lock.release()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="name a file that this process may write") as refused:
        CoreLock(tmp_path / "missing" / "cores")
    assert refused.value.param == "core_lock"


def test_a_chunk_lets_others_have_the_cores_between_two_layers(seen: CoreLock, children: list[Child]) -> None:
    """And its token is the same."""
    lock, other, token = seen, children[0], alone()
    with creditor(Clock(), core_lock=lock) as made:
        answers = list[str]()

        def pace(layer: int) -> None:
            assert lock.held
            if layer in (1, 3):
                other.tell("acquire")
                other.tell("release")
                wait_until(lambda: lock.wanted)
            elif layer in (2, 4):
                answers.extend([other.answer(), other.answer()])

        chunk = Chunk(pace)
        made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
    assert chunk.first is not None, chunk.error
    assert (chunk.first.token.token, chunk.layers) == token
    assert chunk.layers == list(range(LAYERS))
    assert answers == ["True", "released"] * 2
    assert (lock.held, lock.timeouts) == (False, 0)


def test_an_engine_that_does_not_get_the_cores_computes_all_the_same(
    path: Path, children: list[Child]
) -> None:
    stuck, token = children[0], alone()
    assert stuck.ask("acquire") == "True"
    with closing(CoreLock(path, deadline_s=0.01)) as lock, creditor(Clock(), core_lock=lock) as made:
        chunk = Chunk(lambda layer: None)
        made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
    assert chunk.first is not None, chunk.error
    assert (chunk.first.token.token, chunk.layers) == token
    assert lock.timeouts


def test_who_computes_within_an_iteration_has_its_cores(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a draft model does for sequences that generate between the layers of a chunk."""
    awake_s: list[float] = []
    monkeypatch.setattr(HostDevice, "keep_awake", lambda _, seconds: awake_s.append(seconds))
    with closing(CoreLock(path)) as lock, creditor(Clock(), core_lock=lock) as made:
        with made.engine._cores.computing(urgent=False, awake_s=0.1):
            with made.engine._cores.computing(urgent=True, awake_s=0.2):
                assert lock.held
            assert lock.held, "the chunk goes on"
        assert not lock.held
    assert awake_s == [0.1, 0.2, 0.1], "and its threads wait as long as before"


def test_threads_do_not_wait_awake_while_another_engine_wants_the_cores(
    path: Path, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    awake_s: list[float] = []
    monkeypatch.setattr(HostDevice, "keep_awake", lambda _, seconds: awake_s.append(seconds))
    with closing(CoreLock(path)) as lock, creditor(Clock(), core_lock=lock) as made:
        with made.engine._cores.computing(urgent=True, awake_s=0.1):
            children[0].tell("acquire")
            wait_until(lambda: lock.wanted, LONG_S)
    assert awake_s == [0.1, 0.0]


def test_cores_are_given_back_whatever_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: HostDevice, seconds: float) -> None:
        raise OSError("no threads")

    monkeypatch.setattr(HostDevice, "keep_awake", fails)
    with closing(CoreLock(path)) as lock, creditor(Clock(), core_lock=lock) as made:
        for _ in range(2):
            with pytest.raises(OSError, match="no threads"), made.engine._cores.computing(urgent=True):
                pass
            assert not lock.held
