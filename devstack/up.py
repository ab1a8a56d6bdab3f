"""`kvcommons up`: the whole stack on this machine, from its first process to its last."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from devstack import etcd, postgres, toml
from devstack.checks import (
    check_access,
    check_model,
    check_services,
    check_shapes,
    check_variables,
    unused_pools,
)
from devstack.fetch import MODELS, cached, fetch
from devstack.launch import end_with
from devstack.place import Claim
from devstack.plan import ProcessPlan, brings_identities, processes, tables
from devstack.program import program
from devstack.rest import RestClient
from devstack.settings import UpSettings
from devstack.supervisor import Supervisor
from devstack.terminal import LogFormat, Terminal
from devstack.welcome import Welcome
from kvcommons.config import load
from kvcommons.errors import (
    Conflict,
    InvalidInput,
    KVCommonsError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvcommons.files import PRIVATE_UMASK
from kvcommons.security.authority import make_certificates

if TYPE_CHECKING:
    from services.router.http.keys import Keys

POLL_S = 0.1
SPINNER = "|/-\\"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(config: Path | None, flags: Mapping[str, str], parent: int | None = None) -> int:
    """Runs the stack until it is interrupted, or until `parent`, which started this process, ends; the exit
    status."""
    # The flag counts for what is wrong with other settings, too.
    terminal = Terminal(form=cast(LogFormat, flags.get("log_format", "auto")))
    os.umask(PRIVATE_UMASK)
    try:
        settings = load("up", UpSettings, file=config, environ=os.environ, flags=flags, flag="--{name}")
        terminal.write_as(settings.log_format)
        user = tomllib.loads(config.read_text()) if config is not None else {}
        check_variables(os.environ)
        check_access(settings, user, os.environ)
        folder = check_model(settings.model, terminal.say)
        claim = Claim(settings.data)
    except KVCommonsError as error:
        terminal.say(f"kvcommons up: {error.message}", "error")
        return 2
    try:
        if settings.model in MODELS:
            fetch(settings.model, cached(settings.model), terminal.say)
        # A KeyboardInterrupt in a half-made loop leaves a traceback: signals wait for the loop's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return asyncio.run(_Up(settings, claim, terminal, user, flags, config, folder, parent).run())
    except KVCommonsError as error:
        terminal.say(f"kvcommons up: {error.message}", "error")
        return 2 if isinstance(error, InvalidInput) else 1
    finally:
        claim.release()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class _Up:
    def __init__(
        self,
        settings: UpSettings,
        claim: Claim,
        terminal: Terminal,
        user: Mapping[str, Any],
        flags: Mapping[str, str],
        config: Path | None,
        folder: Path,
        parent: int | None,
    ) -> None:
        """`user`: what `config` says. `folder`: the model's."""
        self._parent = parent
        self._folder = folder
        self._config = config.resolve() if config is not None else None
        self._claim = claim
        self._terminal = terminal
        self._user = user
        self._flags = flags
        self._interrupts = 0
        self._stop = asyncio.Event()
        self._supervisor: Supervisor | None = None
        self._settings = settings
        self._facts: dict[str, str] = {}  # of the running stack, for tools
        self._keyed = False  # clients have to have a key

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._interrupted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        settings = self._settings
        port = _free_port(settings.bind, settings.port)
        if self._parent is not None:
            end_with(self._parent, signal.SIGTERM)
        database: postgres.Server | None = None
        if postgres.is_wanted(settings, self._claim.place, self._user, os.environ):
            database = postgres.find(self._claim.place, os.environ, settings.kvstore)
            if not await self._is_made(database):
                return 0
            self._facts["records"] = database.url
        plans = self._plans(port, database)
        checked = check_services(plans)
        check_shapes(checked, settings, self._folder)
        if useless := unused_pools(checked, settings):
            self._terminal.say(useless)
        router = checked["router"]
        keys = _read_keys(router.api_keys)
        certificate = router.tls_cert or ""
        if certificate:
            _check_certificate(certificate, router.tls_key)
        self._keyed = bool(keys)
        supervisor = Supervisor(
            plans, self._claim.place, self._terminal, restart=settings.restart, log_bytes=settings.log_bytes
        )
        self._supervisor = supervisor
        url = _url("https" if certificate else "http", router.bind, port)
        status = 1
        try:
            await supervisor.start()
            self._claim.record({**self._facts, "url": url, "ready": False})
            own = os.environ.get("KVCOMMONS_API_KEY") or _own_key(keys)
            client = RestClient(url, api_key=own, own=certificate)
            status = await self._until_stopped(client, supervisor)
        finally:
            self._terminal.progress("")
            self._terminal.say("Stopping")
            await supervisor.stop()
            self._terminal.say("Stopped")
        return status

    async def _is_made(self, database: postgres.Server) -> bool:
        """False where somebody stopped it first."""
        if database.place.postgres.exists():
            return True
        making = asyncio.ensure_future(postgres.make(database, self._terminal.say, self._settings.log_bytes))
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([making, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if making.done():
            making.result()
            return True
        making.cancel()
        await asyncio.wait([making])
        return False

    def _plans(self, port: int, database: postgres.Server | None) -> list[ProcessPlan]:
        place = self._claim.place
        cores = len(os.sched_getaffinity(0))
        settings = self._settings
        records = database.url if database is not None else ""
        certificates: Path | None = None
        if not brings_identities(self._user, os.environ):
            certificates = place.certificates
            make_certificates(certificates, datetime.now(UTC))
        made = tables(settings, place, cores, self._user, records, certificates)
        place.settings_file.write_text(toml.dumps(made, origin=self._config))
        plans = processes(settings, place, cores, port, os.environ, user=self._user, flagged=self._flags)
        databases = [etcd.plan(place.data / "etcd", place.runtime, os.environ)]
        if database is not None:
            databases.append(database.plan(place.postgres))
        return [*databases, *plans]

    def _interrupted(self) -> None:
        self._interrupts += 1
        self._stop.set()
        if self._interrupts > 1 and self._supervisor is not None:
            self._terminal.say("Killed")
            self._supervisor.kill()

    async def _until_stopped(self, client: RestClient, supervisor: Supervisor) -> int:
        stopped = asyncio.ensure_future(self._stop.wait())
        for step in (self._ready, self._welcome, self._supervise):
            task = asyncio.ensure_future(step(client))
            events: list[asyncio.Future[Any]] = [task, stopped, supervisor.failed]
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set() or supervisor.failed.done():
                task.cancel()
                await asyncio.wait([task], timeout=1.0)
                break
            task.result()
        stopped.cancel()
        if supervisor.failed.done() and not self._stop.is_set():
            self._terminal.say(f"kvcommons up: {supervisor.failed.result()}", "error")
            return 1
        return 0

    async def _ready(self, client: RestClient) -> None:
        """Until the router says that all it needs is there. Raises Unavailable past `ready_wait_s`."""
        started = time.monotonic()
        wait_s = self._settings.ready_wait_s
        turn = 0
        while missing := await asyncio.to_thread(self._missing, client):
            after_s = time.monotonic() - started
            if after_s > wait_s:
                raise Unavailable(
                    f"the stack was not ready within {wait_s:g} s; {self._claim.place.logs} says why"
                )
            turn += 1
            tick = f"{SPINNER[turn % len(SPINNER)]} {after_s:.0f} s, "
            self._terminal.progress(f"waiting for {missing}", tick=tick)
            await asyncio.sleep(POLL_S)
        self._terminal.progress("")
        self._claim.record({**self._facts, "url": client.url, "ready": True})
        self._terminal.say(f"Ready after {time.monotonic() - started:.1f} s")

    def _missing(self, client: RestClient) -> str:
        """What the stack still waits for; empty when each of its processes is ready."""
        if not client.healthy():
            return "the router" if not client.reachable() else "its services"
        try:
            instances = client.get("/v1/status", timeout_s=2.0)["instances"]
        except (Unauthenticated, PermissionDenied):  # we have no operator's key: health has to do
            return ""
        except KVCommonsError as error:
            return error.message
        ready = Counter(instance["service"] for instance in instances if instance["ready"])
        settings = self._settings
        wanted = {
            "prefill": settings.decode if settings.colocated else settings.prefill,
            "decode": settings.decode,
            "attention_pool": settings.attention_pool,
            "kvstore": settings.kvstore,
        }
        short = {name: count - ready[name] for name, count in wanted.items() if ready[name] < count}
        return ", ".join(f"{count} {name}" for name, count in short.items())

    async def _welcome(self, client: RestClient) -> None:
        """A failure of the conversation is printed and leaves the stack up, so that people can look at it."""
        if not self._settings.demo:
            return
        try:
            await asyncio.to_thread(Welcome(client, self._terminal.say).hold)
        except KVCommonsError as error:
            self._terminal.say(f"The conversation failed: {error.message}", "error")

    async def _supervise(self, client: RestClient) -> None:
        key = "KVCOMMONS_API_KEY=KEY " if self._keyed else ""
        self._terminal.say(f"kvcommons answers at {client.url}/v1")
        self._terminal.say(f"To talk to it, in another terminal: {key}{program()} chat{client.option}")
        self._terminal.say(f"Sessions and KV lie in {self._claim.place.data}. Ctrl-C stops the stack.")
        await asyncio.Event().wait()


def _read_keys(path: str | None) -> Keys:
    """Raises InvalidInput for a file that the router would refuse."""
    from services.router.http.keys import read_keys

    return read_keys(path) if path is not None else {}


def _own_key(keys: Keys) -> str:
    """By which the stack is asked whether it is ready, and talked to first: an operator's, if there is
    one."""
    operators = [key for key, grant in keys.items() if grant.operator]
    return next(iter([*operators, *keys]), "")


def _check_certificate(cert: str, key: str) -> None:
    """Raises InvalidInput for files that the router would refuse."""
    from services.router.http.certificate import Certificate

    Certificate(cert, key)


def _url(scheme: str, bind: str, port: int) -> str:
    """Where this machine reaches a server that is bound to `bind`, which may be all of its addresses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(bind, bind)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _free_port(bind: str, port: int) -> int:
    """`port`, or a free one for 0. Raises Conflict when it is taken, InvalidInput for an address that is not
    ours."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno not in (98, 48):
                raise InvalidInput(f"{bind}:{port} cannot be bound: {error}", param="bind") from error
            raise Conflict(f"port {port} is in use: choose another one with --port", param="port") from error
        return int(probe.getsockname()[1])
