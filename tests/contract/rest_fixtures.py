"""Fixtures of the REST suites: import them by name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.rest_stack import KvStore, Stack, stack


@pytest.fixture(scope="module")
def rest_store(request: pytest.FixtureRequest) -> Iterator[KvStore]:
    """A real kvstore, for all tests of a module; as parameter "sql" with its records in a database."""
    in_database = getattr(request, "param", "embedded") == "sql"
    records = request.getfixturevalue("postgres").new_url() if in_database else ""
    folder = Path(tempfile.mkdtemp(prefix="kvc-"))
    kvstore = KvStore(folder, records)
    kvstore.start()
    yield kvstore
    kvstore.stop()
    shutil.rmtree(folder)


@pytest.fixture
async def served(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[Stack]:
    """A router with one engine, all ready."""
    async with stack(socket_folder, rest_store) as it:
        await it.show()
        yield it


@pytest.fixture
async def pair(socket_folder: Path, rest_store: KvStore) -> AsyncIterator[Stack]:
    """A router with two engines, all ready, that gives up soon."""
    settings = {"resume_deadline_s": 2.0, "request_deadline_s": 8.0, "stall_s": 1.0}
    async with stack(socket_folder, rest_store, engines=2, settings=settings) as it:
        await it.show()
        yield it
