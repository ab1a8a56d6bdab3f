"""What a watcher of the registry gets first."""

from __future__ import annotations

import asyncio
import time

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.feed import Feed
from services.ledger.registry import Registry
from tests.machine import scaled


async def test_a_view_tells_how_long_instances_have_been_silent() -> None:
    """A sign of life, too, in which nothing else is new; and nothing of whom another replica hears."""
    registry = Registry(lease_s=60.0, heartbeat_s=1.0)
    feed = Feed(registry)
    began = time.monotonic()
    registry.listed(1, {"b": (1, pb.Instance(id="b", load=pb.Load(ready=True)))}, began)
    registry.heartbeat(pb.Instance(id="a", load=pb.Load(ready=True)), began - 7.0)
    watching = feed.views()
    first = await anext(watching)
    running = asyncio.create_task(feed.run())
    async with asyncio.timeout(scaled(20)):
        while (later := await anext(watching)).silent_ms["a"] < first.silent_ms["a"] + 500:
            assert list(later.instances) == list(first.instances)
    running.cancel()
    assert first.silent_ms["a"] >= 7000
    assert first.silent_ms.keys() == later.silent_ms.keys() == {"a"}


async def test_a_new_watcher_gets_nothing_from_before_etcd_was_heard() -> None:
    """It would take a partial view in place of the one that it has from another replica."""
    registry = Registry(lease_s=5.0, heartbeat_s=1.0)
    feed = Feed(registry)
    old = feed.views()
    assert [one.id for one in (await anext(old)).instances] == []
    registry.listed(1, {"a": (1, pb.Instance(id="a", load=pb.Load(ready=True)))}, 0.0)
    new = feed.views()
    assert [one.id for one in (await anext(new)).instances] == ["a"]
    running = asyncio.create_task(feed.run())
    async with asyncio.timeout(10):  # who watched before is told as well
        assert [one.id for one in (await anext(old)).instances] == ["a"]
    running.cancel()
