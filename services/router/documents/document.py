"""One document on its way into a session: computed part by part, and then committed as a turn."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from enum import Enum

from kvcommons.errors import (
    Conflict,
    ContextLengthExceeded,
    Internal,
    InvalidInput,
    KVCommonsError,
    NotFound,
)
from kvcommons.homes import session_key
from kvcommons.pb import common_pb2
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.rblock.identity import reusable_blocks
from kvcommons.token_ids import token_array
from services.router.admission.queue import Prefix
from services.router.admission.scheduling import DOCUMENT_PATIENCE_S, Promise
from services.router.answer.text import AnswerText
from services.router.documents.kept_blocks import KeptBlocks
from services.router.documents.progress import DocumentProgress
from services.router.fleet.stored import stored_blocks
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.conversation import Message
from services.router.sessions.truncation import Context
from services.router.sessions.turn import SessionTurn
from services.router.turn.attempt import RequestContext
from services.router.turn.choice import Choice, Patience
from services.router.turn.turn import Turn

log = logging.getLogger(__name__)

_FORMAT = 1  # of what is kept
_RETRY_S_MIN = 0.2
_RETRY_S_MAX = 30.0
_MATCH_S = 2.0
_REASON_CHARS_MAX = 300  # of what is told of a failure that is tried again


class DocumentStatus(Enum):
    """Of a document."""

    RUNNING = "running"
    COMPLETED = "completed"  # it is in its session
    FAILED = "failed"
    CANCELLED = "cancelled"
    LEFT = "left"  # this router ends; another one, or its successor, goes on


class Document:
    """`run` it once. `error` says why it failed."""

    def __init__(
        self,
        serving: Serving,
        session: SessionTurn,
        *,
        tenant: Tenant,
        session_id: str,
        turn_id: str,
        model: ModelInfo,
        new_tokens: Sequence[int],
        new_messages: Sequence[Message],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`session`: its turn, which nobody else can begin meanwhile; the document ends it."""
        self.turn_id = turn_id
        self.session_id = session_id
        self.status = DocumentStatus.RUNNING
        self.error: KVCommonsError | None = None
        self._serving = serving
        self._session = session
        self._tenant = tenant
        self._model = model
        self._new_tokens = new_tokens
        self._new_messages = new_messages
        self._clock = clock
        self._context = Context(
            salt=tenant.salt,
            model=model,
            tokens=session.tokens + token_array(new_tokens),
            truncations=session.truncations,
            known_ids=session.record.block_ids,
        )
        self._home = session_key(tenant.name, session.record.root)
        self._fleet = serving.fleet.homed(self._home)
        self._ids = self._context.chain().ids
        tokens = len(self._context.now.tokens)
        self._progress = DocumentProgress(
            before=tokens - len(new_tokens),
            tokens=tokens,
            block_tokens=model.block_tokens,
            part_s=serving.config.document_part_s,
        )
        former = session.document_state or pb.DocumentState(begun_ms=time.time_ns() // 1_000_000)
        self.state = pb.DocumentState(
            begun_ms=former.begun_ms,
            computed_tokens=former.computed_tokens,  # until the store says what it has
            role=new_messages[0].role,
            model_name=model.name,
            tokens=len(new_tokens),
        )
        self._kept = KeptBlocks(f"{serving.instance_id}/{turn_id}", model.fingerprint, self._ids)
        self._parts = itertools.count(time.time_ns())  # a router that goes on with it uses no number again
        self._changed = asyncio.Event()
        self._leaving = False

    def check(self) -> None:
        """Raises ContextLengthExceeded where session and document do not fit the window or the memory of all
        instances."""
        tokens, new, window = self._progress.tokens, len(self._new_tokens), self._model.context_window
        if tokens >= window:
            raise ContextLengthExceeded(
                f"the document has {new} tokens, and with the {tokens - new} of the session they are "
                f"{tokens - window + 1} too many for the context window of {window}, in which a question has "
                "to fit, too: shorten it",
                param="content",
            )
        self._serving.fleet.check(self._model, tokens, param="content")

    async def keep(self) -> None:
        """From now on any router can go on with it. Raises StoreUnavailable, Conflict."""
        kept = pb.Document(
            format=_FORMAT,
            model=self._model.fingerprint,
            model_name=self._model.name,
            tokens=self._new_tokens,
            messages=[one.record() for one in self._new_messages],
        )
        await self._session.keep(kept, self.state)

    async def changed(self, timeout_s: float) -> None:
        """Waits until anything of its state is new, for so long at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def leave(self) -> None:
        """What is cancelled from now on is left to another router."""
        self._leaving = True

    async def run(self) -> None:
        """To its end; cancel it to end it before."""
        keeping = asyncio.create_task(self._kept.run(self._fleet))
        try:
            await self._compute()
            await self._commit()
            self.status = DocumentStatus.COMPLETED
            log.info("a document is in its session", extra={"tokens": len(self._new_tokens)})
        except asyncio.CancelledError:
            self.status = DocumentStatus.LEFT if self._leaving else DocumentStatus.CANCELLED
            raise
        except KVCommonsError as error:
            # Another router ended it, or goes on with it: this one was silent for too long.
            self.status = DocumentStatus.CANCELLED if self._session.lost else DocumentStatus.FAILED
            self.error = error
            log.warning("a document failed: %s", error.message, extra={"code": error.code})
        except Exception:
            log.exception("a document failed unexpectedly")
            self.status = DocumentStatus.FAILED
            self.error = Internal("the router failed unexpectedly; its log says why")
        finally:
            keeping.cancel()
            if self.status is DocumentStatus.LEFT:
                await self._session.leave()
            elif self.status is not DocumentStatus.COMPLETED:
                await self._session.abandon()
            self._tell()

    async def _compute(self) -> None:
        stored = await stored_blocks(self._fleet, self._model, self._ids, timeout_s=_MATCH_S, peek=True)
        self._progress.found((stored or 0) * self._model.block_tokens)
        self._tell()
        moved_s, failures = self._clock(), 0
        while not self._progress.done:
            end = self._progress.next_end()
            try:
                seconds, cached = await self._part(end)
            except KVCommonsError as error:
                if _final(error) or self._clock() - moved_s > self._serving.config.document_patience_s:
                    raise
                log.info("a part of a document failed, which is tried again: %s", error)
                self._progress.part_failed()
                self._tell(waits_for=error.message)
                await asyncio.sleep(min(_RETRY_S_MIN * 2.0**failures, _RETRY_S_MAX))
                failures += 1
                continue
            self._progress.part_done(end, seconds, cached=cached)
            self._tell()
            moved_s, failures = self._clock(), 0

    async def _part(self, end: int) -> tuple[float, int | None]:
        """Computes the context up to `end`. The seconds that it took once it had begun, and how many
        leading tokens' KV was found, where that is known."""
        serving, config, model = self._serving, self._serving.config, self._model
        choice = Choice(
            index=0,
            prompt=self._context.now.tokens[:end],
            max_position=end + 1,  # the token that follows is of no interest, and comes with them
            sampling=common_pb2.Sampling(temperature=0.0, top_p=1.0),
            text=AnswerText(serving.text.tokenizer, stops=(), stop_ids=()),
            patience=Patience(resume_s=config.resume_deadline_s, stall_s=config.stall_s),
        )
        deadline_s = self._clock() + config.request_deadline_s
        ids = self._ids[: reusable_blocks(end, model.block_tokens)]
        async with serving.admission.slot(
            cost=1,
            deadline_s=deadline_s,
            prefix=lambda: Prefix(model=model.fingerprint, block_ids=ids, home=self._home),
            promise=Promise(tenant=self._tenant.name, patience_s=DOCUMENT_PATIENCE_S),
        ):
            begun_s = self._clock()
            request = RequestContext(
                turn_id=f"{self.turn_id}-{next(self._parts)}",
                session_id=self.session_id,
                tenant=self._tenant.name,
                salt=self._tenant.salt,
                model=model,
                home=self._home,
                affinity=f"{self._tenant.name}/{self.session_id}",
                reuse=True,
                deadline_s=deadline_s,
                background=True,
                context=self._context.up_to(end),
            )
            running = serving.dispatch.run(Turn([[choice]]), request, lost=lambda: self._session.lost)
            async with aclosing(running):
                async for _ in running:
                    pass
        found = choice.reuse.cached_tokens if choice.reuse is not None else None
        return self._clock() - begun_s, found

    async def _commit(self) -> None:
        """Tried again as long as a part would be."""
        config = self._serving.config
        await self._session.commit(
            model=self._model,
            new_tokens=self._new_tokens,
            new_messages=self._new_messages,
            block_ids=self._ids[: reusable_blocks(self._progress.tokens, self._model.block_tokens)],
            new_truncations=[],
            durable_wait_ms=config.durable_wait_ms,
            patience_s=config.document_patience_s,
        )

    def _tell(self, waits_for: str = "") -> None:
        progress = self._progress
        self._kept.grow(progress.computed // self._model.block_tokens)
        self.state = pb.DocumentState(
            tokens=progress.document_tokens,
            computed_tokens=progress.computed_tokens,
            tokens_per_s=progress.tokens_per_s,
            left_ms=int(progress.left_s * 1000),
            begun_ms=self.state.begun_ms,
            role=self.state.role,
            model_name=self.state.model_name,
            waits_for=waits_for[:_REASON_CHARS_MAX],
        )
        self._session.document_state = self.state
        self._changed.set()
        self._changed = asyncio.Event()


def _final(error: KVCommonsError) -> bool:
    """Whether trying again is of no use. Memory may be missing for as long as an instance is."""
    if isinstance(error, ContextLengthExceeded):
        return False
    return isinstance(error, (InvalidInput, NotFound, Conflict))
