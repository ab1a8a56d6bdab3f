"""This kvstore as one shard of several: the shell around `Replica`.

It drives the steps on the event loop, works on the sessions on an executor's threads, calls other shards over
gRPC, and follows the views that the ledger tells.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from kvcommons.errors import KVCommonsError, StoreUnavailable
from kvcommons.pb import kvstore_pb2
from kvcommons.pb import shards_pb2 as pb
from kvcommons.pb import shards_pb2_grpc as rpc
from kvcommons.pb.ledger_pb2 import Instance
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.directory import Directory
from kvcommons.shards import session_key
from services.kvstore.records.embedded import EmbeddedRecords
from services.kvstore.replica import RETRY_S, Call, Replica, SessionWork, Sleep
from services.kvstore.shard_sessions import ShardSessions

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S = 2.0  # of one call to another shard
SETTLE_S = 1.0  # between looks for changes that nobody waited for
WATCH_S = 5.0


def folder_name(root: Path, given: str) -> str:
    """What the shard's folder is called: as the settings say, or drawn at its first start and kept in it.

    Raises StoreUnavailable.
    """
    if given:
        return given
    path = root / "shard"
    try:
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.write_text(secrets.token_hex(6) + "\n")
            fresh.replace(path)
        return path.read_text().strip()
    except OSError as error:
        raise StoreUnavailable(f"the shard's name in {path} cannot be kept: {error}") from error


class Shard:
    """`start` it, then `operate` and `look` do as `Replica` says. On the event loop's thread."""

    def __init__(
        self,
        sessions: ShardSessions,
        executor: Executor,
        directory: Directory,
    ) -> None:
        self._sessions = sessions
        self._executor = executor
        self._directory = directory
        self._notify_ledger: Callable[[], None] = lambda: None
        self._replica = Replica(sessions, self._changed)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._moved = asyncio.Event()

    def start(self, notify_ledger: Callable[[], None]) -> None:
        """`notify_ledger` is called when the ledger should hear of this shard at once."""
        self._notify_ledger = notify_ledger
        self._directory.start()
        self._tasks = [
            asyncio.create_task(self._follow(), name="views"),
            asyncio.create_task(self._synchronise(), name="synchronise"),
            asyncio.create_task(self._settle(), name="settle"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._directory.stop()
        for channel in self._channels.values():
            await channel.close(None)

    async def operate(self, key: bytes, work: Callable[[], T]) -> T:
        """Something that is done to a session, on all of its copies."""
        return await self._drive(self._replica.operate(key, work))

    async def look(self, work: Callable[[], T]) -> T:
        """Something that is read of many sessions."""
        return await self._drive(self._replica.look(work))

    async def receive(self, request: pb.ReplicateRequest) -> pb.ReplicateReply:
        return await self._drive(self._replica.receive(request))

    async def compared(self, request: pb.CompareRequest) -> pb.CompareReply:
        return await self._drive(self._replica.compared(request))

    # ---- within

    async def _drive(self, steps: Generator[Any, Any, T]) -> T:
        """To its end; a caller that is cancelled leaves it where it is."""
        value: Any = None
        error: KVCommonsError | None = None
        try:
            while True:
                step = steps.throw(error) if error is not None else steps.send(value)
                value, error = None, None
                match step:
                    case SessionWork(work=work):
                        try:
                            value = await self._run(work)
                        except KVCommonsError as raised:
                            error = raised
                    case Call(requests=requests):
                        calls = [self._call(name, request) for name, request in requests]
                        value = await asyncio.gather(*calls)
                    case Sleep(seconds=seconds):
                        await asyncio.sleep(seconds)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            steps.close()

    async def _run(self, work: Callable[[], T]) -> T:
        context = copy_context()  # for the ids in log lines
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, work)

    async def _call(self, name: str, request: pb.ReplicateRequest | pb.CompareRequest) -> Any:
        """The reply, or None where none came."""
        address = self._address(name)
        if address is None:
            return None
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        stub = rpc.ReplicasStub(self._channels[address])
        try:
            if isinstance(request, pb.ReplicateRequest):
                return await stub.Replicate(request, timeout=CALL_S)
            return await stub.Compare(request, timeout=CALL_S)
        except KVCommonsError as error:
            log.debug("another shard did not answer: %s", error.message, extra={"shard": name})
            return None

    def _address(self, name: str) -> str | None:
        found = [one for one in self._directory.instances("kvstore", ready=False) if one.shard.name == name]
        newest: Instance | None = max(found, key=lambda one: one.started_ms, default=None)
        return newest.control_address if newest is not None else None

    def _changed(self) -> None:
        view = self._replica.view
        if view is not None:
            facts = {"epoch": view.epoch, "serving": ", ".join(view.serving), "settled": view.settled}
            log.info("a view of the shards counts", extra=facts)
            if self._sessions.name not in view.members:
                log.info("this shard is not in it yet", extra={"shard": self._sessions.name})
        self._moved.set()
        self._notify_ledger()

    async def _follow(self) -> None:
        warned = False
        while True:
            view = self._directory.shards
            if view is not None:
                with suppress(KVCommonsError):  # the disk; tried again
                    await self._drive(self._replica.adopt(view))
                mine = self._replica.view
                if (mine is None or mine.stack != view.stack) and not warned:
                    warned = True
                    log.error(
                        "this folder has sessions of another stack, so it stays out of this one: start it "
                        "with its own ledger, or give this kvstore an empty folder"
                    )
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._directory.changed()

    async def _synchronise(self) -> None:
        while True:
            self._moved.clear()
            try:
                await self._drive(self._replica.synchronise())
                view = self._replica.view
                done = view is None or (view.settled and not view.joining)
                done = done or (view is not None and self._sessions.synced_epoch == view.epoch)
            except KVCommonsError as error:
                log.warning("other shards do not have all of this one yet: %s", error.message)
                done = False
            with suppress(TimeoutError):
                async with asyncio.timeout(None if done else RETRY_S):
                    await self._moved.wait()

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_S)
            if self._replica.alone:
                continue
            try:
                await self._drive(self._replica.settle())
            except KVCommonsError as error:
                log.warning("other shards were not told of all changes yet: %s", error.message)


class ShardRecords(EmbeddedRecords):
    """The records of a shard: what is done to a session is done to all of its copies."""

    def __init__(self, sessions: ShardSessions, executor: Executor, shard: Shard) -> None:
        super().__init__(sessions, executor)
        self._own = sessions
        self._shard = shard

    async def fork(self, tenant: str, session_id: str, new_session_id: str) -> kvstore_pb2.SessionRecord:
        return await self.carry(await self.get(tenant, session_id), new_session_id)

    async def carry(
        self, source: kvstore_pb2.SessionRecord, new_session_id: str
    ) -> kvstore_pb2.SessionRecord:
        """Makes a fork of another shard's session."""
        key = session_key(source.tenant, new_session_id)
        return await self._shard.operate(key, partial(self._own.fork_of, source, new_session_id))

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        work = partial(call, *args, **kwargs)
        if not args:  # upkeep
            return await super()._run(work)
        if call == self._own.page:
            return await self._shard.look(work)
        return await self._shard.operate(session_key(args[0], args[1]), work)


class ReplicasServicer(rpc.ReplicasServicer):
    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def Replicate(self, request: pb.ReplicateRequest, context: Any) -> pb.ReplicateReply:
        return await self._shard.receive(request)

    async def Compare(self, request: pb.CompareRequest, context: Any) -> pb.CompareReply:
        return await self._shard.compared(request)
