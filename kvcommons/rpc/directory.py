"""Who is there: a view of all instances that a ledger keeps current, and the heartbeat that puts this one
into it.

Neither is needed for what is under way. While no ledger answers, the last view stays; with several ledgers,
the next one is asked within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence

import grpc.aio

from kvcommons.errors import KVCommonsError, Unavailable
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.pb import ledger_pb2_grpc as rpc
from kvcommons.rpc.dialer import UNSECURED, Dialer
from kvcommons.rpc.suspicion import SUSPECT_S, Suspicions

log = logging.getLogger(__name__)

WATCH_S = 600.0  # of one Watch call; then it is opened again
SILENCE_S = 5.0  # a ledger repeats its view at least every 2 s; a silent one is paused or cut off
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 1.0
BEAT_S = 1.0  # until a ledger says how often
BEAT_TIMEOUT_S = 1.0
WARN_AFTER_S = 5.0  # services start in any order, so a ledger may be away for a moment


class Directory:
    """A cached view of the registry. Reading it never waits, from any thread; the rest belongs to the event
    loop."""

    def __init__(self, ledgers: Sequence[str], watcher: str, dialer: Dialer = UNSECURED) -> None:
        """`ledgers` are the addresses of all replicas; `watcher` names this process in the ledger's log."""
        self._ledgers = _Rotation(ledgers, watcher, dialer)
        self._watcher = watcher
        self._view: dict[str, pb.Instance] = {}
        self._records = ""
        self._heard: dict[str, float] = {}  # by id, when a ledger had its last heartbeat
        self._suspicions = Suspicions()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._connected = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="directory")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._ledgers.close()

    @property
    def connected(self) -> bool:
        """Whether a ledger keeps the view current right now."""
        return self._connected

    def instances(self, service: str, *, ready: bool = True) -> list[pb.Instance]:
        """Instances of `service`, by id; only those that are ready and not suspected, unless `ready` is
        False. Never those whose socket is gone: a stack that was killed is in the registry until its leases
        run out."""
        now = time.monotonic()
        return [
            instance
            for instance in self._view.values()
            if instance.service == service
            and _can_be_there(instance.control_address)
            and (not ready or (instance.load.ready and not self._suspicions.holds(instance.id, now)))
        ]

    def find(self, instance_id: str) -> pb.Instance | None:
        return self._view.get(instance_id)

    def silent_s(self, instance_id: str) -> float | None:
        """Since its last heartbeat, as far as it is known here: so old is what its record says of its load.
        None where the ledger that keeps this view does not hear it itself."""
        heard = self._heard.get(instance_id)
        return None if heard is None else time.monotonic() - heard

    @property
    def records(self) -> str:
        """Where the stack's session records lie: kvstores with others serve nothing. Empty while that is not
        known."""
        return self._records

    def suspect(self, instance_id: str) -> None:
        """After a failed call: leaves the instance out for some seconds, or until a later heartbeat of its
        own."""
        self._suspicions.suspect(instance_id, time.monotonic())
        # Whoever waits for an instance looks again when the suspicion has lapsed.
        asyncio.get_running_loop().call_later(SUSPECT_S, self._notify_soon)

    async def changed(self) -> None:
        """Returns after the next change of the view (or of what is suspected). Give it a deadline."""
        async with self._changed:
            await self._changed.wait()

    async def wait_for(self, service: str, *, timeout_s: float, ready: bool = True) -> list[pb.Instance]:
        """The instances of `service` as soon as there is one. Raises Unavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := self.instances(service, ready=ready)):
                    await self.changed()
                return found
        except TimeoutError as error:
            raise Unavailable(f"no {service} instance is ready; see `kvcommons status`") from error

    async def _watch(self) -> None:
        backoff = _Backoff(len(self._ledgers))
        while True:
            try:
                await self._follow(backoff)
                reason = "it ended the stream"
            except TimeoutError:
                reason = "it is silent"
            except KVCommonsError as error:
                reason = error.message
            if self._connected:
                self._connected = False
                log.warning("lost the ledger: %s", reason, extra={"ledger": self._ledgers.address})
            self._ledgers.advance()
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, backoff: _Backoff) -> None:
        """Takes views from one ledger until its stream ends."""
        stub = rpc.LedgerStub(self._ledgers.channel())
        call = stub.Watch(pb.WatchRequest(watcher=self._watcher), timeout=WATCH_S)
        try:
            async with asyncio.timeout(SILENCE_S) as silence:
                async for view in call:
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
                    if not self._connected:
                        self._connected = True
                        log.info("a ledger keeps the view current", extra={"ledger": self._ledgers.address})
                    backoff.reset()
                    await self._take(view)
        finally:
            call.cancel()

    async def _take(self, view: pb.View) -> None:
        now = time.monotonic()
        self._heard = {name: now - silent_ms / 1e3 for name, silent_ms in view.silent_ms.items()}
        new = {instance.id: instance for instance in sorted(view.instances, key=lambda one: one.id)}
        records = view.records or self._records  # a ledger that has not heard etcd yet does not know
        if new == self._view and records == self._records:
            return
        self._records = records
        for instance_id, instance in new.items():
            if instance != self._view.get(instance_id):
                self._suspicions.heard(instance_id, now)
        self._suspicions.forget_all_but(new, now)
        self._view = new
        await self._notify()

    def _notify_soon(self) -> None:
        if self._task is not None and not self._task.done():
            asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Heartbeat:
    """Keeps this instance in the registry. `describe` is called for each beat, on the event loop."""

    def __init__(
        self, ledgers: Sequence[str], describe: Callable[[], pb.Instance], dialer: Dialer = UNSECURED
    ) -> None:
        self._ledgers = _Rotation(ledgers, describe().id, dialer)
        self._describe = describe
        self._now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat(), name="heartbeat")

    def beat_now(self) -> None:
        """Something that others should know at once: ready, or not any more."""
        self._now.set()

    async def stop(self) -> None:
        """Leaves the registry, if one of the ledgers answers, each of them within a second."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for _ in range(len(self._ledgers)):
            try:
                await self._send(leaving=True)
                break
            except KVCommonsError:
                self._ledgers.advance()
        await self._ledgers.close()

    async def _beat(self) -> None:
        backoff = _Backoff(len(self._ledgers))
        failing_since: float | None = None
        warned = False
        while True:
            self._now.clear()
            try:
                period_s = (await self._send()).heartbeat_ms / 1e3 or BEAT_S
                backoff.reset()
                if warned:
                    log.info("registered again", extra={"ledger": self._ledgers.address})
                failing_since, warned = None, False
            except KVCommonsError as error:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                if not warned and now - failing_since >= WARN_AFTER_S:
                    warned = True
                    log.warning("no heartbeat: %s", error.message, extra={"ledger": self._ledgers.address})
                self._ledgers.advance()
                period_s = backoff.next_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self._now.wait()

    async def _send(self, *, leaving: bool = False) -> pb.HeartbeatReply:
        stub = rpc.LedgerStub(self._ledgers.channel())
        request = pb.HeartbeatRequest(instance=self._describe(), leaving=leaving)
        return await stub.Heartbeat(request, timeout=BEAT_TIMEOUT_S)


class _Rotation:
    """One channel, to one of several addresses at a time. Who begins where depends on its name: load is
    spread."""

    def __init__(self, addresses: Sequence[str], name: str, dialer: Dialer) -> None:
        assert addresses, "at least one ledger address is needed"
        self._addresses = tuple(addresses)
        self._at = zlib.crc32(name.encode()) % len(self._addresses)
        self._channels = {address: dialer.channel(address, "ledger") for address in self._addresses}

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def address(self) -> str:
        return self._addresses[self._at]

    def channel(self) -> grpc.aio.Channel:
        return self._channels[self.address]

    def advance(self) -> None:
        self._at = (self._at + 1) % len(self._addresses)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)


class _Backoff:
    """No pause before each of the other addresses, then pauses that double up to a second."""

    def __init__(self, addresses: int) -> None:
        self._addresses = addresses
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        self._failures += 1
        sweeps, within = divmod(self._failures, self._addresses)
        if within:
            return 0.0
        return min(BACKOFF_S_MIN * 2.0 ** min(sweeps - 1, 10), BACKOFF_S_MAX)


def _can_be_there(address: str) -> bool:
    return not address.startswith("unix:") or os.path.exists(address.removeprefix("unix:"))
