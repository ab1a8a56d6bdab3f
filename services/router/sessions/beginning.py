"""A session's turn begins: its lease is taken, in the session itself or in a branch of it."""

from __future__ import annotations

import asyncio

from kvcommons.errors import KVCommonsError, QuotaExceeded, SessionNotFound, TurnInProgress
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.branches import branch_for, make_shared
from services.router.sessions.branching import GivenTurn
from services.router.sessions.conversation import check_asks
from services.router.sessions.count import check_room
from services.router.sessions.naming import NamedSession
from services.router.sessions.turn import SessionTurn

_TRIES = 8  # others may begin turns of the same branches


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


async def begin_in_branch(
    serving: Serving,
    tenant: Tenant,
    session: NamedSession,
    turn_id: str,
    given: GivenTurn,
    *,
    block_tokens: int,
) -> SessionTurn | None:
    """Begins the turn of the session, or of the branch of it that a whole history goes on with; where the
    session is shared, of one that has no turn under way.

    None where a whole conversation of a shared session has to do without, for its client never asked for
    one by itself: where there may be no further branch. Raises TurnInProgress, InvalidInput, QuotaExceeded,
    StoreUnavailable."""
    busy: dict[str, TurnInProgress] = {}
    branch = session.id
    try:
        if session.shared:
            await make_shared(serving, tenant, session)
        for _ in range(_TRIES):
            try:
                turn = await begin_turn(serving, tenant, branch, turn_id)
                there = bool(turn.record.version or turn.record.incarnation)
                deleted = session.shared and branch == session.id and not there
                if given.goes_on(turn.record) and not deleted:
                    return turn
                await turn.abandon()
                if deleted:  # and this router did not know
                    await make_shared(serving, tenant, session, known=False)
                    continue
            except TurnInProgress as error:
                # A branch has turns of its own.
                if not session.shared and not given.history:
                    raise
                busy[branch] = error
            if given.history:
                check_asks(given.messages)
            try:
                found = await branch_for(
                    serving,
                    tenant,
                    session.id,
                    given,
                    block_tokens=block_tokens,
                    busy=busy,
                )
            except SessionNotFound:
                if session.id in busy:  # its first turn is under way, and nothing of it is committed
                    raise busy[session.id] from None
                raise
            if found is None:
                return None
            if found in busy:  # a second turn of one branch
                raise busy[found]
            branch = found
    except QuotaExceeded:
        if not (session.shared and given.history):
            raise
        return None
    raise TurnInProgress("other requests have turns of the session at the same time: retry")


async def _abandon_when_begun(beginning: asyncio.Task[SessionTurn]) -> None:
    """The lease of a turn whose client went away before it had begun."""
    try:
        turn = await beginning
    except KVCommonsError:
        return  # there is no lease
    await turn.abandon()
