"""The router process: wiring only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path

from kvcommons.errors import InvalidInput
from kvcommons.grammar.compiled import Vocabulary
from kvcommons.grammar.grammars import Grammars
from kvcommons.model.chat import ChatTemplate
from kvcommons.model.spec import resolve_folder
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.directory import Directory, Heartbeat
from kvcommons.rpc.process import Process, run
from kvcommons.rpc.server import RpcServer
from kvcommons.security.tenants import TenantSigner
from services.router.admission.admission import Admission
from services.router.admission.classes import OTHERS, ServiceClasses
from services.router.admission.look_ahead import QueueLookAhead
from services.router.admission.queue import RequestQueue
from services.router.admission.quotas import Quotas
from services.router.admission.scheduling import scheduling
from services.router.api.commons import take_picture
from services.router.api.health import health_of
from services.router.commons.watch import CommonsWatch
from services.router.config import RouterConfig
from services.router.documents.beginning import take_over_documents
from services.router.documents.documents import Documents
from services.router.fleet.fleet import Fleet
from services.router.http.certificate import Certificate
from services.router.http.keys import follow_keys, read_keys
from services.router.http.origins import Origins
from services.router.http.server import HttpServer, connection_table
from services.router.http.tenants import LOCAL_TENANT, Tenants
from services.router.metrics import RouterMetrics
from services.router.serving import Serving
from services.router.sessions.store import SessionStore
from services.router.turn.dispatch import Dispatch
from services.router.turn.idempotency import KeptAnswers
from services.router.turn.rendering import Text

log = logging.getLogger(__name__)

# The salt's root of a stack without tenants: nobody to keep apart, and the KV on disk has to be found again.
_LOCAL_SECRET = b"kvcommons: a single local tenant"
_SECRET_BYTES_MIN = 16
_READY_S = 1.0
_PRUNE_S = 30.0


async def serve(config: RouterConfig, process: Process) -> None:
    serving = await _serving(config, process)
    http = HttpServer(serving)
    rpc = process.server(config.node)
    directory = serving.directory
    directory.start()
    try:
        await _check_pace(serving)
    except InvalidInput:
        await directory.stop()
        raise
    await rpc.start()
    await http.start()
    started_ms = time.time_ns() // 1_000_000

    def describe() -> ledger_pb2.Instance:
        load = ledger_pb2.Load(
            running=serving.admission.running, queued=serving.admission.waiting, ready=rpc.ready
        )
        return ledger_pb2.Instance(
            id=process.instance_id,
            service=process.service,
            control_address=config.node.advertise_control or rpc.address,
            host=process.host,
            load=load,
            started_ms=started_ms,
        )

    heartbeat = Heartbeat(config.ledger, describe, process.dialer())
    heartbeat.start()
    watch = asyncio.create_task(_watch(serving, rpc, heartbeat))
    looking = asyncio.create_task(serving.look_ahead.run())
    taking = asyncio.create_task(take_over_documents(serving))
    key_watch = None
    if config.api_keys is not None:
        tenants = serving.tenants
        key_watch = asyncio.create_task(follow_keys(config.api_keys, tenants.keys, tenants.set_keys))
    renewing = None
    if serving.certificate is not None:
        renewing = asyncio.create_task(serving.certificate.follow())
    try:
        await process.stop.wait()
    finally:
        watch.cancel()
        looking.cancel()
        taking.cancel()
        if key_watch is not None:
            key_watch.cancel()
        if renewing is not None:
            renewing.cancel()
        await heartbeat.stop()
        serving.commons.close()
        await http.drain()
        await serving.close(config.node.drain_s / 4)
        await rpc.drain(0.0)
        await directory.stop()


async def _serving(config: RouterConfig, process: Process) -> Serving:
    folder = await asyncio.to_thread(resolve_folder, config.model)
    tokenizer = Tokenizer.read(folder)
    text = Text.of(tokenizer, ChatTemplate.read(folder, tokenizer), tool_format=config.tool_format)
    directory = Directory(config.ledger, process.instance_id, process.dialer())
    carried = (TenantSigner.read(Path(config.tenant_key)).carry,) if config.tenant_key is not None else ()
    fleet = Fleet(
        directory, lambda address, role: open_channel(address, role, process.credentials, carried=carried)
    )
    policy = scheduling(config.policy, overtakes_max=config.overtakes_max)
    quotas = Quotas(config.quotas)
    queue = RequestQueue(
        max_running=config.max_running,
        max_waiting=config.max_queue,
        policy=policy,
        share=lambda tenant: quotas.of(tenant).queue_share,
    )
    look_ahead = QueueLookAhead(
        queue,
        fleet,
        router=process.instance_id,
        requests_max=config.look_ahead_jobs,
        asks_distance=policy.asks_distance,
    )
    admission = Admission(queue, look_ahead)
    dispatch = Dispatch(fleet)
    documents = Documents(config.max_documents)
    connections = connection_table(config)
    metrics = RouterMetrics(
        process.telemetry.registry,
        running=lambda: admission.running,
        waiting=lambda: admission.waiting,
        capacity_waiting=lambda: dispatch.queues.waiting,
        documents=lambda: len(documents),
        connections=lambda: len(connections),
    )
    serving = Serving(
        commons=CommonsWatch(lambda: take_picture(serving)),
        config=config,
        instance_id=process.instance_id,
        tenants=_tenants(config),
        origins=Origins(config.cors_origins, config.allowed_hosts, keyed=config.api_keys is not None),
        text=text,
        grammars=Grammars(lambda: Vocabulary(tokenizer)),
        directory=directory,
        fleet=fleet,
        store=SessionStore(fleet),
        admission=admission,
        classes=ServiceClasses(config.service_classes, config.entitlements),
        quotas=quotas,
        look_ahead=look_ahead,
        dispatch=dispatch,
        answers=KeptAnswers(bytes_max=config.idempotency_bytes, kept_s=config.idempotency_s),
        documents=documents,
        connections=connections,
        certificate=_certificate(config),
        metrics=metrics,
        tracer=process.telemetry.tracer,
        started_s=int(time.time()),
    )
    return serving


def _certificate(config: RouterConfig) -> Certificate | None:
    """Raises InvalidInput for files that cannot be served."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Certificate(config.tls_cert, config.tls_key)


def _tenants(config: RouterConfig) -> Tenants:
    """Raises InvalidInput for a file that cannot be read, for a secret that is too short to be one, and for
    entitlements and quotas of tenants that are not there."""
    secret = _LOCAL_SECRET
    if config.secret_file is not None:
        secret = _read(config.secret_file, "secret_file")
        if len(secret) < _SECRET_BYTES_MIN:
            raise InvalidInput(
                f"secret_file {config.secret_file} has {len(secret)} bytes, and a secret has at least "
                f"{_SECRET_BYTES_MIN}",
                param="secret_file",
            )
    keys = read_keys(config.api_keys) if config.api_keys is not None else {}
    tenants = {grant.tenant for grant in keys.values()} or {LOCAL_TENANT}
    for setting, named in (("entitlements", config.entitlements), ("quotas", config.quotas)):
        for name in named.keys() - tenants - {OTHERS}:
            raise InvalidInput(
                f"{setting} names the tenant {name!r}, which has no key in api_keys; tenants are "
                f"{', '.join(sorted(tenants))}, and {OTHERS!r} stands for those that are not named",
                param=setting,
            )
    return Tenants(keys, secret)


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(f"{setting} {path} cannot be read: {error.strerror}", param=setting) from error


async def _check_pace(serving: Serving) -> None:
    """Raises InvalidInput for a class that promises tokens sooner than any decode instance can make them, as
    far as those that are there have measured it."""
    if not any(one.objectives.tbt_s for one in serving.classes):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READY_S):
            await serving.directory.changed()
    for why in _too_fast(serving).values():
        raise InvalidInput(
            f"router service_classes: {why}: raise its tbt_s, or leave it out", param="service_classes"
        )


def _too_fast(serving: Serving) -> dict[str, str]:
    """Classes that cannot be kept, by name: why."""
    fleet = serving.fleet
    token_s = max(map(fleet.token_seconds, fleet.models()), default=0.0)
    return {one.name: why for one in serving.classes if (why := one.too_fast(token_s))}


async def _watch(serving: Serving, rpc: RpcServer, heartbeat: Heartbeat) -> None:
    """Keeps gRPC health at what /health says, and closes channels to instances that are gone."""
    pruned_s = time.monotonic()
    unfit: dict[str, str] = {}
    too_fast: dict[str, str] = {}
    while True:
        serving.dispatch.queues.update()
        before, unfit = unfit, serving.fleet.unfit_pools()
        for pool in unfit.keys() - before.keys():
            log.warning("%s can lend to no decode instance: %s", pool, unfit[pool])
        known, too_fast = too_fast, _too_fast(serving)
        for name in too_fast.keys() - known.keys():
            log.warning("%s", too_fast[name])
        for model in serving.fleet.models()[:1]:
            serving.metrics.requests(model.name)  # from here on /metrics has all of its families
        ready = health_of(serving)[1]
        if ready != rpc.ready:
            await rpc.set_ready(ready)
            heartbeat.beat_now()
        if time.monotonic() - pruned_s > _PRUNE_S:
            pruned_s = time.monotonic()
            await serving.fleet.prune()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                await serving.directory.changed()


if __name__ == "__main__":
    sys.exit(run("router", RouterConfig, serve))
