"""The PostgreSQL that runs under a stack of several kvstores whose settings name no database of records.

Its data lie in the stack's, and it listens on a Unix socket alone, in a folder that only its account enters.
The sessions that the stack has so far move into it when it is made. Once it is there, the stack keeps to it,
however many kvstores there are.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from devstack.child import Child
from devstack.logfile import LogFile
from devstack.plan import Place, ProcessPlan
from devstack.settings import UpSettings
from kvcommons.errors import Unavailable
from kvcommons.files import sync_folder

USER = "kvcommons"
PORT = 5432  # in the socket's name; libpq's environment would choose another one
VARIABLE = "KVCOMMONS_KVSTORE__RECORDS"
PACKAGED = Path("/usr/lib/postgresql")  # Debian's, a folder for each major version
PROBE_S = 5.0
STOP_S = 14.0
# Beside those of the kvstores: moving records, and people who look.
CONNECTIONS = 40
# Small: sessions are little beside KV, and the stack may be on a laptop.
SETTINGS = {"listen_addresses": "", "shared_buffers": "32MB", "max_wal_size": "256MB"}

_OTHERWISE = (
    'set records = "postgresql://USER@HOST/DATABASE" in the table [kvstore] to a database that several '
    "kvstores can keep their session records in"
)


def is_wanted(
    settings: UpSettings, place: Place, user: Mapping[str, Any], environ: Mapping[str, str]
) -> bool:
    """Whether records lie in a PostgreSQL of the stack's own. `user`: the user's tables."""
    if environ.get(VARIABLE) or user.get("kvstore", {}).get("records"):
        return False
    return settings.kvstore > 1 or place.postgres.exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`account`: as whom it runs; None: as whoever runs the stack."""

    programs: Path
    account: str | None
    place: Place
    environ: Mapping[str, str]
    kvstores: int

    @property
    def url(self) -> str:
        """As the kvstore's setting `records` has it."""
        host = quote(str(self.place.postgres_sockets), safe="")
        return f"postgresql://{USER}@/postgres?host={host}&port={PORT}"

    def plan(self, data: Path) -> ProcessPlan:
        sockets = self.place.postgres_sockets
        settings = {
            **SETTINGS,
            "unix_socket_directories": str(sockets),
            "unix_socket_permissions": "0700",
            "max_connections": str(16 * self.kvstores + CONNECTIONS),
        }
        command = [str(self.programs / "postgres"), "-D", str(data), "-p", str(PORT)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        socket = sockets / f".s.PGSQL.{PORT}"
        return self._plan(command, sockets=(socket, socket.with_name(f"{socket.name}.lock")))

    def initdb(self, data: Path) -> ProcessPlan:
        options = ["-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--data-checksums"]
        return self._plan([str(self.programs / "initdb"), "-D", str(data), *options])

    def _plan(self, command: list[str], sockets: tuple[Path, ...] = ()) -> ProcessPlan:
        return ProcessPlan(
            name="postgres",
            service="postgres",
            command=tuple(command),
            # Its own variables (PGDATA, PGPORT …) would be settings beside ours.
            environment={name: value for name, value in self.environ.items() if not name.startswith("PG")},
            sockets=sockets,
            folder=self.place.postgres_sockets,
            account=self.account,
            stop_signal=signal.SIGINT,  # SIGTERM waits for whoever is connected
        )


def find(place: Place, environ: Mapping[str, str], kvstores: int, packaged: Path = PACKAGED) -> Server:
    """Makes the folder of its socket. Raises Unavailable, which says what to do, where there is no PostgreSQL
    that can be run."""
    found = installed(environ, packaged)
    if place.postgres.exists():
        wanted = int((place.postgres / "PG_VERSION").read_text())
        found = {major: folder for major, folder in found.items() if major == wanted}
        if not found:
            raise Unavailable(
                f"the session records in {place.postgres} were written by PostgreSQL {wanted}, which is not "
                "installed: install it, or bring them over with pg_upgrade"
            )
    if not found:
        raise Unavailable(f"{_OTHERWISE}, or install PostgreSQL (initdb and postgres), which is started then")
    account = account_for_it()
    sockets = place.postgres_sockets
    sockets.mkdir(mode=0o700)
    if account is not None:
        shutil.chown(sockets, account)
        place.data.chmod(0o711)  # it has to come as far as its own folder, and sees no other
    return Server(
        programs=found[max(found)], account=account, place=place, environ=environ, kvstores=kvstores
    )


async def make(server: Server, say: Callable[[str], None], log_bytes: int) -> None:
    """A new database with the sessions that lie in the stack's folders. It takes its place when it is whole:
    what was ended before that is made anew. Raises Unavailable."""
    place = server.place
    fresh = place.postgres.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    if server.account is not None:
        shutil.chown(fresh, server.account)
    log = LogFile(place.logs / "postgres.jsonl", log_bytes)
    try:
        say("Making a database for the session records of several kvstores")
        if why := await _run(server.initdb(fresh), log, lambda line: None):
            who = f" (as {server.account}, since it refuses root)" if server.account is not None else ""
            raise Unavailable(f"initdb{who} failed: {why}. Mend that, or {_OTHERWISE}")
        if any(place.data.glob("kvstore*/format")):
            say("Moving the sessions into it")
            child = Child(server.plan(fresh), log, lambda name, record: None)
            await child.start()
            try:
                if why := await _run(_move(server), log, lambda line: say(f"    {line}")):
                    raise Unavailable(f"the sessions could not be moved: {why}. {_without_lost(place.data)}")
            finally:
                await child.stop(STOP_S)
    finally:
        log.close()
    fresh.rename(place.postgres)
    sync_folder(place.data)  # a rename that is forgotten would let the next start begin anew


async def _run(plan: ProcessPlan, log: LogFile, say: Callable[[str], None]) -> str:
    """Why it failed, in its own words; empty: it did not."""
    child = Child(plan, log, lambda name, record: say(record.human()))
    await child.start()
    try:
        status = await child.wait()
    finally:
        await child.stop(STOP_S)
    return f"{' '.join([*child.last_lines][-2:])} (status {status})" if status else ""


def _without_lost(data: Path) -> str:
    """What to do where a folder that a former stack had is gone for good."""
    fresh = data.with_name(f"{data.name}.moved")
    move = ("kvcommons", "records", "move", "--data", data, "--without", "NAME", "--to", fresh / "kvstore")
    return (
        f"Where the folder of a kvstore is missing, bring it back into {data}; where it is lost for good, "
        f"run `{shlex.join(map(str, move))}`, which takes what the others have, and start the stack with "
        f"{shlex.join(['--data', str(fresh)])}"
    )


def _move(server: Server) -> ProcessPlan:
    command = (sys.executable, "-m", "services.kvstore.records", "move")
    return ProcessPlan(
        name="records",
        service="postgres",
        command=(*command, "--data", str(server.place.data), "--to", server.url),
        environment=server.environ,
    )


def installed(environ: Mapping[str, str], packaged: Path = PACKAGED) -> dict[int, Path]:
    """Folders with initdb and postgres, by their major versions."""
    path = environ.get("PATH")
    named = [
        Path(one).resolve().parent
        for name in ("initdb", "pg_config")
        if (one := shutil.which(name, path=path))
    ]
    found: dict[int, Path] = {}
    for folder in [*named, *packaged.glob("*/bin")]:
        if (folder / "initdb").exists() and (version := _major(folder / "postgres")) is not None:
            found.setdefault(version, folder)
    return found


def _major(program: Path) -> int | None:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+)", done.stdout)
    return int(match[1]) if match else None


def account_for_it() -> str | None:
    """As whom it runs; None: as whoever runs this, since only root is refused. Raises Unavailable."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise Unavailable(
        "PostgreSQL refuses to run as root, and there is no account `postgres` or `nobody`: run kvcommons as "
        f"another user, or {_OTHERWISE}"
    )
