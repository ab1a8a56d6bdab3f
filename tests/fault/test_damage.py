"""Bytes on disk that change, go missing or find no room: nothing wrong is served, and no committed turn is
lost without a word."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devstack.rest import Turn
from kvcommons.errors import StoreUnavailable
from kvcommons.pb import kvstore_pb2 as pb
from tests.contract.kvstore_process import KvstoreProcess
from tests.fault.streams import token_ids
from tests.machine import scaled
from tests.system.conftest import FLOAT32
from tests.system.scrape import scrape
from tests.system.stack import Stack
from tests.unit.kvstore.samples import SHAPE, block_ids

pytestmark = pytest.mark.timeout(300)

COMMIT_S = 3.0
SLOW_S = 60.0  # for what takes a moment where nothing else runs
BLOCK_TOKENS = 16
# Little memory everywhere, so that what was said a moment ago has to come from disk.
TABLES = {
    **{name: {**table, "capacity_tokens": 2048} for name, table in FLOAT32.items()},
    "kvstore": {"dram_bytes": 4 << 20},
    "router": {"commit_deadline_s": COMMIT_S},
}
FACTS = "My cat is called Zuzu. My brother is called Benno. My house is green. My dog is called Rex. "
QUESTION = "What is my cat called?"


# ---- a whole stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    shared = Stack(tmp_path_factory.mktemp("damaged"), tables=TABLES, attention_pool=0)
    with shared:
        yield shared
    shared.assert_gone()


def say(stack: Stack, session: str, text: str, *, reuse: bool = True) -> Turn:
    return stack.client.say(text, session, max_tokens=24, temperature=0.0, ignore_eos=True, reuse=reuse)


def undisturbed(stack: Stack, name: str) -> tuple[str, list[int]]:
    """The second answer, and the session's tokens, where everything is computed; nothing of it is stored."""
    session = f"{name}-undisturbed"
    say(stack, session, f"{name}. {FACTS}", reuse=False)
    answer = say(stack, session, QUESTION, reuse=False)
    return answer.text, token_ids(stack, session)


def flood(stack: Stack, seed: int) -> None:
    """Leaves nothing of what was said before in memory: all of it is on disk, and so is the flood, for blocks
    that wait for the disk leave no room in DRAM to load others."""
    stack.until(lambda: _at_rest(stack), SLOW_S, "what was said is not saved")
    dice = random.Random(seed)
    prompt = [dice.randrange(10, 900) for _ in range(2040)]
    stack.client.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    stack.until(lambda: _at_rest(stack), SLOW_S, "the flood is not saved")


def _at_rest(stack: Stack) -> bool:
    """Whether no block is on its way to the kvstore, or from its memory to its disk."""
    for service in ("prefill", "decode"):
        if scrape(stack, service).value("kvcommons_block_save_pending_bytes"):
            return False
    store = stack.client.get("/v1/status")["store"]
    return store is not None and not store["pending_writes"]


def stored_blocks(stack: Stack, session: str) -> int:
    """How many of the session's first blocks the kvstore has."""
    tiers = stack.client.session(session)["tiers"]
    return int(tiers["dram"] + tiers["disk"]) if tiers else 0


def slabs(stack: Stack) -> list[Path]:
    found = sorted((stack.data / "kvstore" / "slabs").glob("slab-*"))
    assert found
    return found


def flip(path: Path) -> None:
    """One byte in each 512, headers of slabs left alone."""
    with path.open("r+b") as file:
        for at in range(4096 + 100, path.stat().st_size, 512):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x40]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def garble(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 64):
            content[at] ^= 0x15
        path.write_bytes(content)


def each_slab(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(store: Path) -> None:
        for path in (store / "slabs").glob("slab-*"):
            damage(path)

    return apply


def restarted(stack: Stack, damage: Callable[[Path], None]) -> None:
    """kill -9 of the kvstore, and damage before the stack can start it again."""
    supervisor = stack.pid("up")
    os.kill(supervisor, signal.SIGSTOP)
    try:
        before = stack.kill("kvstore")
        stack.until(lambda: all(process.pid != before for process in stack.processes()), 20, "kvstore stays")
        damage(stack.data / "kvstore")
    finally:
        os.kill(supervisor, signal.SIGCONT)


def corrupt_blocks(stack: Stack) -> int:
    return int(stack.client.get("/v1/status")["store"]["corrupt_blocks"])


def until_more_corrupt_than(stack: Stack, before: int, session: str) -> None:
    """A load that takes too long is computed instead, and finds nothing: the session is asked again."""
    for seed in range(900, 905):
        if corrupt_blocks(stack) > before:
            return
        flood(stack, seed)
        say(stack, session, QUESTION)
    assert corrupt_blocks(stack) > before


DAMAGES: dict[str, Callable[[Path], None]] = {
    "bytes flipped": each_slab(flip),
    "slabs cut": each_slab(cut),
    "slabs gone": each_slab(Path.unlink),
    "index garbled": lambda store: garble(store / "index", "*.log"),
    "index without manifest": lambda store: garble(store / "index", "MANIFEST*"),
    "index gone": lambda store: shutil.rmtree(store / "index"),
}

# The others are like one of these.
TELLING = ("bytes flipped", "slabs gone", "index gone")


def _serves(stack: Stack) -> bool:
    return stack.client.healthy() and stack.client.get("/v1/status")["store"] is not None


@pytest.mark.parametrize(
    "name", [name if name in TELLING else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES]
)
def test_damaged_blocks_are_computed_again(stack: Stack, name: str) -> None:
    expected, expected_ids = undisturbed(stack, name)
    first = say(stack, name, f"{name}. {FACTS}")
    flood(stack, len(name))
    restarted(stack, DAMAGES[name])
    stack.until(lambda: _serves(stack), SLOW_S, "the kvstore does not come back")
    turn = say(stack, name, QUESTION)
    assert (turn.text, token_ids(stack, name)) == (expected, expected_ids)
    history = first.prompt_tokens + first.completion_tokens
    whole = (history - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert turn.cached_tokens < whole if name == "slabs cut" else turn.cached_tokens == 0
    if name == "bytes flipped":
        until_more_corrupt_than(stack, 0, name)
    # And what was computed again is stored again, all of it (that nothing waits to be written is said of a
    # moment ago, when the last block may have been on its way),
    blocks = whole // BLOCK_TOKENS
    stack.until(
        lambda: _at_rest(stack) and stored_blocks(stack, name) >= blocks,
        SLOW_S,
        "what was computed again is not saved",
    )
    # and loaded from there. A load that takes too long is computed instead: on a busy machine it may have to
    # be asked for again.
    flood(stack, len(name) + 1000)
    stack.until(lambda: say(stack, name, QUESTION).cached_tokens >= whole, SLOW_S, "nothing is loaded")
    stack.assert_no_block_is_held()


def test_bytes_that_change_under_a_running_store(stack: Stack) -> None:
    expected, expected_ids = undisturbed(stack, "running")
    say(stack, "running", f"running. {FACTS}")
    flood(stack, 5)
    before = corrupt_blocks(stack)
    for path in slabs(stack):
        flip(path)
    turn = say(stack, "running", QUESTION)
    assert (turn.text, token_ids(stack, "running")) == (expected, expected_ids)
    assert turn.cached_tokens == 0
    until_more_corrupt_than(stack, before, "running")


def test_a_disk_that_fills_up_before_the_commit(stack: Stack) -> None:
    """A clear error within the commit's deadline; the turn is not there, those before it are, and once there
    is room all goes on."""
    say(stack, "full", FACTS)
    before = stack.client.session("full")
    store = stack.pid("kvstore")
    parts = stack.client.chat(QUESTION, "full", max_tokens=1500, ignore_eos=True)
    next(parts)  # of many: the disk is full long before the last
    resource.prlimit(store, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    heard_s = [time.monotonic()]
    try:
        with pytest.raises(StoreUnavailable, match="session store"):
            heard_s.extend(time.monotonic() for _ in parts)
        assert time.monotonic() - heard_s[-1] < scaled(COMMIT_S + 20)
        # What needs no session goes on.
        assert stack.client.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2})["choices"]
    finally:
        resource.prlimit(store, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    stack.until(lambda: _answers(stack, "full"), SLOW_S, "no turn is possible any more")
    after = stack.client.session("full")
    assert after["token_ids"][: before["tokens"]] == before["token_ids"]
    assert after["version"] == before["version"] + 1
    stack.assert_no_block_is_held()


def _answers(stack: Stack, session: str) -> bool:
    try:
        return bool(say(stack, session, QUESTION).text)
    except Exception:
        return False


def test_sessions_that_are_damaged_end_the_stack_with_a_reason(stack: Stack) -> None:
    """The last test of this stack."""
    restarted(stack, lambda store: garble(store / "sessions", "MANIFEST*"))
    assert stack.wait(SLOW_S) == 1
    assert "kvstore refused to start" in stack.said()
    assert "restore it from a backup" in stack.said()
    stack.assert_gone()


# ---- the kvstore alone


@pytest.fixture
def sockets() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    yield folder
    shutil.rmtree(folder)


def commit(store: KvstoreProcess, number: int, ids: list[bytes]) -> None:
    begin = pb.BeginTurnRequest(tenant="t", session_id="s", turn_id=f"{number}", owner="o", lease_ms=60_000)
    begun = store.sessions.BeginTurn(begin, timeout=scaled(30))
    store.sessions.CommitTurn(
        pb.CommitTurnRequest(
            tenant="t",
            session_id="s",
            turn_id=f"{number}",
            fencing=begun.fencing,
            expected_version=number,
            model=SHAPE.model,
            new_tokens=[number] * 50,
            block_ids=ids,
            durable_wait_ms=30_000,
        ),
        timeout=scaled(60),
    )


def filled(sockets: Path, data: Path) -> None:
    """A store with a session of four turns and its blocks, killed."""
    ids = block_ids(8, "damage")
    store = KvstoreProcess(sockets, data).wait_ready()
    try:
        store.put_blocks(ids)
        for number in range(4):
            commit(store, number, ids)
    finally:
        store.kill()


def test_the_process_refuses_sessions_that_are_cut_off(sockets: Path, tmp_path: Path) -> None:
    """RocksDB opens a log without its end; every other damage is tests/unit/kvstore/test_session_damage.py's.
    The last turn was committed at the very moment of the kill: the mark knows of it all the same."""
    data = tmp_path / "data"
    filled(sockets, data)
    shutil.copytree(data, tmp_path / "whole")
    (cut_off,) = (path for path in (data / "sessions").glob("*.log") if path.stat().st_size)
    os.truncate(cut_off, cut_off.stat().st_size - 20)
    assert _refused_or_whole(sockets, data)
    assert not _refused_or_whole(sockets, tmp_path / "whole")


def _refused_or_whole(sockets: Path, data: Path) -> bool:
    store = KvstoreProcess(sockets, data)
    try:
        store.wait_ready()
    except AssertionError:
        assert store.process.returncode == 2, store.errors
        assert "backup" in store.errors
        return True
    try:
        record = store.sessions.Get(pb.GetSessionRequest(tenant="t", session_id="s"), timeout=scaled(30))
        assert (record.version, len(record.tokens)) == (4, 200)
        return False
    finally:
        store.kill()


def test_sessions_that_are_gone_are_missed(sockets: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    filled(sockets, data)
    shutil.rmtree(data / "sessions")
    assert _refused_or_whole(sockets, data)
    (data / "sessions.mark").unlink()  # as the refusal says, for whoever wants to go on
    store = KvstoreProcess(sockets, data).wait_ready()
    assert not store.sessions.List(pb.ListSessionsRequest(tenant="t"), timeout=scaled(30)).sessions
    assert store.terminate() == 0
