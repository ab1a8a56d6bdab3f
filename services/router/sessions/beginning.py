"""A session's turn begins: its lease is taken, and it is one of the model that the session was held with."""

from __future__ import annotations

import asyncio

from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.pb.common_pb2 import ModelInfo
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.count import check_room
from services.router.sessions.turn import SessionTurn


async def begin_turn(serving: Serving, tenant: Tenant, session_id: str, turn_id: str) -> SessionTurn:
    """Takes the lease of the session's next turn. Raises TurnInProgress, StoreUnavailable, and QuotaExceeded
    for a turn that would make a session where the tenant may have no more."""
    begin = SessionTurn.begin(
        serving.store,
        serving.copies,
        tenant=tenant.name,
        session_id=session_id,
        turn_id=turn_id,
        owner=serving.instance_id,
        lease_ms=serving.config.lease_ms,
    )
    # Not cancelled with the request: the store may have given the lease already, and nobody would know of
    # it, so that the session would be locked until the lease runs out.
    beginning = asyncio.create_task(begin)
    try:
        turn = await asyncio.shield(beginning)
    except asyncio.CancelledError:
        serving.in_background(_abandon_when_begun(beginning))
        raise
    if not turn.record.version and not turn.record.incarnation:  # it is not there yet
        try:
            await check_room(serving, tenant)
        except BaseException:
            serving.in_background(turn.abandon())
            raise
    return turn


def checked_model(
    serving: Serving, session: SessionTurn, model: ModelInfo, *, asked: str | None
) -> ModelInfo:
    """The model that a session's turn goes on with: the one that the session was held with, where the request
    `asked` for none by name. Raises InvalidInput."""
    name = session.record.model_name
    if not name or name == model.name:
        return model
    if asked is not None:
        raise InvalidInput(
            f"the session was held with the model {name!r}: its tokens are of no use to {model.name!r}; "
            "begin another session",
            param="model",
        )
    return serving.fleet.model(name)


async def _abandon_when_begun(beginning: asyncio.Task[SessionTurn]) -> None:
    """The lease of a turn whose client went away before it had begun."""
    try:
        turn = await beginning
    except KVCommonsError:
        return  # there is no lease
    await turn.abandon()
