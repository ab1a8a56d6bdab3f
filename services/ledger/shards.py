"""Keeps the view of the kvstores: decides the next one, and puts it into etcd by compare-and-swap.

Any replica may; of two that do so at once, one wins. A connection of its own, so that neither this nor the
registry waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvcommons.errors import Unavailable
from kvcommons.pb import shards_pb2 as pb
from kvcommons.shards import ShardView, decode_view, encode_view
from services.ledger.etcd import Etcd, Listing, Record
from services.ledger.keeping import keep
from services.ledger.registry import Registry
from services.ledger.shard_views import ShardViews, known_view, reports

log = logging.getLogger(__name__)

ROUND_S = 0.2


class ShardKeeper:
    """`connected` says whether the registry is current; `changed` is called when another view counts."""

    def __init__(
        self,
        etcd: Etcd,
        registry: Registry,
        views: ShardViews,
        *,
        prefix: str,
        connected: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        self._etcd = etcd
        self._registry = registry
        self._views = views
        self._prefix = f"{prefix.rstrip('/')}/v1/shards/".encode()
        self._key = self._prefix + b"view"
        self._connected = connected
        self._changed = changed
        self._stored: ShardView | None = None
        self._revision = 0  # of the stored view; 0: there is none

    def view(self) -> ShardView | None:
        """The newest view that is known of, from etcd or from a shard."""
        return known_view(self._stored, reports(self._registry.view()))

    async def run(self) -> None:
        """Until cancelled."""
        await keep(
            self._etcd,
            self._prefix,
            listed=self._listed,
            changed=self._take,
            write=self._decide,
            away=self._away,
        )

    def _listed(self, listing: Listing) -> None:
        self._stored, self._revision = None, 0
        for record in listing.records:
            self._take(record)

    def _away(self, error: Unavailable) -> None:
        log.debug("the view of the shards stays as it is: %s", error.message)
        self._views.pause()

    async def _decide(self) -> None:
        while True:
            if self._connected():
                present = reports(self._registry.view())
                following = self._views.next(self._stored, present, time.monotonic())
                if following is not None:
                    await self._swap(following)
            else:
                self._views.pause()
            await asyncio.sleep(ROUND_S)

    async def _swap(self, following: ShardView) -> None:
        value = encode_view(following).SerializeToString(deterministic=True)
        revision = await self._etcd.swap(self._key, value, self._revision)
        if revision is None:
            return  # another replica was faster: the watch tells what it decided
        log.info(
            "another view of the kvstores",
            extra={
                "epoch": following.epoch,
                "serving": ", ".join(following.serving),
                "joining": ", ".join(following.joining),
                "settled": following.settled,
            },
        )
        self._take(Record(key=self._key, value=value, revision=revision))

    def _take(self, record: Record) -> None:
        if record.key != self._key or record.revision <= self._revision:
            return
        try:
            view = decode_view(pb.ShardView.FromString(record.value or b""))
        except DecodeError:
            log.error("etcd holds a record that is no view of the shards", extra={"key": repr(record.key)})
            return
        self._stored = view
        self._revision = record.revision if record.value is not None else 0
        self._changed()
