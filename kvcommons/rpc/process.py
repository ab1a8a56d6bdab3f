"""The life of a service process: settings, logs, signals, drain, exit code.

    # services/<name>/__main__.py
    async def serve(config: Config, process: Process) -> None:
        server = process.server(config.node)
        ...
        await process.stop.wait()
        await server.drain(...)

    if __name__ == "__main__":
        sys.exit(run("<name>", Config, serve))

Exit codes: 0 after a drain, 1 when `serve` raised or did not drain in time, 2 where starting again would not
help (settings that are wrong, a model that is not there, data that is damaged), 128 + signal when a second
signal cut the drain short.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from kvcommons.config import Node, flags_of, load
from kvcommons.errors import DataLoss, InvalidInput, KVCommonsError, NotFound
from kvcommons.files import PRIVATE_UMASK
from kvcommons.openmp import bound_waits
from kvcommons.rpc.dialer import Dialer
from kvcommons.rpc.server import RpcServer
from kvcommons.security.credentials import OPEN, Credentials, credentials_of
from kvcommons.security.tenants import TenantVerifier
from kvcommons.telemetry import logs
from kvcommons.telemetry.events import EventFile, unobserved
from kvcommons.telemetry.metrics import MetricsListener, new_registry
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.telemetry.trace import Tracer
from kvcommons.transport.base import Observer

log = logging.getLogger(__name__)
bound_waits(os.environ)  # services import this before what loads torch

PR_SET_PDEATHSIG = 1
# Past the drain's bound: for an event loop that is stuck and cannot notice it.
STUCK_S = 3.0


class HasNode(Protocol):
    """Every service's settings: a dataclass with the group `node`."""

    @property
    def node(self) -> Node: ...


C = TypeVar("C", bound=HasNode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    service: str
    instance_id: str  # unique among living and dead
    host: str
    stop: asyncio.Event  # set by SIGTERM or SIGINT: drain, then return
    telemetry: Telemetry
    credentials: Credentials = OPEN  # what it shows to others on a network, and wants of them

    def server(self, node: Node, tenant_key: str | None = None) -> RpcServer:
        """That answers others' calls. `tenant_key`: a file with the keys that sign for whom they are made;
        None: each caller is believed. Raises InvalidInput."""
        return RpcServer(
            node.listen,
            self.telemetry,
            call_deadline_s=node.call_deadline_s,
            credentials=self.credentials,
            tenants=TenantVerifier.read(Path(tenant_key)) if tenant_key is not None else None,
        )

    def dialer(self, observer: Observer | None = None) -> Dialer:
        """`observer`: of what it exchanges on data planes of others."""
        return Dialer(credentials=self.credentials, observer=observer)


def run(
    service: str,
    schema: type[C],
    serve: Callable[[C, Process], Awaitable[None]],
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Runs `serve` until it returns; the exit code. Flags: --config FILE, --set name=value, --parent-pid
    PID."""
    options = _arguments(service, sys.argv[1:] if argv is None else argv)
    os.umask(PRIVATE_UMASK)
    logs.configure(service, service)
    try:
        if options.parent_pid is not None:
            die_with_parent(options.parent_pid)
        config = load(
            service,
            schema,
            file=options.config,
            environ=os.environ if environ is None else environ,
            flags=flags_of(options.set),
        )
    except KVCommonsError as error:
        log.critical("%s", error.message)
        return 2
    host = config.node.host or socket.gethostname()
    instance_id = config.node.instance_id or f"{service}-{host}-{os.urandom(4).hex()}"
    logs.configure(service, instance_id, level=config.node.log_level)
    gc.freeze()  # what was imported lives as long as we do: no collection goes over it, nor one at the end
    try:
        return asyncio.run(_main(service, instance_id, host, config, serve))
    except (InvalidInput, NotFound, DataLoss) as error:
        log.critical("%s", error.message, extra={"code": error.code})
        return 2
    except KVCommonsError as error:
        log.critical("%s", error.message, extra={"code": error.code})
    except Exception:
        log.critical("ended by an exception nobody expected", exc_info=True)
    return 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for a SIGTERM when the parent dies, however it dies, and exits if it is dead already.

    The kernel watches the *thread* that started this process: a parent starts its children from a thread that
    lives as long as it does itself.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        log.critical("the parent process %d is gone", parent_pid)
        os._exit(1)


def _arguments(service: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting; beats environment and file",
    )
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="end when this parent process ends")
    return parser.parse_args(argv)


async def _main(
    service: str, instance_id: str, host: str, config: C, serve: Callable[[C, Process], Awaitable[None]]
) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_loop_exception)
    stop = asyncio.Event()
    _handle_signals(loop, stop, config.node.drain_s)
    credentials = credentials_of(config.node, service)
    endpoint = config.node.otlp_endpoint
    tracer = Tracer.otlp(endpoint, service=service, instance_id=instance_id) if endpoint else Tracer.off()
    events = config.node.event_log
    telemetry = Telemetry(
        service=service,
        instance_id=instance_id,
        registry=new_registry(),
        tracer=tracer,
        observe=EventFile(events, instance_id) if events else unobserved,
    )
    listener = None
    if config.node.metrics_listen:
        listener = MetricsListener(config.node.metrics_listen, telemetry.registry)
        await listener.start()
    process = Process(
        service=service,
        instance_id=instance_id,
        host=host,
        stop=stop,
        telemetry=telemetry,
        credentials=credentials,
    )
    try:
        return await _serve_and_drain(serve(config, process), stop, config.node.drain_s)
    finally:
        _end_within(STUCK_S)  # a thread that does not stop would keep the process for ever
        if listener is not None:
            await listener.stop()
        await asyncio.to_thread(tracer.shutdown)


async def _serve_and_drain(serving: Awaitable[None], stop: asyncio.Event, drain_s: float) -> int:
    work = asyncio.ensure_future(serving)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not work.done():
        await asyncio.wait({work}, timeout=drain_s)
    if not work.done():
        log.error("not drained within %.1f s: what is left is cancelled", drain_s)
        work.cancel()
        await asyncio.wait({work}, timeout=1.0)
        return 1
    work.result()
    return 0


def _handle_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, drain_s: float) -> None:
    def received(signum: int) -> None:
        if stop.is_set():
            log.warning("second signal: ended without a drain")
            os._exit(128 + signum)
        log.info("draining", extra={"signal": signal.Signals(signum).name})
        stop.set()
        _end_within(drain_s + STUCK_S)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, received, signum)


def _end_within(seconds: float) -> None:
    watchdog = threading.Timer(seconds, _give_up)
    watchdog.daemon = True
    watchdog.start()


def _give_up() -> None:
    log.critical("stuck while ending: ended")
    os._exit(1)


def _log_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    error = context.get("exception")
    log.error(
        "%s",
        context.get("message", "an exception in the event loop"),
        exc_info=error if isinstance(error, BaseException) else None,
    )
