"""The view as its watchers get it: at once, after each change, and now and then as a sign of life."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from kvcommons.pb import ledger_pb2 as pb
from services.ledger.registry import Change, Registry

# Who is there goes out at most ten times a second; how much is free, twice: it changes all the time and is
# only a hint, and with many instances and watchers it would be most of the traffic.
MEMBERS_PAUSE_S = 0.1
LOAD_PAUSE_S = 0.5
SIGN_OF_LIFE_S = 2.0


class Feed:
    def __init__(
        self,
        registry: Registry,
        records: Callable[[], str] = str,
        refreshed: Callable[[], None] = lambda: None,
    ) -> None:
        """`records`: where session records lie; `refreshed` is called when the registry has another view."""
        self._registry = registry
        self._records = records
        self._refreshed = refreshed
        self._dirty = asyncio.Event()
        self._published = asyncio.Condition()
        self._publications = 0
        self._closed = False
        self._view = pb.View()
        self._due = Change.NOTHING  # what has not been published yet
        self.watchers = 0

    def touch(self) -> None:
        """The registry may have changed."""
        self._dirty.set()

    @property
    def view(self) -> pb.View:
        return self._view

    async def run(self) -> None:
        """Publishes until cancelled."""
        published_at = 0.0
        while True:
            timeout_s = LOAD_PAUSE_S if self._due is Change.LOAD else MEMBERS_PAUSE_S * 5
            try:
                async with asyncio.timeout(timeout_s):
                    await self._dirty.wait()
            except TimeoutError:
                pass  # silence is news, too: heartbeats grow old
            self._dirty.clear()
            now = time.monotonic()
            self._look(now)
            moved = self._records() != self._view.records
            load_is_due = self._due is Change.LOAD and now - published_at >= LOAD_PAUSE_S
            if self._due is Change.MEMBERS or moved or load_is_due or now - published_at >= SIGN_OF_LIFE_S:
                if self._due is not Change.NOTHING or moved:
                    self._renew()
                else:
                    self._age()
                self._due = Change.NOTHING
                published_at = now
                await self._publish()
            await asyncio.sleep(MEMBERS_PAUSE_S)

    async def close(self) -> None:
        """Ends all watches: whoever watched goes to another replica."""
        self._closed = True
        await self._publish()

    async def views(self) -> AsyncIterator[pb.View]:
        """For one watcher. One that is slow gets the newest view, not each one."""
        self._look(time.monotonic())
        if self._due is Change.MEMBERS:  # what was published last may be from before etcd was heard
            self._renew()
        else:
            self._age()
        self.watchers += 1
        try:
            while not self._closed:
                seen = self._publications
                yield self._view
                async with self._published:
                    while self._publications == seen:
                        await self._published.wait()
        finally:
            self.watchers -= 1

    def _look(self, now: float) -> None:
        change = self._registry.refresh(now)
        if change is not Change.NOTHING:
            self._refreshed()
        self._due = max(self._due, change, key=lambda one: one.value)

    def _renew(self) -> None:
        self._view = pb.View(
            instances=self._registry.view(), revision=self._view.revision + 1, records=self._records()
        )
        self._age()

    def _age(self) -> None:
        """The same view, with how long its instances have been silent by now."""
        silent = self._registry.silent_s(time.monotonic())
        self._view = pb.View(
            instances=self._view.instances,
            revision=self._view.revision,
            records=self._view.records,
            silent_ms={name: max(0, int(seconds * 1000)) for name, seconds in silent.items()},
        )

    async def _publish(self) -> None:
        self._publications += 1
        async with self._published:
            self._published.notify_all()
