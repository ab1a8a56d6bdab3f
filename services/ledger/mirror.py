"""Keeps a registry and etcd in step: lists and watches, and writes what the registry says etcd needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvcommons.errors import Unavailable
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.etcd import Etcd, Record, lease_id_of
from services.ledger.registry import KeepAlive, Put, Registry, Remove, Write

log = logging.getLogger(__name__)

WRITES_AT_ONCE = 32
WRITE_PAUSE_S = 0.1  # what changes within it is written once
IDLE_S = 0.5  # how often renewals are looked for
RELIST_S = 60.0  # a watch that lost something without a word costs no more than this
BACKOFF_S = (0.1, 0.2, 0.5, 1.0)
# etcd may start after its ledgers: it is logged only where it stays away for some seconds.
FAILURES_LOGGED = 5


class Mirror:
    """`changed` is called after each change of the registry that came from etcd, and when etcd is lost or
    found."""

    def __init__(
        self, etcd: Etcd, registry: Registry, *, prefix: str, lease_s: int, changed: Callable[[], None]
    ) -> None:
        self._etcd = etcd
        self._registry = registry
        self._prefix = f"{prefix.rstrip('/')}/v1/instances/".encode()
        self._lease_s = lease_s
        self._changed = changed
        self._due = asyncio.Event()
        self._writing = asyncio.Lock()  # one round at a time, or a put under way would undo a removal
        self.connected = False  # the view is kept current by etcd
        self.has_listed = False  # etcd has been heard at least once
        self.writes_done = 0

    def wake(self) -> None:
        """The registry has heard something that etcd may need to know."""
        self._due.set()

    async def run(self) -> None:
        """Until cancelled. Failures of etcd are logged and tried again."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_always())
                tasks.create_task(self._write_always())
        finally:
            await self._etcd.close()

    async def flush(self, timeout_s: float) -> bool:
        """Writes what is due, trying again for a bounded time: the last words of a replica that leaves.
        Whether etcd has it all."""
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            if await self._write_within(left_s):
                return True
            await asyncio.sleep(WRITE_PAUSE_S)
        return False

    async def _follow_always(self) -> None:
        failures = 0
        while True:
            try:
                await self._etcd.reconnect()
                await self._follow()
            except Unavailable as error:
                if self.connected or failures == FAILURES_LOGGED:
                    log.warning("etcd is out of reach: %s", error.message)
                failures = 1 if self.connected else failures + 1
                self.connected = False
                self._registry.lost(time.monotonic())
                self._changed()
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S)) - 1])

    async def _follow(self) -> None:
        """Lists and watches, and lists again now and then. Ends with Unavailable."""
        while True:
            listing = await self._etcd.list(self._prefix)
            self._registry.listed(
                listing.revision,
                {
                    instance.id: (record.revision, instance)
                    for record in listing.records
                    if (instance := self._parse(record)) is not None
                },
                time.monotonic(),
            )
            self.has_listed = True
            if not self.connected:
                self.connected = True
                log.info(
                    "etcd keeps the registry",
                    extra={"endpoint": self._etcd.endpoint, "instances": len(listing.records)},
                )
            self._changed()
            self.wake()
            until = time.monotonic() + RELIST_S
            async with contextlib.aclosing(self._etcd.watch(self._prefix, listing.revision)) as changes:
                async for records in changes:
                    for record in records:
                        self._take(record)
                    if records:
                        self._changed()
                    if time.monotonic() >= until:
                        break

    def _take(self, record: Record) -> None:
        if record.value is None:
            self._registry.deleted(record.revision, self._id_of(record), time.monotonic())
        elif (instance := self._parse(record)) is not None:
            self._registry.put(record.revision, instance)

    async def _write_always(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._due.wait()
            self._due.clear()
            # While etcd is away the follower says so, once a try; nothing is lost meanwhile.
            if self.connected:
                await self._write_within(None)
            await asyncio.sleep(WRITE_PAUSE_S)

    async def _write_within(self, timeout_s: float | None) -> bool:
        """Whether etcd has what is due. In a task of its own, which is not awaited by a time-out: a TaskGroup
        that fails just as its task is cancelled raises its failure, and the cancellation is forgotten. On
        Python 3.11 it leaves the task counted as cancelled besides."""
        writing = asyncio.create_task(self._write_due())
        try:
            await asyncio.wait({writing}, timeout=timeout_s)
        finally:
            writing.cancel()
        await asyncio.wait({writing})
        done = not writing.cancelled()
        try:
            if done:
                writing.result()
        except* Unavailable as failed:
            log.debug("a write to etcd failed, to be done again: %s", failed.exceptions[0])
            done = False
        return done

    async def _write_due(self) -> None:
        """The first failure ends the others: they would fail, too, each after its timeout."""
        slots = asyncio.Semaphore(WRITES_AT_ONCE)

        async def write(one: Write) -> None:
            async with slots:
                await self._write(one)

        async with self._writing, asyncio.TaskGroup() as tasks:
            for one in self._registry.writes(time.monotonic()):
                tasks.create_task(write(one))

    async def _write(self, write: Write) -> None:
        match write:
            case Put(instance=instance):
                key = self._key(instance.id)
                revision = await self._etcd.put(
                    key,
                    instance.SerializeToString(),
                    lease_id=lease_id_of(key),
                    lease_s=self._lease_s,
                    new=not self._registry.is_stored(instance.id),
                )
                self._registry.put(revision, instance)
            case KeepAlive(instance_id=name):
                if await self._etcd.keep_alive(lease_id_of(self._key(name))):
                    self._registry.renewed(name, time.monotonic())
                else:
                    self._registry.lapsed(name, time.monotonic())
            case Remove(instance_id=name):
                await self._etcd.revoke(lease_id_of(self._key(name)))
                self._registry.removed(name)
        self.writes_done += 1

    def _key(self, instance_id: str) -> bytes:
        return self._prefix + instance_id.encode()

    def _id_of(self, record: Record) -> str:
        return record.key.removeprefix(self._prefix).decode(errors="replace")

    def _parse(self, record: Record) -> pb.Instance | None:
        try:
            instance = pb.Instance.FromString(record.value or b"")
        except DecodeError:
            instance = pb.Instance()
        if instance.id != self._id_of(record):
            log.error("etcd holds a record that is no instance", extra={"key": repr(record.key)})
            return None
        return instance
