"""Calls to the session store: each to the home of its session first, bounded, tried again there and at other
kvstores while nobody answers, and StoreUnavailable at the end.

What was asked of one kvstore may have happened though it gave no answer, or may happen later, when it wakes.
So what makes a session names its incarnation, and what deletes one, too.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvcommons.errors import DeadlineExceeded, Overloaded, StoreUnavailable, Unavailable
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.router.fleet.fleet import Fleet

if TYPE_CHECKING:
    from kvcommons.pb.kvstore_pb2_grpc import SessionsAsyncStub

R = TypeVar("R")

CALL_S = 5.0
SILENT_S = 2.0  # a kvstore that says nothing is not waited for any longer while there is another one to ask
_DELAY_S_MIN = 0.05
_DELAY_S_MAX = 0.5


class SessionStore:
    def __init__(self, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._clock = clock

    async def call(
        self,
        make: Callable[[SessionsAsyncStub, float], Awaitable[R]],
        *,
        tenant: str,
        root: str,
        patience_s: float = 0.0,
        waits_s: float = 0.0,
    ) -> R:
        """`make(stub, timeout_s)` does the call. It is tried again for `patience_s` while the store is away,
        at any kvstore, so it has to be idempotent where that is not 0. Errors that the store itself raised
        pass through.

        `root`: of the session, where it is known, else its id. At its home are the session's blocks; but any
        kvstore has its record. `waits_s`: how long the call itself waits for something.
        """
        fleet = self._fleet.homed(session_key(tenant, root))
        deadline_s, delay_s = self._clock() + patience_s, _DELAY_S_MIN
        asked: set[str] = set()  # in this round
        reported: Unavailable | DeadlineExceeded | Overloaded | None = None
        while True:
            stores = fleet.stores()
            fresh = [store for store in stores if store.id not in asked] or stores
            others = patience_s > 0 and len(fresh) > 1
            timeout_s = waits_s + (SILENT_S if others else CALL_S)
            if patience_s:
                timeout_s = min(timeout_s, max(deadline_s - self._clock(), _DELAY_S_MIN))
            try:
                return await make(fleet.sessions(fresh[0] if fresh else None), timeout_s)
            except (Unavailable, DeadlineExceeded, Overloaded) as error:
                if len(stores) > 1 and not isinstance(error, (StoreUnavailable, Overloaded)):
                    fleet.suspect(fresh[0].id)
                # Where a try had little time left, its end says nothing of why.
                reported = error if reported is None or not isinstance(error, DeadlineExceeded) else reported
                if self._clock() + delay_s >= deadline_s:
                    raise _gave_up(reported, patience_s) from error
            if others:
                asked.add(fresh[0].id)
                continue
            asked.clear()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _DELAY_S_MAX)

    async def create(
        self, tenant: str, session_id: str, ttl_s: int, *, patience_s: float
    ) -> pb.SessionRecord:
        """Raises AlreadyExists."""
        request = pb.CreateSessionRequest(
            tenant=tenant, session_id=session_id, ttl_s=ttl_s, incarnation=uuid.uuid4().bytes
        )
        return await self.call(
            lambda stub, timeout_s: stub.Create(request, timeout=timeout_s),
            tenant=tenant,
            root=session_id,
            patience_s=patience_s,
        )

    async def get(self, tenant: str, session_id: str, *, patience_s: float) -> pb.SessionRecord:
        """Raises SessionNotFound."""
        request = pb.GetSessionRequest(tenant=tenant, session_id=session_id)
        return await self.call(
            lambda stub, timeout_s: stub.Get(request, timeout=timeout_s),
            tenant=tenant,
            root=session_id,
            patience_s=patience_s,
        )

    async def fork(
        self,
        tenant: str,
        session_id: str,
        new_id: str,
        *,
        messages: int | None = None,
        block_tokens: int = 0,
        patience_s: float,
    ) -> pb.SessionRecord:
        """`messages`: the first ones, to the end of a turn, are all that the new session has. Raises
        SessionNotFound, AlreadyExists, InvalidInput."""
        request = pb.ForkSessionRequest(
            tenant=tenant,
            session_id=session_id,
            new_id=new_id,
            incarnation=uuid.uuid4().bytes,
            messages=messages,
            block_tokens=block_tokens,
        )
        return await self.call(
            lambda stub, timeout_s: stub.Fork(request, timeout=timeout_s),
            tenant=tenant,
            root=session_id,
            patience_s=patience_s,
        )

    async def delete(self, tenant: str, session_id: str, *, patience_s: float) -> None:
        """The session that is there now; not one that somebody makes by the same id meanwhile. Raises
        SessionNotFound."""
        there = await self.get(tenant, session_id, patience_s=patience_s)
        request = pb.DeleteSessionRequest(tenant=tenant, session_id=session_id, incarnation=there.incarnation)
        await self.call(
            lambda stub, timeout_s: stub.Delete(request, timeout=timeout_s),
            tenant=tenant,
            root=there.root,
            patience_s=patience_s,
        )

    async def documents(
        self, tenant: str = "", session_id: str = "", *, patience_s: float = 0.0
    ) -> Sequence[pb.DocumentTurn]:
        """Those on their way, of all tenants or of a session, from whichever kvstore answers."""
        request = pb.ListDocumentsRequest(tenant=tenant, session_id=session_id)
        reply = await self.call(
            lambda stub, timeout_s: stub.ListDocuments(request, timeout=timeout_s),
            tenant=tenant,
            root=session_id,
            patience_s=patience_s,
        )
        return reply.documents

    async def abandon_document(self, document: pb.DocumentTurn, *, patience_s: float) -> None:
        """Whoever computes it finds its turn gone."""
        request = pb.AbandonTurnRequest(
            tenant=document.tenant,
            session_id=document.session_id,
            turn_id=document.turn_id,
            fencing=document.fencing,
        )
        await self.call(
            lambda stub, timeout_s: stub.AbandonTurn(request, timeout=timeout_s),
            tenant=document.tenant,
            root=document.session_id,
            patience_s=patience_s,
        )

    async def list(self, request: pb.ListSessionsRequest, *, patience_s: float) -> pb.ListSessionsReply:
        """From whichever kvstore answers: each has all sessions."""
        return await self.call(
            lambda stub, timeout_s: stub.List(request, timeout=timeout_s),
            tenant=request.tenant,
            root="",
            patience_s=patience_s,
        )


def _gave_up(error: Unavailable | DeadlineExceeded | Overloaded, patience_s: float) -> Exception:
    if isinstance(error, Overloaded):
        return error
    waited = f" for {patience_s:g} s" if patience_s else ""
    return StoreUnavailable(
        f"the session store was out of reach{waited}: {error.message}; try again in some seconds",
        retry_after_ms=error.retry_after_ms or 1000,
    )
