"""One connection to etcd, through aetcd: what the ledger needs of it, each call bounded, each failure
Unavailable.

aetcd's own watch is not used: it does not survive a restart of etcd, does not notice a paused one and takes a
revision apart into single events. Its protobuf stubs carry ours (docs/decisions/0002-aetcd.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import aetcd
import aetcd.rpc as wire
import grpc
from aetcd.exceptions import ClientError, DuplicateLeaseError
from aetcd.utils import prefix_range_end

from kvcommons.errors import Unavailable
from kvcommons.rpc.callers import channel_credentials
from kvcommons.security.certificate import ServiceCertificate

log = logging.getLogger(__name__)

_FULL = "database space exceeded"  # in etcd's words: its alarm NOSPACE
PROBE_S = 1.0  # how often a quiet watch asks etcd for a sign of life

T = TypeVar("T")

_OPTIONS: dict[str, int] = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 500,
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.max_receive_message_length": 64 << 20,
    "grpc.enable_http_proxy": 0,
    # Channels with equal arguments share connections in one process; a broken one is to be left behind.
    "grpc.use_local_subchannel_pool": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    key: bytes
    value: bytes | None  # None: deleted
    revision: int  # of the change that made it so


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    revision: int
    records: Sequence[Record]


class Etcd:
    """Speaks to one of `endpoints` at a time ("host:port" or "unix:DIR/name"); `reconnect` takes the next
    one."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_s: float,
        certificate: ServiceCertificate | None = None,
    ) -> None:
        """With a certificate etcd is spoken to by TLS, beyond sockets of this host."""
        self._certificate = certificate
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._at = -1
        self._client: aetcd.Client | None = None
        self._full = False

    @property
    def endpoint(self) -> str:
        return self._endpoints[self._at]

    async def reconnect(self) -> None:
        await self.close()
        self._at = (self._at + 1) % len(self._endpoints)
        host, port = (
            self.endpoint,
            0,
        )  # on a socket: `unix://name:0` in etcd's directory is the file DIR/name:0
        if not host.startswith("unix:"):
            host, _, text = self.endpoint.rpartition(":")
            port = int(text)
        certificate = self._certificate if port else None
        client = _Client(certificate, host=host, port=port, timeout=self._timeout_s, options=_OPTIONS)
        await client.connect()
        self._client = client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def list(self, prefix: bytes) -> Listing:
        found = await self._bounded(self._connected.get_prefix(prefix))
        records = [Record(key=kv.key, value=kv.value, revision=kv.mod_revision) for kv in found.kvs]
        return Listing(revision=found.header.revision, records=records)

    async def watch(self, prefix: bytes, after_revision: int) -> AsyncGenerator[Sequence[Record], None]:
        """All changes after a revision, those of one answer together; empty ones are signs of life.

        Raises Unavailable when the stream breaks, when etcd is silent though it was asked for a sign of life,
        and when the revision was compacted away: list again.
        """
        call = wire.WatchStub(self._connected.channel).Watch(_watch_requests(prefix, after_revision + 1))
        answers = call.__aiter__()
        try:
            while True:
                async with asyncio.timeout(PROBE_S + self._timeout_s):
                    answer = await anext(answers)
                if answer.canceled or answer.compact_revision:
                    raise Unavailable(f"etcd ended the watch: {answer.cancel_reason or 'compacted'}")
                yield [_record(event) for event in answer.events]
        except (grpc.aio.AioRpcError, TimeoutError, StopAsyncIteration) as error:
            raise self._unavailable(error) from error
        finally:
            call.cancel()

    async def put(self, key: bytes, value: bytes, *, lease_id: int, lease_s: int, new: bool) -> int:
        """Writes under a lease, which is granted where it does not exist; the revision. `new`: it is not
        known to exist, so it is granted first: etcd logs a warning for each write without its lease."""
        if not new:
            try:
                return await self._put(key, value, lease_id)
            except _LeaseNotFound:
                pass
        try:
            await self._bounded(self._connected.lease(lease_s, lease_id))
        except DuplicateLeaseError:
            pass  # another replica was faster
        try:
            return await self._put(key, value, lease_id)
        except _LeaseNotFound as error:
            raise self._unavailable(error) from error

    async def swap(self, key: bytes, value: bytes, revision: int) -> int | None:
        """Writes, without a lease, if the key was last changed at `revision` (0: it is not there); the new
        revision. None: something else is there."""
        client = self._connected
        done, responses = await self._bounded(
            client.transaction(
                compare=[client.transactions.mod(key) == revision],
                success=[client.transactions.put(key, value)],
                failure=[],
            )
        )
        return int(responses[0].response_put.header.revision) if done else None

    async def create(self, key: bytes, value: bytes, *, lease_id: int, lease_s: int) -> int | None:
        """Writes under a lease, which is granted where it does not exist, if the key is not there; the
        revision. None: it is there."""
        client = self._connected
        try:
            await self._bounded(client.lease(lease_s, lease_id))
        except DuplicateLeaseError:
            pass
        try:
            done, responses = await self._bounded(
                client.transaction(
                    compare=[client.transactions.create(key) == 0],
                    success=[client.transactions.put(key, value, lease=lease_id)],
                    failure=[],
                )
            )
        except _LeaseNotFound as error:
            raise self._unavailable(error) from error
        return int(responses[0].response_put.header.revision) if done else None

    async def delete(self, key: bytes, revision: int) -> int | None:
        """Deletes the key if it was last changed at `revision`; the new one. None: something else is
        there."""
        client = self._connected
        done, responses = await self._bounded(
            client.transaction(
                compare=[client.transactions.mod(key) == revision],
                success=[client.transactions.delete(key)],
                failure=[],
            )
        )
        return int(responses[0].response_delete_range.header.revision) if done else None

    async def keep_alive(self, lease_id: int) -> bool:
        """False: there is no such lease any more."""
        reply = await self._bounded(self._connected.refresh_lease(lease_id))
        return reply is not None and reply.TTL > 0

    async def revoke(self, lease_id: int) -> None:
        """Ends a lease and deletes what is under it; one that does not exist is no failure."""
        try:
            await self._bounded(self._connected.revoke_lease(lease_id))
        except _LeaseNotFound:
            pass

    async def _put(self, key: bytes, value: bytes, lease_id: int) -> int:
        done = await self._bounded(self._connected.put(key, value, lease=lease_id))
        if self._full:
            self._full = False
            log.info("etcd takes writes again", extra={"endpoint": self.endpoint})
        return int(done.header.revision)

    @property
    def _connected(self) -> aetcd.Client:
        if self._client is None:
            raise Unavailable("etcd is not connected yet")
        return self._client

    async def _bounded(self, call: Awaitable[T]) -> T:
        """aetcd passes the timeout on to gRPC; this one also holds where it waits for something else."""
        task = asyncio.current_task()
        asked_to_end = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._timeout_s * 1.5):
                return await call
        except asyncio.CancelledError as error:
            # A reconnect closes the channel, and gRPC ends the calls on it as if their tasks had been
            # cancelled. A TaskGroup would take that for a task that is done.
            if task is None or task.cancelling() > asked_to_end:
                raise
            raise self._unavailable(error) from error
        except DuplicateLeaseError:
            raise
        except ClientError as error:
            if "requested lease not found" in str(error):
                raise _LeaseNotFound(str(error)) from error
            raise self._unavailable(error) from error
        # The last two: the client was closed under the call, by a reconnect.
        except (grpc.aio.AioRpcError, TimeoutError, grpc.aio.UsageError, AttributeError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException) -> Unavailable:
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        reason = details or type(error).__name__
        if _FULL in reason:
            full = (
                f"etcd at {self.endpoint} is full and takes no writes: raise its --quota-backend-bytes, or "
                "compact and defragment it; then `etcdctl alarm disarm`"
            )
            if not self._full:  # reading goes on, and so would silence
                log.error("%s", full)
            self._full = True
            return Unavailable(full)
        return Unavailable(f"etcd at {self.endpoint} does not answer: {reason}")


class _Client(aetcd.Client):  # type: ignore[misc]
    """aetcd's, which knows no TLS by itself."""

    def __init__(self, certificate: ServiceCertificate | None, **options: Any) -> None:
        super().__init__(**options)
        self._certificate = certificate

    async def connect(self) -> None:
        if self._certificate is None:
            await super().connect()
            return
        if self._connected.is_set():
            return
        credentials, options = channel_credentials(self._certificate.files(), "etcd")
        self.channel = grpc.aio.secure_channel(
            f"{self._host}:{self._port}", credentials, options=[*self._options.items(), *options]
        )
        self.kvstub = wire.KVStub(self.channel)
        self.leasestub = wire.LeaseStub(self.channel)
        self._connected.set()


class _LeaseNotFound(Exception):
    """etcd's words for a lease that ran out or never was."""


def lease_id_of(key: bytes) -> int:
    """A record's lease has an id that follows from its key: every replica can renew it, granted by
    whichever."""
    return int.from_bytes(blake2b(key, digest_size=8).digest()) >> 1 or 1


def _record(event: Any) -> Record:
    deleted = event.type == wire.Event.DELETE
    return Record(key=event.kv.key, value=None if deleted else event.kv.value, revision=event.kv.mod_revision)


async def _watch_requests(prefix: bytes, start_revision: int) -> AsyncIterator[wire.WatchRequest]:
    yield wire.WatchRequest(
        create_request=wire.WatchCreateRequest(
            key=prefix, range_end=prefix_range_end(prefix), start_revision=start_revision
        )
    )
    while True:
        await asyncio.sleep(PROBE_S)
        yield wire.WatchRequest(progress_request=wire.WatchProgressRequest())
