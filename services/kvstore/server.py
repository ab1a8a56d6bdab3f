"""gRPC to domain and back: Blocks and Sessions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvcommons.errors import InvalidInput, Overloaded, StoreUnavailable
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb import kvstore_pb2_grpc as rpc
from services.kvstore.blocks import BlockStore
from services.kvstore.hinted import HintedJobs
from services.kvstore.incoming import check_run
from services.kvstore.metrics import SessionMetrics
from services.kvstore.records.interface import Records
from services.kvstore.session import LIST_MAX, Cut, TurnBegin, TurnCommit, TurnRenewal, check_incarnation

log = logging.getLogger(__name__)

T = TypeVar("T")

LIST_DEFAULT = 100
WAIT_MS_MAX = 60_000
WATCHES_MAX = 1000
CALLS_MAX = 1000  # on sessions at once


async def until_durable(store: BlockStore, model: bytes, block_ids: Sequence[bytes], wait_ms: int) -> int:
    """Waits at most `wait_ms` for blocks to be on disk; how many of the leading ones are.

    Where very many wait already, it does not: what is durable by now is the answer.
    """
    if wait_ms and block_ids and store.watching < WATCHES_MAX:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        watch = store.watch(model, block_ids, lambda: _set_soon(loop, over))
        try:
            async with asyncio.timeout(min(wait_ms, WAIT_MS_MAX) / 1000):
                await over.wait()
        except TimeoutError:
            pass  # what is durable by now is the answer
        finally:
            store.unwatch(watch)
    return store.durable(model, block_ids)


def _set_soon(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        pass  # the loop is closed: nobody waits any more


class BlocksServicer(rpc.BlocksServicer):
    """Calls on the store hold its lock for dictionary work only: they may run on the event loop."""

    def __init__(self, store: BlockStore, sessions: Callable[[], int]) -> None:
        """`sessions`: how many there are."""
        self._store = store
        self._sessions = sessions
        self._hinted = HintedJobs()

    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchReply:
        run = list(request.block_ids)
        check_run(run)
        in_dram = self._store.match(request.model, run, peek=request.peek)
        return pb.MatchReply(tiers=[pb.TIER_DRAM if dram else pb.TIER_DISK for dram in in_dram])

    async def Hint(self, request: pb.HintRequest, context: Any) -> pb.HintReply:
        if not request.router:
            raise InvalidInput("a hint says which router it is from", param="router")
        now_s = time.monotonic()
        uses, unknown = self._hinted.complete(request, now_s)
        accepted = self._store.prefetcher.hint(
            request.router,
            [(use.model, use.block_ids, use.starts_in_s) for use in uses],
            request.ttl_ms / 1000,
        )
        self._hinted.keep(request, uses[:accepted], now_s)
        return pb.HintReply(
            accepted_uses=accepted, unknown_jobs=[*unknown, *(use.job for use in uses[accepted:] if use.job)]
        )

    async def Condemn(self, request: pb.CondemnRequest, context: Any) -> pb.CondemnReply:
        self._store.condemn(request.model, request.block_id, request.generation)
        return pb.CondemnReply()

    async def Forget(self, request: pb.ForgetRequest, context: Any) -> pb.ForgetReply:
        self._store.forget(request.model, list(request.block_ids))
        return pb.ForgetReply()

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        stats = self._store.stats()
        return pb.StatsReply(
            dram_blocks=stats.dram_blocks,
            dram_capacity_blocks=stats.dram_capacity_blocks,
            disk_blocks=stats.disk_blocks,
            disk_capacity_blocks=stats.disk_capacity_blocks,
            sessions=self._sessions(),
            pending_writes=stats.pending_writes,
            block_hits=stats.counters.hits_dram + stats.counters.hits_disk,
            block_misses=stats.counters.misses,
            corrupt_blocks=stats.counters.corrupt,
        )


class SessionsServicer(rpc.SessionsServicer):
    """Checks what comes and bounds how much of it is under way; the rest is the records'."""

    def __init__(
        self,
        store: BlockStore,
        records: Records,
        metrics: SessionMetrics,
        refusal: Callable[[], str] = str,
    ) -> None:
        """`refusal`: why no session is served here; empty where they are."""
        self._store = store
        self._records = records
        self._metrics = metrics
        self._refusal = refusal
        self._calls = 0

    async def Create(self, request: pb.CreateSessionRequest, context: Any) -> pb.SessionRecord:
        check_incarnation(request.incarnation)
        return await self._bounded(
            self._records.create(request.tenant, request.session_id, request.ttl_s, request.incarnation)
        )

    async def Get(self, request: pb.GetSessionRequest, context: Any) -> pb.SessionRecord:
        return await self._bounded(self._records.get(request.tenant, request.session_id))

    async def List(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsReply:
        limit = min(request.limit or LIST_DEFAULT, LIST_MAX)
        sessions, more = await self._bounded(self._records.page(request.tenant, request.after, limit))
        return pb.ListSessionsReply(sessions=sessions, more=more)

    async def Delete(self, request: pb.DeleteSessionRequest, context: Any) -> pb.DeleteSessionReply:
        check_incarnation(request.incarnation)
        await self._bounded(self._records.delete(request.tenant, request.session_id, request.incarnation))
        return pb.DeleteSessionReply()

    async def Fork(self, request: pb.ForkSessionRequest, context: Any) -> pb.SessionRecord:
        check_incarnation(request.incarnation)
        cut = None
        if request.HasField("messages"):
            cut = Cut(messages=request.messages, block_tokens=request.block_tokens)
        return await self._bounded(
            self._records.fork(request.tenant, request.session_id, request.new_id, request.incarnation, cut)
        )

    async def BeginTurn(self, request: pb.BeginTurnRequest, context: Any) -> pb.BeginTurnReply:
        begun = await self._bounded(
            self._records.begin(
                request.tenant,
                request.session_id,
                TurnBegin(
                    turn_id=request.turn_id,
                    owner=request.owner,
                    lease_ms=request.lease_ms,
                    known_turn_id=request.known_turn_id,
                ),
            )
        )
        if not begun.after_known:  # its router has not had it lately, so likely no instance has its KV
            self._store.prefetcher.begin(begun.record.model, begun.record.block_ids)
        return pb.BeginTurnReply(
            record=begun.record,
            fencing=begun.lease.fencing,
            after_known=begun.after_known,
            document=begun.document,
            document_state=begun.lease.document,
        )

    async def RenewTurn(self, request: pb.RenewTurnRequest, context: Any) -> pb.RenewTurnReply:
        await self._bounded(
            self._records.renew(
                request.tenant,
                request.session_id,
                TurnRenewal(
                    turn_id=request.turn_id,
                    fencing=request.fencing,
                    lease_ms=request.lease_ms,
                    document_state=request.document_state if request.HasField("document_state") else None,
                    document=request.document if request.HasField("document") else None,
                ),
            )
        )
        return pb.RenewTurnReply()

    async def CommitTurn(self, request: pb.CommitTurnRequest, context: Any) -> pb.CommitTurnReply:
        """The blocks first, if they come in time; the tokens in any case."""
        started = time.monotonic()
        ids = list(request.block_ids)
        wait_ms = request.durable_wait_ms
        left_s = context.time_remaining()
        if left_s is not None:  # waiting for blocks must not eat the time for the tokens
            wait_ms = min(wait_ms, int(left_s * 1000 / 2))
        durable = await until_durable(self._store, request.model, ids, wait_ms)
        committed = await self._bounded(
            self._records.commit(
                request.tenant,
                request.session_id,
                TurnCommit(
                    turn_id=request.turn_id,
                    fencing=request.fencing,
                    expected_version=request.expected_version,
                    model=request.model,
                    model_name=request.model_name,
                    new_tokens=request.new_tokens,
                    new_messages=request.new_messages,
                    kept_blocks=request.kept_blocks,
                    block_ids=ids,
                    new_truncations=request.new_truncations,
                    tools=request.tools,
                ),
            )
        )
        self._metrics.committed(time.monotonic() - started, new=committed.new)
        facts = {"version": committed.version, "new_blocks": len(ids), "durable_blocks": durable}
        log.info("turn committed", extra={**facts, "new_tokens": len(request.new_tokens)})
        return pb.CommitTurnReply(version=committed.version, durable_blocks=durable)

    async def AbandonTurn(self, request: pb.AbandonTurnRequest, context: Any) -> pb.AbandonTurnReply:
        await self._bounded(
            self._records.abandon(
                request.tenant,
                request.session_id,
                turn_id=request.turn_id,
                fencing=request.fencing,
            )
        )
        return pb.AbandonTurnReply()

    async def ListDocuments(self, request: pb.ListDocumentsRequest, context: Any) -> pb.ListDocumentsReply:
        found = await self._bounded(self._records.documents(request.tenant, request.session_id))
        return pb.ListDocumentsReply(
            documents=[
                pb.DocumentTurn(
                    tenant=one.tenant,
                    session_id=one.session_id,
                    turn_id=one.lease.turn_id,
                    fencing=one.lease.fencing,
                    orphaned=one.orphaned,
                    state=one.lease.document,
                )
                for one in found
            ]
        )

    async def _bounded(self, call: Coroutine[Any, Any, T]) -> T:
        if refusal := self._refusal():
            call.close()
            raise StoreUnavailable(refusal, retry_after_ms=1000)
        if self._calls >= CALLS_MAX:
            call.close()
            raise Overloaded(f"{CALLS_MAX} calls on sessions wait already: retry later", retry_after_ms=500)
        self._calls += 1
        try:
            return await call
        finally:
            self._calls -= 1
