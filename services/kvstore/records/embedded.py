"""Records in this kvstore's own RocksDB."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.records.interface import RecordsObserver
from services.kvstore.session import Begun, Committed, TurnCommit
from services.kvstore.sessions import Sessions

P = ParamSpec("P")
T = TypeVar("T")


class EmbeddedRecords:
    """`Records` over `Sessions`, whose calls block and therefore run on the executor.

    A caller that is cancelled leaves its call to go on to its end.
    """

    def __init__(
        self, sessions: Sessions, executor: Executor, observer: RecordsObserver | None = None
    ) -> None:
        self._sessions = sessions
        self._executor = executor
        self._observer = observer or RecordsObserver()

    async def create(
        self, tenant: str, session_id: str, ttl_s: int, incarnation: bytes = b""
    ) -> pb.SessionRecord:
        return await self._run(self._sessions.create, tenant, session_id, ttl_s, incarnation)

    async def get(self, tenant: str, session_id: str) -> pb.SessionRecord:
        return await self._run(self._sessions.get, tenant, session_id)

    async def page(self, tenant: str, after: str, limit: int) -> tuple[list[pb.SessionRecord], bool]:
        return await self._run(self._sessions.page, tenant, after, limit)

    async def delete(self, tenant: str, session_id: str, incarnation: bytes = b"") -> None:
        await self._run(self._sessions.delete, tenant, session_id, incarnation)

    async def fork(
        self, tenant: str, session_id: str, new_session_id: str, incarnation: bytes = b""
    ) -> pb.SessionRecord:
        return await self._run(self._sessions.fork, tenant, session_id, new_session_id, incarnation)

    async def begin(
        self,
        tenant: str,
        session_id: str,
        *,
        turn_id: str,
        owner: str,
        lease_ms: int,
        known_turn_id: str = "",
    ) -> Begun:
        return await self._run(
            self._sessions.begin,
            tenant,
            session_id,
            turn_id=turn_id,
            owner=owner,
            lease_ms=lease_ms,
            known_turn_id=known_turn_id,
        )

    async def renew(self, tenant: str, session_id: str, *, turn_id: str, fencing: int, lease_ms: int) -> None:
        await self._run(
            self._sessions.renew, tenant, session_id, turn_id=turn_id, fencing=fencing, lease_ms=lease_ms
        )

    async def commit(self, tenant: str, session_id: str, turn: TurnCommit) -> Committed:
        return await self._run(self._sessions.commit, tenant, session_id, turn)

    async def abandon(self, tenant: str, session_id: str, *, turn_id: str, fencing: int) -> None:
        await self._run(self._sessions.abandon, tenant, session_id, turn_id=turn_id, fencing=fencing)

    async def sweep(self) -> int:
        return await self._run(self._sessions.sweep)

    async def count(self) -> int:
        return self._sessions.count

    async def close(self) -> None:
        await self._run(self._sessions.close)

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        work = partial(copy_context().run, call, *args, **kwargs)  # for the ids in log lines
        began_s = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._observer.called(call.__name__, time.monotonic() - began_s)
