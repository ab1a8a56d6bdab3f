"""kill -9 of the kvstore at random moments: what was acknowledged is there, what is there is whole."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvcommons.errors import KVCommonsError, SessionNotFound, TurnInProgress
from kvcommons.pb import kvstore_pb2 as pb
from tests.contract.kvstore_process import KvstoreProcess
from tests.machine import scaled
from tests.unit.kvstore.samples import SHAPE, block_ids

SEED = 20_251
RUN = 8  # blocks of one sequence


@dataclass
class Promises:
    """What the store has said, and what it may have done without saying so."""

    durable: list[list[bytes]] = field(default_factory=list)
    started: list[list[bytes]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of the session, committed
    maybe: list[int] = field(default_factory=list)  # of a commit without an answer
    turns: int = 0


def work(store: KvstoreProcess, promises: Promises, name: str) -> None:
    """Writes sequences and commits turns until the store is gone."""
    number = 0
    try:
        while True:
            number += 1
            ids = block_ids(RUN, f"{name} {number}")
            promises.started.append(ids)
            store.put_blocks(ids)
            turn_id = f"{name} turn {number}"
            begun = begin(store, turn_id, name)
            promises.maybe = [number] * 100
            reply = store.sessions.CommitTurn(
                pb.CommitTurnRequest(
                    tenant="t",
                    session_id="s",
                    turn_id=turn_id,
                    fencing=begun.fencing,
                    expected_version=begun.record.version,
                    model=SHAPE.model,
                    new_tokens=promises.maybe,
                    block_ids=ids,
                    durable_wait_ms=30_000,
                ),
                timeout=scaled(60),
            )
            promises.tokens += promises.maybe
            promises.maybe = []
            promises.turns += 1
            if reply.durable_blocks == RUN:
                promises.durable.append(ids)
    except KVCommonsError:
        return


def begin(store: KvstoreProcess, turn_id: str, owner: str) -> pb.BeginTurnReply:
    """Waits for the lease of a turn that the last crash cut off to run out."""
    request = pb.BeginTurnRequest(tenant="t", session_id="s", turn_id=turn_id, owner=owner, lease_ms=300)
    give_up = time.monotonic() + scaled(30)
    while True:
        try:
            return store.sessions.BeginTurn(request, timeout=scaled(30))
        except TurnInProgress:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def check(store: KvstoreProcess, promises: Promises) -> None:
    for ids in promises.durable:
        assert store.get_blocks(ids)[0] == RUN
    for ids in promises.started:
        store.get_blocks(ids)  # asserts that what comes is right
    assert store.blocks.Stats(pb.StatsRequest(), timeout=scaled(30)).corrupt_blocks == 0
    try:
        record = store.sessions.Get(pb.GetSessionRequest(tenant="t", session_id="s"), timeout=scaled(30))
    except SessionNotFound:
        record = pb.SessionRecord()
    tokens = list(record.tokens)
    assert tokens in (promises.tokens, promises.tokens + promises.maybe)
    promises.tokens, promises.maybe = tokens, []


@pytest.fixture
def sockets() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_kill_at_any_moment(sockets: Path, tmp_path: Path, rounds: int) -> None:
    print(f"replay with SEED = {SEED}")
    dice = random.Random(SEED)
    promises = Promises()
    for number in range(rounds):
        store = KvstoreProcess(sockets, tmp_path / "data", disk_bytes=256 << 20).wait_ready()
        try:
            check(store, promises)
            worker = threading.Thread(target=work, args=(store, promises, f"round {number}"))
            worker.start()
            committed = promises.turns
            give_up = time.monotonic() + scaled(30)
            while promises.turns == committed and worker.is_alive():
                assert time.monotonic() < give_up, "no turn is committed"
                time.sleep(0.005)
            worker.join(dice.uniform(0.0, 0.7))
        finally:
            store.kill()
        worker.join(scaled(90))
        assert not worker.is_alive()
    last = KvstoreProcess(sockets, tmp_path / "data", disk_bytes=256 << 20).wait_ready()
    try:
        check(last, promises)
        assert promises.turns >= rounds
        assert len(promises.durable) == promises.turns
        assert last.terminate() == 0
    finally:
        if last.process.poll() is None:
            last.kill()
