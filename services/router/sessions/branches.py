"""A session's branches at the store, and its agents' sessions: sessions of their own, whose ids are the
session's with a number or with the agent's id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence

from kvcommons.branch_ids import branch_number, branch_prefix, next_branch, root_of_branch
from kvcommons.errors import AlreadyExists, InvalidInput, SessionNotFound
from kvcommons.pb import kvstore_pb2 as pb
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.branching import (
    BranchPoint,
    GivenTurn,
    branch_point,
)
from services.router.sessions.count import check_room
from services.router.sessions.model import model_of_session
from services.router.sessions.naming import NamedSession, agents_prefix

BRANCHES_MAX = 100  # of a session
_COMPARED_MAX = 16  # of them, those used last
_PAGE = 1000  # the most that a kvstore lists at once
_READS_MAX = 4  # of records at once
_TRIES = 8  # others may take the same number
_PATIENCE_S = 5.0


async def branches_of(serving: Serving, tenant: Tenant, session_id: str) -> list[pb.SessionRecord]:
    """Their heads, in the order of their numbers. Raises StoreUnavailable."""
    wanted = pb.ListSessionsRequest(
        tenant=tenant.name, after=branch_prefix(session_id), limit=BRANCHES_MAX + 1
    )
    reply = await serving.store.list(wanted, patience_s=_PATIENCE_S)
    numbered = [(branch_number(session_id, one.session_id), one) for one in reply.sessions]
    found = [(number, one) for number, one in numbered if number is not None and one.parent]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


async def whole_records(
    serving: Serving, tenant: Tenant, session_ids: Sequence[str]
) -> list[pb.SessionRecord]:
    """Of those that are there. Raises StoreUnavailable."""
    reads = asyncio.Semaphore(_READS_MAX)

    async def read(session_id: str) -> pb.SessionRecord | None:
        async with reads:
            try:
                return await serving.store.get(tenant.name, session_id, patience_s=_PATIENCE_S)
            except SessionNotFound:
                return None

    found = await asyncio.gather(*map(read, session_ids))
    return [record for record in found if record is not None]


async def branch_for(
    serving: Serving,
    tenant: Tenant,
    session_id: str,
    given: GivenTurn,
    *,
    block_tokens: int,
    busy: Collection[str] = (),
) -> str | None:
    """The id of the session's branch that a turn goes on with, or of the session itself; of a new branch
    where a history departs from all, or where those that it goes on with are `busy` and the session is
    shared, or nothing but a turn that is under way is theirs yet. What is no history goes on with all that
    the session has.

    None where a history of a shared session has to do without: there may be no further branch, or it would
    share nothing with a later request. Raises SessionNotFound, InvalidInput where there are too many
    branches, QuotaExceeded, StoreUnavailable."""
    of = root_of_branch(session_id)
    heads = await branches_of(serving, tenant, of)
    latest = sorted(heads, key=lambda head: -head.last_used_ms)[:_COMPARED_MAX]
    compared = dict.fromkeys([session_id, of, *(one.session_id for one in latest)])
    candidates = await whole_records(serving, tenant, list(compared))
    if not candidates:
        raise SessionNotFound(f"there is no session {session_id[:80]!r} any more", param="session_id")
    own = candidates[0]
    if given.history or given.begins_anew(own):
        of_use = [one for one in candidates if given.is_of_use(one)]
        free = [one for one in of_use if one.session_id not in busy or not (given.shared or _as_cut(one))]
        if free:
            point = branch_point(given.messages, given.tools, free)
            if point.whole:
                return point.session_id
        point = BranchPoint(session_id=own.session_id, messages=0, whole=False)
        if of_use:
            point = branch_point(given.messages, given.tools, of_use)
    else:
        point = BranchPoint(session_id=own.session_id, messages=len(own.messages), whole=True)
    if (
        given.shared
        and given.history
        and (len(heads) >= BRANCHES_MAX or (given.head_changes and not point.messages))
    ):
        return None
    branch = await _fork(
        serving, tenant, of, heads, point.session_id, point.messages, block_tokens=block_tokens
    )
    return branch.session_id


def _as_cut(record: pb.SessionRecord) -> bool:
    """Whether a branch has only what it was forked with: the next turn is what it was forked for."""
    return record.HasField("parent_messages") and len(record.messages) == record.parent_messages


async def make_shared(serving: Serving, tenant: Tenant, session: NamedSession, *, known: bool = True) -> None:
    """Makes a shared session that is not there yet, before its first turn: turns that come at once branch
    from what is there. Where an agent's blocks lie, and for how long its session is kept, is as its parent
    has it, and nothing else. `known`: one of which this router has a copy is there. Raises QuotaExceeded,
    StoreUnavailable."""
    if known and serving.copies.get(tenant.name, session.id).last_turn_id:
        return
    try:
        await serving.store.get(tenant.name, session.id, patience_s=_PATIENCE_S)
        return
    except SessionNotFound:
        await check_room(serving, tenant)
    if session.parent is None:
        await _make(serving, tenant, session.id)
        return
    for _ in range(_TRIES):
        try:
            await serving.store.fork(
                tenant.name, session.parent, session.id, messages=0, patience_s=_PATIENCE_S
            )
            return
        except AlreadyExists:
            return
        except SessionNotFound:
            await _make(serving, tenant, session.parent)


async def _make(serving: Serving, tenant: Tenant, session_id: str) -> None:
    """Nothing happens where it is there already, or its first turn is under way."""
    with contextlib.suppress(AlreadyExists):
        await serving.store.create(tenant.name, session_id, 0, patience_s=_PATIENCE_S)


async def branch_at(
    serving: Serving, tenant: Tenant, session_id: str, messages: int, *, new_id: str | None
) -> pb.SessionRecord:
    """A fork of the session behind its first `messages`: a branch of it, where it gets no id of its own.
    Raises SessionNotFound, AlreadyExists, InvalidInput, StoreUnavailable."""
    record = await serving.store.get(tenant.name, session_id, patience_s=_PATIENCE_S)
    model = model_of_session(serving.fleet, record)
    if new_id is not None:
        await check_room(serving, tenant)
        return await serving.store.fork(
            tenant.name,
            session_id,
            new_id,
            messages=messages,
            block_tokens=model.block_tokens,
            patience_s=_PATIENCE_S,
        )
    of = root_of_branch(session_id)
    heads = await branches_of(serving, tenant, of)
    return await _fork(serving, tenant, of, heads, session_id, messages, block_tokens=model.block_tokens)


async def _fork(
    serving: Serving,
    tenant: Tenant,
    session_id: str,
    heads: Sequence[pb.SessionRecord],
    parent: str,
    messages: int,
    *,
    block_tokens: int,
) -> pb.SessionRecord:
    """A further branch of the session, cut from `parent`, which is the session or one of its branches."""
    if len(heads) >= BRANCHES_MAX:
        raise InvalidInput(
            f"the session has {BRANCHES_MAX} branches, and no more: delete some, or begin another session",
            param="session_id",
        )
    await check_room(serving, tenant)
    ids = [one.session_id for one in heads]
    for _ in range(_TRIES):
        ids.append(next_branch(session_id, ids))
        try:
            return await serving.store.fork(
                tenant.name,
                parent,
                ids[-1],
                messages=messages,
                block_tokens=block_tokens,
                patience_s=_PATIENCE_S,
            )
        except AlreadyExists:
            continue
    raise AlreadyExists("other requests branch the session at the same time: retry", param="session_id")


async def delete_with_branches(serving: Serving, tenant: Tenant, session_id: str) -> None:
    """The branches first, and the sessions of its agents, so that what fails can be done again. Raises
    SessionNotFound."""
    for one in await _descendants(serving, tenant, session_id):
        try:
            await serving.store.delete(tenant.name, one.session_id, patience_s=_PATIENCE_S)
        except SessionNotFound:
            continue
    await serving.store.delete(tenant.name, session_id, patience_s=_PATIENCE_S)


async def _descendants(serving: Serving, tenant: Tenant, session_id: str) -> list[pb.SessionRecord]:
    """Heads of its branches, its agents' sessions, and the branches of these."""
    found = {session_id: None} | {
        one.session_id: one for one in await branches_of(serving, tenant, session_id)
    }
    after, prefix = agents_prefix(session_id), agents_prefix(session_id)
    while True:
        wanted = pb.ListSessionsRequest(tenant=tenant.name, after=after, limit=_PAGE)
        reply = await serving.store.list(wanted, patience_s=_PATIENCE_S)
        for one in reply.sessions:
            if one.session_id.startswith(prefix) and one.parent in found:
                found[one.session_id] = one
        if not reply.more or not reply.sessions[-1].session_id.startswith(prefix):
            return [one for one in found.values() if one is not None]
        after = reply.sessions[-1].session_id
