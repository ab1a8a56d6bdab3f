"""Wires the ledger."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from functools import partial

from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb.ledger_pb2_grpc import add_LedgerServicer_to_server
from kvcommons.rpc.process import Process, run
from services.ledger.candidates import Candidates
from services.ledger.commons import open_commons
from services.ledger.config import LedgerConfig
from services.ledger.etcd import Etcd
from services.ledger.feed import Feed
from services.ledger.metrics import LedgerMetrics
from services.ledger.mirror import Mirror
from services.ledger.presence import Presence
from services.ledger.records import PlaceChoice, RecordsKeeper
from services.ledger.registry import Registry
from services.ledger.server import LedgerService

GRACE_S = 1.0  # its calls are short; its watches are ended


async def serve(config: LedgerConfig, process: Process) -> None:
    registry = Registry(lease_s=config.lease_s, heartbeat_s=config.heartbeat_ms / 1e3)
    connected = partial(
        Etcd, config.etcd, timeout_s=config.etcd_timeout_s, certificate=process.credentials.certificate
    )
    etcd = connected()
    health_changed = asyncio.Event()

    def changed() -> None:
        feed.touch()
        health_changed.set()

    candidates = Candidates(random.Random())
    feed = Feed(registry, lambda: keeper.place, lambda: candidates.follow(registry.instances))
    mirror = Mirror(etcd, registry, prefix=config.etcd_prefix, lease_s=config.lease_s, changed=changed)
    keeper = RecordsKeeper(
        connected(),
        registry,
        prefix=config.etcd_prefix,
        choice=PlaceChoice(config.lost_records, lease_s=config.lease_s),
        connected=lambda: mirror.connected,
        changed=feed.touch,
    )
    commons = open_commons(config, process, connected, registry, mirror)
    LedgerMetrics(registry, mirror, feed, commons).register(process.telemetry.registry)
    server = process.server(config.node)
    service = LedgerService(
        registry,
        mirror,
        feed,
        candidates,
        commons.debts,
        commons.reports,
        heartbeat_ms=config.heartbeat_ms,
        lease_s=config.lease_s,
    )
    server.add(add_LedgerServicer_to_server, service)
    await server.start()
    started_ms = int(time.time() * 1e3)

    def describe() -> pb.Instance:
        return pb.Instance(
            id=process.instance_id,
            service="ledger",
            control_address=config.node.advertise_control or server.address,
            host=process.host,
            load=pb.Load(ready=mirror.connected),
            started_ms=started_ms,
        )

    async def follow_health() -> None:
        while True:
            await health_changed.wait()
            health_changed.clear()
            await server.set_ready(mirror.connected)

    presence = Presence(registry, mirror, feed, describe, heartbeat_ms=config.heartbeat_ms)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(part)
            for part in (mirror.run(), keeper.run(), feed.run(), presence.run(), follow_health())
        ]
        running += [tasks.create_task(part) for part in commons.run()]
        await process.stop.wait()
        await presence.leave()
        await commons.election.leave()
        await feed.close()
        await server.drain(GRACE_S)
        for task in running:
            task.cancel()


if __name__ == "__main__":
    sys.exit(run("ledger", LedgerConfig, serve))
