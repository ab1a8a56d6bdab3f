"""A session's turn at the store: its lease, kept while the turn runs, and its end: committed or abandoned."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvcommons.errors import Conflict, KVCommonsError, NotFound
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.token_ids import token_array
from services.router.sessions.conversation import Message
from services.router.sessions.copies import RecordCopies, grown
from services.router.sessions.store import SessionStore
from services.router.sessions.truncation import Truncation

log = logging.getLogger(__name__)

# A new turn waits for a store that restarts, for the client has seen nothing yet; so does a document.
_BEGIN_PATIENCE_S = 5.0
_ABANDON_PATIENCE_S = 5.0
_LEFT_MS = 1  # the shortest lease


class SessionTurn:
    """Begin it, then `commit`, `abandon` or `leave`; each ends the lease. `lost` is set when another turn
    took it over. `document`: which the turn adds, where a former owner kept one; `document_state`: how far it
    is, which goes along when the lease is renewed."""

    def __init__(
        self,
        store: SessionStore,
        copies: RecordCopies,
        begin: pb.BeginTurnRequest,
        reply: pb.BeginTurnReply,
        record: pb.SessionRecord,
    ) -> None:
        self.record = record
        self.lost: KVCommonsError | None = None
        self.document = reply.document if reply.HasField("document") else None
        self.document_state = reply.document_state if reply.HasField("document_state") else None
        self._store = store
        self._copies = copies
        self._begin = begin
        self._fencing = reply.fencing
        self._renewal = asyncio.create_task(self._renew(), name=f"lease of {begin.session_id}")

    @classmethod
    async def begin(
        cls,
        store: SessionStore,
        copies: RecordCopies,
        *,
        tenant: str,
        session_id: str,
        turn_id: str,
        owner: str,
        lease_ms: int,
    ) -> SessionTurn:
        """Raises TurnInProgress while another turn has the session, StoreUnavailable."""
        known = copies.get(tenant, session_id)
        request = pb.BeginTurnRequest(
            tenant=tenant,
            session_id=session_id,
            turn_id=turn_id,
            owner=owner,
            lease_ms=lease_ms,
            known_turn_id=known.last_turn_id,
        )
        reply = await store.call(
            lambda stub, timeout_s: stub.BeginTurn(request, timeout=timeout_s),
            tenant=tenant,
            root=session_id,
            patience_s=_BEGIN_PATIENCE_S,
        )
        record = reply.record
        if reply.after_known:
            record = grown(known, record, kept_blocks=len(known.block_ids))
        copies.put(record)
        return cls(store, copies, request, reply, record)

    @property
    def tokens(self) -> array[int]:
        """The stored ones."""
        return token_array(self.record.tokens[:])  # as a list in between: it asks for one after another else

    @property
    def messages(self) -> list[Message]:
        """The stored ones."""
        return [Message.of(one) for one in self.record.messages]

    @property
    def truncations(self) -> list[Truncation]:
        """The stored ones."""
        return [Truncation.of(one) for one in self.record.truncations]

    async def commit(
        self,
        *,
        model: ModelInfo,
        new_tokens: Sequence[int],
        new_messages: Sequence[Message],
        block_ids: Sequence[bytes],
        new_truncations: Sequence[Truncation],
        durable_wait_ms: int,
        patience_s: float,
        tools: str = "",
        answered: pb.AnsweredRequest | None = None,
    ) -> pb.CommitTurnReply:
        """Durable when it returns. Tried again for `patience_s` while the store is away (idempotent by turn
        id). `block_ids`: of all full blocks of the context after the turn; `tools`: of a session's first
        turn; `answered`: by which its client may ask for its answer again.

        Raises StoreUnavailable, or Conflict where the lease was lost.
        """
        kept = _alike(self.record.block_ids, block_ids)
        messages = [replace(one, end_token=0).record() for one in new_messages]
        messages[-1].end_token = len(self.record.tokens) + len(new_tokens)
        if answered is not None:
            messages[-1].answered.CopyFrom(answered)
        request = pb.CommitTurnRequest(
            tenant=self._begin.tenant,
            session_id=self._begin.session_id,
            turn_id=self._begin.turn_id,
            fencing=self._fencing,
            expected_version=self.record.version,
            model=model.fingerprint,
            model_name=model.name,
            new_tokens=new_tokens,
            new_messages=messages,
            kept_blocks=kept,
            block_ids=block_ids[kept:],
            new_truncations=[one.record() for one in new_truncations],
            durable_wait_ms=durable_wait_ms,
            tools=tools,
        )
        reply = await self._store.call(
            lambda stub, timeout_s: stub.CommitTurn(request, timeout=timeout_s),
            tenant=request.tenant,
            root=self.record.root,
            patience_s=patience_s,
            waits_s=durable_wait_ms / 1000,
        )
        self._renewal.cancel()
        added = pb.SessionRecord(
            version=reply.version,
            last_turn_id=request.turn_id,
            tokens=request.new_tokens,
            messages=request.new_messages,
            block_ids=request.block_ids,
            truncations=request.new_truncations,
            tools=request.tools,
        )
        self._copies.put(grown(self.record, added, kept_blocks=kept))
        return reply

    async def keep(self, document: pb.Document, state: pb.DocumentState) -> None:
        """From now on the turn is a document, with which any router can go on. Durable when it returns.
        Raises StoreUnavailable, Conflict."""
        self.document_state = state
        request = self._renewal_of(self._begin.lease_ms)
        request.document.CopyFrom(document)
        await self._store.call(
            lambda stub, timeout_s: stub.RenewTurn(request, timeout=timeout_s),
            tenant=request.tenant,
            root=self.record.root,
            patience_s=_BEGIN_PATIENCE_S,
        )

    async def leave(self) -> None:
        """Lets the lease of a document run out, so that another router goes on with it at once."""
        self._renewal.cancel()
        request = self._renewal_of(_LEFT_MS)
        try:
            await self._store.call(
                lambda stub, timeout_s: stub.RenewTurn(request, timeout=timeout_s),
                tenant=request.tenant,
                root=self.record.root,
            )
        except KVCommonsError as error:
            log.warning("a document could not be left; its lease runs out by itself: %s", error)

    async def abandon(self) -> None:
        """Frees the session for its next turn. What fails is logged: the lease runs out by itself."""
        self._renewal.cancel()
        request = pb.AbandonTurnRequest(
            tenant=self._begin.tenant,
            session_id=self._begin.session_id,
            turn_id=self._begin.turn_id,
            fencing=self._fencing,
        )
        try:
            await self._store.call(
                lambda stub, timeout_s: stub.AbandonTurn(request, timeout=timeout_s),
                tenant=request.tenant,
                root=self.record.root,
                patience_s=_ABANDON_PATIENCE_S,
            )
        except KVCommonsError as error:
            log.warning("a turn could not be abandoned; its lease runs out by itself: %s", error)

    async def _renew(self) -> None:
        interval_s = self._begin.lease_ms / 3000
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._store.call(
                    lambda stub, timeout_s: stub.RenewTurn(
                        self._renewal_of(self._begin.lease_ms), timeout=timeout_s
                    ),
                    tenant=self._begin.tenant,
                    root=self.record.root,
                )
            except (Conflict, NotFound) as error:
                self.lost = error
                return
            except KVCommonsError as error:
                log.info("the lease was not renewed, which is tried again: %s", error)

    def _renewal_of(self, lease_ms: int) -> pb.RenewTurnRequest:
        return pb.RenewTurnRequest(
            tenant=self._begin.tenant,
            session_id=self._begin.session_id,
            turn_id=self._begin.turn_id,
            fencing=self._fencing,
            lease_ms=lease_ms,
            document_state=self.document_state,
        )


def _alike(before: Sequence[bytes], after: Sequence[bytes]) -> int:
    """How many of the first are the same."""
    differ = (at for at, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    return next(differ, min(len(before), len(after)))
