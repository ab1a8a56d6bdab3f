"""A session's branches at the store: sessions of their own, whose ids are the session's with a number."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvcommons.errors import AlreadyExists, InvalidInput, SessionNotFound
from kvcommons.pb import kvstore_pb2 as pb
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.branching import (
    branch_number,
    branch_point,
    branch_prefix,
    next_branch,
    root_of_branch,
)
from services.router.sessions.conversation import Message
from services.router.sessions.count import check_room

BRANCHES_MAX = 100  # of a session
_COMPARED_MAX = 16  # of them, those used last
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
    given: Sequence[Message],
    tools: str | None,
    *,
    block_tokens: int,
) -> str:
    """The id of the session's branch that a history goes on with, or of the session itself; a new branch
    where it departs from all. Raises SessionNotFound, InvalidInput where there are too many,
    StoreUnavailable."""
    of = root_of_branch(session_id)
    heads = await branches_of(serving, tenant, of)
    latest = sorted(heads, key=lambda head: -head.last_used_ms)[:_COMPARED_MAX]
    compared = dict.fromkeys([session_id, of, *(one.session_id for one in latest)])
    candidates = await whole_records(serving, tenant, list(compared))
    if not candidates:
        raise SessionNotFound(f"there is no session {session_id[:80]!r} any more", param="session_id")
    point = branch_point(given, tools, candidates)
    if point.whole:
        return point.session_id
    branch = await _fork(
        serving, tenant, of, heads, point.session_id, point.messages, block_tokens=block_tokens
    )
    return branch.session_id


async def branch_at(
    serving: Serving, tenant: Tenant, session_id: str, messages: int, *, new_id: str | None
) -> pb.SessionRecord:
    """A fork of the session behind its first `messages`: a branch of it, where it gets no id of its own.
    Raises SessionNotFound, AlreadyExists, InvalidInput, StoreUnavailable."""
    record = await serving.store.get(tenant.name, session_id, patience_s=_PATIENCE_S)
    model = serving.fleet.model(record.model_name or None)
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
    """The branches first, so that what fails can be done again. Raises SessionNotFound."""
    for branch in await branches_of(serving, tenant, session_id):
        try:
            await serving.store.delete(tenant.name, branch.session_id, patience_s=_PATIENCE_S)
        except SessionNotFound:
            continue
    await serving.store.delete(tenant.name, session_id, patience_s=_PATIENCE_S)
