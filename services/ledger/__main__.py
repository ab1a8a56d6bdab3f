"""Wires the ledger."""

from __future__ import annotations

import asyncio
import random
import sys
import time

from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb.ledger_pb2_grpc import add_LedgerServicer_to_server
from kvcommons.pb.shards_pb2 import ShardView
from kvcommons.rpc.process import Process, run
from kvcommons.rpc.server import RpcServer
from kvcommons.shards import encode_view
from services.ledger.candidates import Candidates
from services.ledger.commons import open_commons
from services.ledger.config import LedgerConfig
from services.ledger.etcd import Etcd
from services.ledger.feed import Feed
from services.ledger.metrics import LedgerMetrics
from services.ledger.mirror import Mirror
from services.ledger.presence import Presence
from services.ledger.registry import Registry
from services.ledger.server import LedgerService
from services.ledger.shard_views import ShardViews
from services.ledger.shards import ShardKeeper

GRACE_S = 1.0  # its calls are short; its watches are ended


async def serve(config: LedgerConfig, process: Process) -> None:
    registry = Registry(lease_s=config.lease_s, heartbeat_s=config.heartbeat_ms / 1e3)
    etcd = Etcd(config.etcd, timeout_s=config.etcd_timeout_s)
    health_changed = asyncio.Event()

    def changed() -> None:
        feed.touch()
        health_changed.set()

    def shards() -> ShardView | None:
        view = keeper.view()
        return encode_view(view) if view is not None else None

    candidates = Candidates(random.Random())
    feed = Feed(registry, shards, lambda: candidates.follow(registry.instances))
    mirror = Mirror(etcd, registry, prefix=config.etcd_prefix, lease_s=config.lease_s, changed=changed)
    keeper = ShardKeeper(
        Etcd(config.etcd, timeout_s=config.etcd_timeout_s),
        registry,
        ShardViews(grace_s=config.heartbeat_ms / 1e3, lost=config.lost_shards),
        prefix=config.etcd_prefix,
        connected=lambda: mirror.connected,
        changed=feed.touch,
    )
    commons = open_commons(config, process.instance_id, registry, mirror)
    LedgerMetrics(registry, mirror, feed, commons).register(process.telemetry.registry)
    server = RpcServer(config.node.listen, process.telemetry, call_deadline_s=config.node.call_deadline_s)
    service = LedgerService(
        registry,
        mirror,
        feed,
        candidates,
        commons.debts,
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
