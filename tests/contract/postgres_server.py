"""A PostgreSQL of the test's own, and a proxy in front of it that counts, freezes and cuts."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from devstack.postgres import account_for_it, installed
from kvcommons.errors import Unavailable
from tests.machine import scaled

Server = TypeVar("Server", "PostgresServer", "PostgresPair")

_START_S = 60.0
_schemas = itertools.count()
_AS_ACCOUNT = """
import os, sys
group, user, *command = sys.argv[1:]
os.setgroups([])
os.setgid(int(group))
os.setuid(int(user))
os.execv(command[0], command)
"""


def programs() -> Path:
    """The folder with initdb and postgres. Skips the test where there is none."""
    if found := installed(os.environ):
        return found[max(found)]
    pytest.skip("needs PostgreSQL (initdb and postgres), as Debian's package postgresql has it")


def account() -> str | None:
    """As that of a stack. Skips the test where there is none."""
    try:
        return account_for_it()
    except Unavailable as error:
        pytest.skip(error.message)


class PostgresServer:
    """Made in a folder of its own with fsync and all else as it comes; reached over a Unix socket there."""

    def __init__(self, **settings: str) -> None:
        """`settings` of postgresql.conf, beside the defaults."""
        self._programs, self._account = programs(), account()
        self.folder = Path(tempfile.mkdtemp(prefix="kvc-pg-"))
        self._settings = {
            "unix_socket_directories": self.folder, "listen_addresses": "", "max_connections": 60, **settings
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        if self._account is not None:
            shutil.chown(self.folder, self._account)
        try:
            self._make("initdb", "-U", "tests", "-A", "trust", "-E", "UTF8", "--no-instructions")
        except RuntimeError as error:
            shutil.rmtree(self.folder)
            pytest.skip(str(error))

    @property
    def conninfo(self) -> str:
        return f"host={self.folder} user=tests dbname=postgres"

    @property
    def socket(self) -> Path:
        return self.folder / ".s.PGSQL.5432"

    def start(self) -> None:
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", "data", *options), cwd=self.folder, stdout=log, stderr=log
            )

    def copy(self, primary: PostgresServer) -> None:
        """Becomes its standby with the next `start`; what was here is gone."""
        shutil.rmtree(self.folder / "data")
        self._make(
            "pg_basebackup", "-h", str(primary.folder), "-U", "tests", "-R", "-X", "stream", "-c", "fast"
        )

    def wait_ready(self) -> None:
        """Until it takes connections."""
        give_up = time.monotonic() + scaled(_START_S)
        while True:
            try:
                with psycopg.connect(self.conninfo):
                    return
            except psycopg.OperationalError:
                assert self._process is not None
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < give_up
                time.sleep(0.05)

    async def ready(self) -> None:
        await asyncio.to_thread(self.wait_ready)

    def new_schema(self) -> str:
        """One of a test's own; returns what to add to a conninfo so that it is used."""
        name = f"test_{next(_schemas)}"
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
        return f" options='-c search_path={name} -c enable_seqscan=off'"

    def new_url(self) -> str:
        """The same as the setting `records`."""
        return self.url(self.new_schema())

    def url(self, more: str = "") -> str:
        values = conninfo_to_dict(self.conninfo + more)
        return f"postgresql:///?{urlencode(values, quote_via=quote)}"

    def kill(self) -> None:
        """As a crash does: nothing is written any more, and all connections break."""
        if self._process is None:
            return
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        for pid in (self._process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        give_up = time.monotonic() + scaled(_START_S)
        while any(map(_lives, pids)):  # they have its memory, which the next server looks for
            assert time.monotonic() < give_up
            time.sleep(0.005)
        for name in (".s.PGSQL.5432", ".s.PGSQL.5432.lock"):
            (self.folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # it ends at once, and leaves no shared memory
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(scaled(_START_S))
        self.kill()
        shutil.rmtree(self.folder)

    def _make(self, program: str, *arguments: str) -> None:
        """The data folder."""
        made = subprocess.run(
            self._command(program, "-D", "data", *arguments),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=scaled(_START_S),
            check=False,
        )
        if made.returncode:
            raise RuntimeError(f"PostgreSQL's {program} failed here: {made.stderr.strip()}")

    def _command(self, program: str, *arguments: str) -> list[str]:
        """As the account. The new process itself changes to it: for `user` subprocess would fork without
        vfork, and a fork beside threads of gRPC may crash before it executes anything."""
        command = [str(self._programs / program), *arguments]
        if self._account is None:
            return command
        entry = pwd.getpwnam(self._account)
        return [sys.executable, "-ISc", _AS_ACCOUNT, str(entry.pw_gid), str(entry.pw_uid), *command]


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """From its start until it is taken away."""
    try:
        server.start()
        server.wait_ready()
        yield server
    finally:
        server.remove()


class PostgresPair:
    """A primary, and a standby that has each commit before it is acknowledged (synchronous streaming
    replication). Where the primary is killed, `start` promotes the standby, and what was the primary begins
    anew as the standby of it."""

    def __init__(self) -> None:
        # Each is a standby that the other waits for, if it is the primary.
        self._primary, self._standby = (
            PostgresServer(cluster_name=own, synchronous_standby_names=other)
            for own, other in (("one", "two"), ("two", "one"))
        )
        self._killed = False

    @property
    def primary(self) -> PostgresServer:
        return self._primary

    def url(self) -> str:
        """Of whichever is the primary."""
        values = {
            "host": f"{self._primary.folder},{self._standby.folder}",
            "user": "tests",
            "dbname": "postgres",
            "target_session_attrs": "read-write",
        }
        return f"postgresql:///?{urlencode(values, quote_via=quote)}"

    def start(self) -> None:
        """Returns once what is committed is in both."""
        if self._killed:
            self._primary, self._standby = self._standby, self._primary
            with psycopg.connect(self._primary.conninfo, autocommit=True) as connection:
                promoted = connection.execute("SELECT pg_promote(true, 60)").fetchone()
            assert promoted == (True,)
        else:
            self._primary.start()
            self._primary.wait_ready()
        self._killed = False
        self._standby.copy(self._primary)
        self._standby.start()
        self._standby.wait_ready()
        give_up = time.monotonic() + scaled(_START_S)
        with psycopg.connect(self._primary.conninfo, autocommit=True) as connection:
            while connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall() != [("sync",)]:
                assert time.monotonic() < give_up
                time.sleep(0.02)

    def kill(self) -> None:
        """The primary."""
        self._primary.kill()
        self._killed = True

    def wait_ready(self) -> None:
        self._primary.wait_ready()

    async def ready(self) -> None:
        await self._primary.ready()

    def remove(self) -> None:
        for server in (self._primary, self._standby):
            server.remove()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Proxy:
    """Between a client and PostgreSQL, without TLS. `rows` and `bytes` count what went through, `round_trips`
    how often a client spoke after the server had.

    `cut_at_commit` breaks the next connection that commits: "before" the server hears of it, or "after" it
    has answered, which the client does not hear.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.rows = self.bytes = self.round_trips = 0
        self.cut_at_commit = ""

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    @property
    def conninfo(self) -> str:
        return (
            f"host=127.0.0.1 port={self.port} user=tests dbname=postgres sslmode=disable gssencmode=disable"
        )

    def freeze(self) -> None:
        """Nothing goes through, and no connection ends."""
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    async def stop(self) -> None:
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            answers, requests = await asyncio.open_unix_connection(self._server.socket)
            writers.append(requests)
            link = _Link()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._up(link, reader, requests))
                group.create_task(self._down(link, answers, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in writers:
                one.close()

    async def _up(self, link: _Link, reader: asyncio.StreamReader, requests: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            self.bytes += len(data)
            self.round_trips += link.answered
            link.answered = False
            if self.cut_at_commit and b"COMMIT" in data:
                how, self.cut_at_commit = self.cut_at_commit, ""
                if how == "before":
                    break
                link.mute = True
            requests.write(data)
            await requests.drain()
        raise ConnectionResetError

    async def _down(self, link: _Link, answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await answers.readexactly(5)
                body = await answers.readexactly(int.from_bytes(head[1:], "big") - 4)
            except asyncio.IncompleteReadError:
                raise ConnectionResetError from None
            await self._open.wait()
            self.bytes += len(head) + len(body)
            self.rows += head[:1] == b"D"
            link.answered = True
            if link.mute and head[:1] == b"Z":  # ready for the next query: the commit is through
                raise ConnectionResetError
            if not link.mute:
                writer.write(head + body)
                await writer.drain()


class _Link:
    """One connection; `mute`: the client hears nothing any more; `answered`: the server spoke last."""

    mute = answered = False
