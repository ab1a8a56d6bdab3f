"""Where the records of a test lie: in RocksDB, in a real PostgreSQL, and in one that took its dead primary's
place. Each test that asks for `records` runs with each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from kvcommons.homes import session_key
from services.kvstore.families import HEADS, LEASES, RECORDS
from services.kvstore.records.interface import Records
from services.kvstore.sessions import open_sessions
from tests.contract.postgres_server import PostgresPair, PostgresServer, running
from tests.contract.records_fixtures import MODEL, Clock, embedded
from tests.contract.records_fixtures import sql as in_database


class Home:
    """Where records lie. `open` gives them; again, after `close`, as they were."""

    def __init__(self, kind: str, folder: Path, conninfo: str, executor: Executor) -> None:
        self._kind, self._folder, self._conninfo, self._executor = kind, folder, conninfo, executor
        self.clock = Clock()
        self.default_ttl_s = 3600
        self.unnamed: list[bytes] = []
        self._opened: list[Records] = []

    async def open(self) -> Records:
        records: Records
        if self._kind == "embedded":
            records = embedded(self._folder, self.clock, self.default_ttl_s, self._forget, self._executor)
        else:
            records = in_database(self._conninfo, self.clock, self.default_ttl_s, self._forget)
        self._opened.append(records)
        return records

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def damage(self, session_id: str, value: bytes, what: str = "head") -> None:
        """Writes `value` where a session's head ("head") or its turn's lease ("lease") is. Nobody has the
        records open."""
        key = session_key("alice", session_id)
        if self._kind == "embedded":
            table = open_sessions(self._folder)
            families = (RECORDS, HEADS) if what == "head" else (LEASES,)
            table.write([(family, key, value) for family in families])
            table.close()
            return
        column = sql.Identifier(what)
        async with await psycopg.AsyncConnection.connect(self._conninfo) as connection:
            statement = sql.SQL("UPDATE sessions SET {} = %s WHERE key = %s").format(column)
            await connection.execute(statement, [value, key])

    def _forget(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        assert model == MODEL
        self.unnamed += block_ids


@pytest.fixture(scope="module")
def promoted() -> Iterator[PostgresServer]:
    """It was the synchronous replica of another one, which was killed, and has a replica itself now."""
    with running(PostgresPair()) as pair:
        pair.kill()
        pair.start()
        yield pair.primary


@pytest.fixture(params=["embedded", "postgres", pytest.param("promoted", marks=pytest.mark.slow)])
async def home(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Home]:
    conninfo = ""
    if request.param != "embedded":
        server: PostgresServer = request.getfixturevalue(request.param)
        conninfo = server.conninfo + server.new_schema()
    with ThreadPoolExecutor(4) as executor:
        made = Home(request.param, tmp_path, conninfo, executor)
        yield made
        await made.close()


@pytest.fixture
async def records(home: Home) -> Records:
    return await home.open()


@pytest.fixture
def clock(home: Home) -> Clock:
    return home.clock
