"""GET /health, /version, /metrics and /v1/status"""

from __future__ import annotations

import asyncio

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvcommons.errors import KVCommonsError
from kvcommons.pb import kvstore_pb2, ledger_pb2
from kvcommons.version import installed_version
from services.router.api.shapes import Json
from services.router.fleet.fleet import SERVICES
from services.router.http.middleware import SERVING
from services.router.serving import Serving

_NEEDED = ("prefill", "decode", "kvstore")
_STATS_S = 1.0
_OK = 200
_UNAVAILABLE = 503


async def health(request: web.Request) -> web.Response:
    """200 when chats and sessions are served. "degraded" (503): calls without a session are answered."""
    body, healthy = health_of(request.app[SERVING])
    headers = {} if healthy else {"Retry-After": "2"}
    return web.json_response(body, status=_OK if healthy else _UNAVAILABLE, headers=headers)


def health_of(serving: Serving) -> tuple[Json, bool]:
    """The body of /health, and whether all is served."""
    fleet = serving.fleet
    components = {
        service: {
            "ready": len(fleet.instances(service)),
            "known": len(fleet.instances(service, ready=False)),
        }
        for service in _NEEDED
    }
    store = components["kvstore"]["ready"] > 0 and bool(fleet.stores())
    if not fleet.models():
        status, message = "loading", "no prefill and decode are ready for one model; see `kvcommons status`"
    elif not store:
        status, message = "degraded", "the session store is away: calls without a session are answered"
    else:
        status, message = "ok", "ready"
    return {"status": status, "components": components, "message": message}, status == "ok"


async def version(request: web.Request) -> web.Response:
    """Of this router. Needs a key where keys are configured, as all paths but /health do."""
    return web.json_response({"version": installed_version()})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus: of all tenants together, so it needs an operator's key where keys are configured."""
    registry = request.app[SERVING].metrics.registry
    return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def status(request: web.Request) -> web.Response:
    """What `kvcommons status` shows; needs an operator's key where keys are configured."""
    serving = request.app[SERVING]
    unfit = serving.fleet.unfit_pools()
    instances = [
        _instance(instance, unfit.get(instance.id), serving.fleet.silent_s(instance.id))
        for service in SERVICES
        for instance in serving.fleet.instances(service, ready=False)
    ]
    return web.json_response(
        {
            "instances": instances,
            "store": await _store(serving),
            "records": serving.fleet.records or None,
            "queue": {"running": serving.admission.running, "waiting": serving.admission.waiting},
            "models": [model.name for model in serving.fleet.models()],
        }
    )


async def _store(serving: Serving) -> Json | None:
    """Of all kvstores together; None while one of them does not answer."""
    stores = serving.fleet.stores()
    if not stores:
        return None
    request = kvstore_pb2.StatsRequest()
    calls = (serving.fleet.blocks(store).Stats(request, timeout=_STATS_S) for store in stores)
    try:
        found = await asyncio.gather(*calls)
    except KVCommonsError:
        return None
    body = {
        field.name: sum(getattr(stats, field.name) for stats in found)
        for field in kvstore_pb2.StatsReply.DESCRIPTOR.fields
    }
    return body | {"sessions": max(stats.sessions for stats in found)}  # each has counted all of them


def _heads(instance: ledger_pb2.Instance) -> Json | None:
    """Of an attention pool: its part of a head group's KV heads."""
    if not instance.HasField("heads"):
        return None
    part = instance.heads
    return {"group": part.group, "number": part.number, "parts": part.parts}


def _instance(instance: ledger_pb2.Instance, unfit: str | None = None, silent_s: float | None = None) -> Json:
    """`unfit`: why it can lend to no decode instance. `silent_s`: since its last heartbeat; None: not
    known."""
    load = instance.load
    return {
        "id": instance.id,
        "service": instance.service,
        "host": instance.host,
        "control_address": instance.control_address,
        "data_address": instance.data_address,
        "ready": load.ready,
        "started_at": instance.started_ms // 1000,
        "model": instance.model.name or None,
        "total_blocks": load.total_blocks,
        "free_blocks": load.free_blocks,
        "lendable_blocks": load.lendable_blocks,
        "running": load.running,
        "queued": load.queued,
        "debts": dict(load.debts),
        "records": instance.records or None,
        "products": instance.products or None,
        "heads": _heads(instance),
        "unfit": unfit,
        "silent_s": None if silent_s is None else round(silent_s, 1),
    }
