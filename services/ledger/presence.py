"""The ledger's own place in the registry, beside the instances that send it heartbeats."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.feed import Feed
from services.ledger.mirror import Mirror
from services.ledger.registry import Registry

log = logging.getLogger(__name__)

FLUSH_S = 1.5  # less than a lease: after that long the record goes by itself


class Presence:
    def __init__(
        self,
        registry: Registry,
        mirror: Mirror,
        feed: Feed,
        describe: Callable[[], pb.Instance],
        *,
        heartbeat_ms: int,
    ) -> None:
        self._registry = registry
        self._mirror = mirror
        self._feed = feed
        self._describe = describe
        self._heartbeat_ms = heartbeat_ms

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._registry.heartbeat(self._describe(), time.monotonic())
            self._feed.touch()
            self._mirror.wake()
            await asyncio.sleep(self._heartbeat_ms / 1e3)

    async def leave(self) -> None:
        """Out of etcd when it returns, unless etcd does not answer: then the lease runs out."""
        self._registry.left(self._describe(), time.monotonic())
        if self._mirror.has_listed and not await self._mirror.flush(FLUSH_S):
            log.warning("etcd does not answer: this replica stays in the registry until its lease runs out")
