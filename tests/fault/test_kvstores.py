"""Several kvstores with their records in a database: each may die or hang, and the database, too."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.homes import homes_of, session_key
from tests.contract.postgres_server import PostgresPair, PostgresServer, running
from tests.fault.records_chaos import opened
from tests.pausing import pause
from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

SEED = 20_261
KILLS = 8
TELLS = ("My cat is called Zuzu.", "My brother is called Benno.", "What is my cat called?")
PROCESSES = {"kvstore": "kvstore-1", "kvstore-2": "kvstore-2"}  # by the folder
SERVE_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(
    params=[PostgresServer, pytest.param(PostgresPair, marks=pytest.mark.slow)],
    ids=["restarted", "replica promoted"],
)
def database(request: pytest.FixtureRequest) -> Iterator[PostgresServer | PostgresPair]:
    with running(request.param()) as server:
        yield server


@pytest.mark.timeout(600)
async def test_every_acknowledged_turn_is_there_once(
    folder: Path, database: PostgresServer | PostgresPair
) -> None:
    print(f"replay with SEED = {SEED}")
    chaos = await opened(folder, SEED, database)
    try:
        await chaos.run(kills=KILLS)
        assert await chaos.check() == []
        assert chaos.acknowledged > KILLS
        assert set(chaos.kills) == {"kvstore", "database"}
    finally:
        await chaos.kvstores.close()


def home(session: str) -> str:
    """The process that is asked first."""
    return PROCESSES[homes_of(session_key("local", session), PROCESSES)[0]]


def ready(stack: Stack) -> int:
    return int(stack.client.get("/health")["components"]["kvstore"]["ready"])


def test_conversations_go_on_whichever_kvstore_dies_or_hangs(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    tables = {**FLOAT32, "kvstore": {"records": postgres.new_url()}}
    with Stack(tmp_path, tables=tables, kvstore=2, colocated=True, attention_pool=0) as stack:
        stack.until(lambda: ready(stack) == 2, SERVE_S, "two kvstores never serve")
        calm = [stack.client.say(text, "calm", reuse=False, temperature=0).text for text in TELLS]
        assert "Zuzu" in calm[-1]
        sessions = [f"talk-{number}" for number in range(6)]
        for session in sessions:
            assert stack.client.say(TELLS[0], session, temperature=0).text == calm[0]

        stack.kill(home(sessions[0]))
        for session in sessions:
            assert stack.client.say(TELLS[1], session, temperature=0).text == calm[1]
        stack.until(lambda: ready(stack) == 2, SERVE_S, "it was not started again")

        hung = stack.pid(home(sessions[0]))
        pause(hung)
        try:
            turns = [stack.client.say(TELLS[2], session, temperature=0) for session in sessions]
        finally:
            os.kill(hung, signal.SIGCONT)
        assert [turn.text for turn in turns] == [calm[2]] * len(sessions)
        stack.until(lambda: ready(stack) == 2, SERVE_S, "the one that hung is not back")
        tokens = {tuple(stack.client.session(session)["token_ids"]) for session in sessions}
        assert len(tokens) == 1
    stack.assert_gone()
