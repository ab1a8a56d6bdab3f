"""How a document comes to a router: by a request, or from one that is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets

from kvcommons.errors import KVCommonsError, TurnInProgress
from kvcommons.pb import kvstore_pb2 as pb
from services.router.documents.document import Document
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.beginning import begin_turn
from services.router.sessions.conversation import Message
from services.router.sessions.model import checked_model
from services.router.turn.tools import kept_tools

log = logging.getLogger(__name__)


async def begin_document(
    serving: Serving,
    tenant: Tenant,
    session_id: str,
    *,
    content: str,
    role: str | None,
    model_name: str | None,
) -> Document:
    """Begins the session's turn. What can be wrong with the document is found before it returns, and the
    session is as it was then. Raises TurnInProgress, Overloaded, InvalidInput, ContextLengthExceeded."""
    serving.quotas.admit(tenant.name, serving.clock())
    serving.documents.check_room()
    model = serving.fleet.model(model_name)
    turn_id = secrets.token_hex(12)
    session = await begin_turn(serving, tenant, session_id, turn_id)
    try:
        model = checked_model(serving.fleet, session.record, model, asked=model_name)
        new, messages = await serving.text.document(
            session.messages,
            session.tokens,
            content,
            role,
            tools=kept_tools(session.record.tools),
            window=model.context_window,
        )
        document = await asyncio.to_thread(  # to hash all of its blocks takes a second where it is long
            Document,
            serving,
            session,
            tenant=tenant,
            session_id=session_id,
            turn_id=turn_id,
            model=model,
            new_tokens=new,
            new_messages=messages,
        )
        document.check()
        await document.keep()
        serving.documents.check_room()  # others have begun meanwhile
    except Exception:
        await session.abandon()  # before the client is told: it may try again at once
        raise
    except BaseException:
        serving.in_background(session.abandon())
        raise
    now_s = serving.clock()
    reservation = serving.quotas.reserve(tenant.name, len(new), now_s)
    reservation.settle(prompt=len(new), cached=0, completion=0, now_s=now_s)
    serving.documents.begin((tenant.name, session_id), document)
    return document


async def take_over_documents(serving: Serving) -> None:
    """Goes on with documents whose router is gone, until it is cancelled."""
    while True:
        await asyncio.sleep(serving.config.lease_ms / 3000)
        try:
            found = await serving.store.documents()
        except KVCommonsError as error:
            log.debug("the store did not say which documents are on their way: %s", error)
            continue
        for one in found:
            key = one.tenant, one.session_id
            if one.orphaned and not serving.documents.full and serving.documents.running(key) is None:
                try:
                    await _take_over(serving, one)
                except TurnInProgress:
                    pass  # another router was faster
                except KVCommonsError as error:
                    log.warning("a document could not be gone on with, which is tried again: %s", error)
                except Exception:
                    log.exception("a document could not be gone on with")


async def _take_over(serving: Serving, one: pb.DocumentTurn) -> None:
    tenant = serving.tenants.named(one.tenant)
    if tenant is None:  # it waits for its tenant, or for whoever ends it
        return
    model = serving.fleet.model(one.state.model_name)
    session = await begin_turn(serving, tenant, one.session_id, one.turn_id)
    kept = session.document
    if kept is None:  # it has ended meanwhile
        await session.abandon()
        return
    try:
        document = await asyncio.to_thread(
            Document,
            serving,
            session,
            tenant=tenant,
            session_id=one.session_id,
            turn_id=one.turn_id,
            model=model,
            new_tokens=kept.tokens[:],
            new_messages=[Message.of(one) for one in kept.messages],
        )
    except BaseException:
        await session.leave()
        raise
    log.info("a document is gone on with", extra={"session": one.session_id, "turn": one.turn_id})
    serving.documents.begin((tenant.name, one.session_id), document)
