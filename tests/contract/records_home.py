"""Where the records of a test lie: in RocksDB, in a real PostgreSQL, and in one that took its dead primary's
place. Each test that asks for `records` runs with each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.kvstore.records.interface import Records
from tests.contract.postgres_server import PostgresPair, PostgresServer, running
from tests.contract.records_fixtures import Clock, Home


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
