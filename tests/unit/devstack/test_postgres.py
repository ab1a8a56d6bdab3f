"""Whether a stack runs a PostgreSQL of its own, and which."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from devstack import postgres
from devstack.place import Claim
from devstack.plan import Place, tables
from devstack.settings import UpSettings
from kvcommons.errors import Unavailable

URL = "postgresql://kv@db/kv"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    claim = Claim(tmp_path / "data")
    yield claim.place
    claim.release()
    assert not claim.place.postgres_sockets.exists()


def fake(packaged: Path, version: str) -> None:
    folder = packaged / version / "bin"
    folder.mkdir(parents=True)
    for name in ("initdb", "postgres"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}.3 (Debian)'\n")
        (folder / name).chmod(0o755)


def test_one_is_wanted_for_several_kvstores_without_a_database(place: Place) -> None:
    one, two = UpSettings(), UpSettings(kvstore=2)
    assert not postgres.is_wanted(one, place, {}, {})
    assert postgres.is_wanted(two, place, {}, {})
    named = {"kvstore": {"records": URL}}
    assert not postgres.is_wanted(two, place, named, {})
    assert not postgres.is_wanted(two, place, {}, {postgres.VARIABLE: URL})
    place.postgres.mkdir()
    assert postgres.is_wanted(one, place, {}, {})  # it has the sessions now
    assert not postgres.is_wanted(one, place, named, {})


def test_without_one_it_is_said_what_to_set(place: Place, tmp_path: Path) -> None:
    with pytest.raises(
        Unavailable, match=r'set records = "postgresql://USER@HOST/DATABASE" in .*\[kvstore\]'
    ):
        postgres.find(place, {"PATH": ""}, 2, tmp_path)


def test_the_newest_is_taken_and_then_the_one_that_wrote_the_data(place: Place, tmp_path: Path) -> None:
    for version in ("15", "17", "9"):
        fake(tmp_path, version)
    found = postgres.find(place, {"PATH": ""}, 2, tmp_path)
    assert found.programs == tmp_path / "17" / "bin"
    place.postgres_sockets.rmdir()
    place.postgres.mkdir()
    (place.postgres / "PG_VERSION").write_text("15\n")
    assert postgres.find(place, {"PATH": ""}, 2, tmp_path).programs == tmp_path / "15" / "bin"
    (place.postgres / "PG_VERSION").write_text("16\n")
    with pytest.raises(Unavailable, match="written by PostgreSQL 16, which is not installed"):
        postgres.find(place, {"PATH": ""}, 2, tmp_path)


def test_it_is_reached_over_its_socket_alone_and_kvstores_are_told_where(
    place: Place, tmp_path: Path
) -> None:
    fake(tmp_path, "15")
    environ = {"PATH": "", "PGDATA": "/elsewhere", "HOME": "/"}
    server = postgres.find(place, environ, 2, tmp_path)
    assert place.postgres_sockets.stat().st_mode & 0o777 == 0o700
    plan = server.plan(place.postgres)
    assert "listen_addresses=" in plan.command
    assert f"unix_socket_directories={place.postgres_sockets}" in plan.command
    assert "PGDATA" not in plan.environment
    assert plan.stop_signal is signal.SIGINT
    assert tables(UpSettings(kvstore=2), place, 2, {}, server.url)["kvstore"]["records"] == server.url
    user = {"kvstore": {"records": URL}}
    assert tables(UpSettings(kvstore=2), place, 2, user)["kvstore"]["records"] == URL
