"""Calls to the session store: each to its session's home, bounded, tried again while that is away or moves,
and StoreUnavailable at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvcommons.errors import (
    DeadlineExceeded,
    KVCommonsError,
    Overloaded,
    StoreUnavailable,
    Unavailable,
    WrongShard,
)
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.ledger_pb2 import Instance
from kvcommons.shards import session_key
from services.router.fleet.fleet import Fleet

if TYPE_CHECKING:
    from kvcommons.pb.kvstore_pb2_grpc import SessionsAsyncStub

R = TypeVar("R")

CALL_S = 5.0
SHARD_CALL_S = 2.0  # where there are several shards: one that hangs is not waited for any longer each time
# What was asked of the wrong shard was not done: the right one is known as soon as the ledger has told.
_MOVED_S = 3.0
_DELAY_S_MIN = 0.05
_DELAY_S_MAX = 0.5


class SessionStore:
    def __init__(
        self, fleet: Fleet, *, takeover_wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`takeover_wait_s`: where there are several shards, how long a call waits until another one has
        taken over from one that died or hangs."""
        self._fleet = fleet
        self._takeover_wait_s = takeover_wait_s
        self._clock = clock

    async def call(
        self,
        make: Callable[[SessionsAsyncStub, float], Awaitable[R]],
        *,
        tenant: str,
        session_id: str,
        patience_s: float = 0.0,
        call_s: float = CALL_S,
    ) -> R:
        """`make(stub, timeout_s)` does the call at the home of the session. It is tried again for
        `patience_s` while the store is away, so it has to be idempotent where that is not 0. Errors that the
        store itself raised pass through.
        """
        fleet = self._fleet.homed(session_key(tenant, session_id))
        return await self._patient(fleet.store, make, patience_s=patience_s, call_s=call_s)

    async def list(self, request: pb.ListSessionsRequest, *, patience_s: float) -> pb.ListSessionsReply:
        """Of all shards of one view, in the order of the sessions' ids."""
        deadline_s = self._clock() + (patience_s if len(self._fleet.serving) == 1 else self._takeover_wait_s)
        while True:
            shards = self._fleet.serving
            calls = (self._list(request, shard) for shard in shards)
            try:
                replies = await asyncio.gather(*calls)
                if self._fleet.serving == shards:
                    break
            except StoreUnavailable:
                if self._clock() + _DELAY_S_MAX >= deadline_s:
                    raise
            await asyncio.sleep(_DELAY_S_MAX)
        if len(replies) == 1:
            return replies[0]
        found = {record.session_id: record for reply in replies for record in reply.sessions}
        ids = sorted(found, key=str.encode)
        return pb.ListSessionsReply(
            sessions=[found[session_id] for session_id in ids[: request.limit]],
            more=len(ids) > request.limit or any(reply.more for reply in replies),
        )

    async def _list(self, request: pb.ListSessionsRequest, shard: str) -> pb.ListSessionsReply:
        return await self._patient(
            lambda: self._fleet.shard(shard),
            lambda stub, timeout_s: stub.List(request, timeout=timeout_s),
            patience_s=0.0,
        )

    async def await_durable(
        self, request: pb.AwaitDurableRequest, *, tenant: str, session_id: str, root: str
    ) -> bool:
        """Waits for blocks of a fork that lie elsewhere than its record; whether they do."""
        store = self._fleet.homed(session_key(tenant, root)).store()
        home = self._fleet.homed(session_key(tenant, session_id)).store()
        if store is None or home is None or store.id == home.id:
            return False
        with contextlib.suppress(KVCommonsError):  # the tokens are committed in any case
            await self._fleet.blocks(store).AwaitDurable(request, timeout=CALL_S + request.wait_ms / 1000)
        return True

    async def fork(self, request: pb.ForkSessionRequest) -> pb.SessionRecord:
        """At the home of the new session; where that is not the old one's, with its record."""
        old, new = (
            self._fleet.homed(session_key(request.tenant, session_id)).store()
            for session_id in (request.session_id, request.new_id)
        )
        if old is not None and new is not None and old.id != new.id:
            wanted = pb.GetSessionRequest(tenant=request.tenant, session_id=request.session_id)
            request.source.CopyFrom(
                await self.call(
                    lambda stub, timeout_s: stub.Get(wanted, timeout=timeout_s),
                    tenant=request.tenant,
                    session_id=request.session_id,
                )
            )
        return await self.call(
            lambda stub, timeout_s: stub.Fork(request, timeout=timeout_s),
            tenant=request.tenant,
            session_id=request.new_id,
        )

    async def _patient(
        self,
        store: Callable[[], Instance | None],
        make: Callable[[SessionsAsyncStub, float], Awaitable[R]],
        *,
        patience_s: float,
        call_s: float = CALL_S,
    ) -> R:
        began_s = self._clock()
        delay_s = _DELAY_S_MIN
        told: Unavailable | DeadlineExceeded | Overloaded | None = None
        while True:
            if patience_s and len(self._fleet.serving) > 1:
                patience_s, call_s = max(patience_s, self._takeover_wait_s), min(call_s, SHARD_CALL_S)
            deadline_s = began_s + patience_s
            timeout_s = min(call_s, max(deadline_s - self._clock(), _DELAY_S_MIN)) if patience_s else call_s
            try:
                return await make(self._fleet.sessions(store()), timeout_s)
            except (Unavailable, DeadlineExceeded, Overloaded) as error:
                if isinstance(error, WrongShard):
                    deadline_s = max(deadline_s, began_s + _MOVED_S)
                # Where a try had little time left, its end says nothing of why.
                told = error if told is None or not isinstance(error, DeadlineExceeded) else told
                if self._clock() + delay_s >= deadline_s:
                    raise _gave_up(told, patience_s) from error
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _DELAY_S_MAX)


def _gave_up(error: Unavailable | DeadlineExceeded | Overloaded, patience_s: float) -> Exception:
    if isinstance(error, Overloaded):
        return error
    waited = f" for {patience_s:g} s" if patience_s else ""
    return StoreUnavailable(
        f"the session store was out of reach{waited}: {error.message}; try again in some seconds",
        retry_after_ms=error.retry_after_ms or 1000,
    )
