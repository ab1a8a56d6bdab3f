"""GET /v1/commons: the whole stack as a picture, once or again and again."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from kvcommons.errors import KVCommonsError
from kvcommons.pb import kvstore_pb2
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb.holder_pb2 import InspectReply, InspectRequest
from services.router.api import sse
from services.router.api.answering import events_of
from services.router.api.query import wants_stream
from services.router.api.shapes import Json
from services.router.commons.view import LENDERS, QueueCounts, commons_view
from services.router.fleet.fleet import SERVICES
from services.router.http.middleware import SERVING, caller_of
from services.router.serving import Serving

_ASK_S = 1.0  # a service that does not answer is left out of the picture
_STREAM_S = 3600.0  # of one stream; who watches on opens another one


async def commons(request: web.Request) -> web.StreamResponse:
    """A picture; with `stream=true` one after another as server-sent events, until the client leaves, its key
    is taken back, or the router stops."""
    streams = wants_stream(request)
    watch = request.app[SERVING].commons
    if not streams:
        return web.json_response(await watch.picture())
    with watch.viewer():
        return await _stream(request)


async def _stream(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    watch, until_s = serving.commons, time.monotonic() + _STREAM_S
    picture = await watch.picture()
    async with events_of(request) as response:
        while True:
            await response.write(sse.event(picture))
            if not await watch.next_due() or time.monotonic() >= until_s:
                break
            caller_of(request).check_operator(request.path)
            picture = await watch.picture()
        await response.write(sse.DONE)
    return response


async def take_picture(serving: Serving) -> Json:
    """Asks all holders, kvstores and ledgers at once, for `_ASK_S` at most. What the router knows itself is
    taken when they have answered: memory, loans and sequences are of one moment then, and not of their last
    heartbeats and of now."""
    fleet = serving.fleet
    asked = [one for service in SERVICES for one in fleet.instances(service, ready=False)]
    held, stats, settlements = await asyncio.gather(
        asyncio.gather(*(_held(serving, one) for one in asked if one.service in LENDERS)),
        asyncio.gather(*(_stats(serving, one) for one in asked if one.service == "kvstore")),
        asyncio.gather(*(_settlements(serving, one) for one in asked if one.service == "ledger")),
    )
    known = [one for service in SERVICES for one in fleet.instances(service, ready=False)]
    ready = frozenset(one.id for service in SERVICES for one in fleet.instances(service))
    admission = serving.admission
    return commons_view(
        taken_at=time.time(),
        instances=known,
        ready=ready,
        silent_s={one.id: fleet.silent_s(one.id) for one in known},
        held={name: reply for name, reply in held if reply is not None},
        stats={name: reply for name, reply in stats if reply is not None},
        settlements=[report for replies in settlements for report in replies],
        sequences=serving.dispatch.sequences(),
        queue=QueueCounts(
            running=admission.running,
            waiting=admission.waiting,
            waiting_for_room=serving.dispatch.queues.waiting,
            documents=len(serving.documents),
        ),
        classes=serving.classes,
        outcomes=serving.metrics.class_outcomes(),
    )


async def _held(serving: Serving, holder: pb.Instance) -> tuple[str, InspectReply | None]:
    """One of several stages lends nothing, and answers nothing."""
    try:
        return holder.id, await serving.fleet.holder(holder).Inspect(InspectRequest(), timeout=_ASK_S)
    except KVCommonsError:
        return holder.id, None


async def _stats(serving: Serving, store: pb.Instance) -> tuple[str, kvstore_pb2.StatsReply | None]:
    try:
        return store.id, await serving.fleet.blocks(store).Stats(kvstore_pb2.StatsRequest(), timeout=_ASK_S)
    except KVCommonsError:
        return store.id, None


async def _settlements(serving: Serving, ledger: pb.Instance) -> list[pb.SettlementReport]:
    try:
        reply = await serving.fleet.ledger(ledger).Settlements(pb.SettlementsRequest(), timeout=_ASK_S)
    except KVCommonsError:
        return []
    return list(reply.settlements)
