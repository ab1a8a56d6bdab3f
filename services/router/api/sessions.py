"""/v1/sessions: create, list, get, fork, delete"""

from __future__ import annotations

import secrets

from aiohttp import web

from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.router.api.body import read_body
from services.router.api.query import limit_of
from services.router.api.schemas.requests import SessionCreate, SessionFork, check_session_id
from services.router.api.shapes import Json, message_body
from services.router.http.middleware import SERVING, TENANT
from services.router.serving import Serving
from services.router.sessions.branches import branch_at, branches_of, delete_with_branches, whole_records
from services.router.sessions.conversation import Message
from services.router.sessions.count import check_room
from services.router.sessions.naming import agent_of
from services.router.turn.tools import kept_tools

_PATIENCE_S = 5.0  # with a store that restarts
_MATCH_S = 1.0
_CREATED = 201
_PREVIEW_CHARS = 80


async def create_session(request: web.Request) -> web.Response:
    body = await read_body(request, SessionCreate, may_be_empty=True)
    await check_room(request.app[SERVING], request[TENANT])
    record = await request.app[SERVING].store.create(
        request[TENANT].name, body.id or _new_id(), body.ttl_s or 0, patience_s=_PATIENCE_S
    )
    return web.json_response(session_body(record), status=_CREATED)


async def list_sessions(request: web.Request) -> web.Response:
    limit = limit_of(request)
    unknown = set(request.query) - {"limit", "after"}
    if unknown:
        name = min(unknown)
        raise InvalidInput(f"unknown query parameter {name[:80]!r}; known: limit, after", param=name[:80])
    wanted = pb.ListSessionsRequest(
        tenant=request[TENANT].name, after=request.query.get("after", ""), limit=limit
    )
    reply = await request.app[SERVING].store.list(wanted, patience_s=_PATIENCE_S)
    data = [session_body(record) for record in reply.sessions]
    return web.json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": reply.more,
        }
    )


async def get_session(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    record = await serving.store.get(
        request[TENANT].name, session_id_in_path(request), patience_s=_PATIENCE_S
    )
    body = session_body(record)
    body["messages"] = [message_body(Message.of(message)) for message in record.messages]
    body["tools"] = list(kept_tools(record.tools).definitions)
    body["tokens"] = len(record.tokens)
    body["token_ids"] = record.tokens[:]
    body["dropped_tokens"] = record.dropped_tokens
    body["blocks"] = len(record.block_ids)
    body["tiers"] = await _tiers(serving, record)
    return web.json_response(body)


async def fork_session(request: web.Request) -> web.Response:
    body = await read_body(request, SessionFork, may_be_empty=True)
    serving, tenant, session_id = request.app[SERVING], request[TENANT], session_id_in_path(request)
    if body.messages is None:
        await check_room(serving, tenant)
        record = await serving.store.fork(
            tenant.name, session_id, body.id or _new_id(), patience_s=_PATIENCE_S
        )
    else:
        record = await branch_at(serving, tenant, session_id, body.messages, new_id=body.id)
    return web.json_response(session_body(record), status=_CREATED)


async def list_branches(request: web.Request) -> web.Response:
    serving, tenant, session_id = request.app[SERVING], request[TENANT], session_id_in_path(request)
    heads = await branches_of(serving, tenant, session_id)
    if not heads:
        await serving.store.get(tenant.name, session_id, patience_s=_PATIENCE_S)  # it is there
    records = await whole_records(serving, tenant, [head.session_id for head in heads])
    data = [session_body(record) | {"preview": _preview(record)} for record in records]
    return web.json_response({"object": "list", "data": data})


async def delete_session(request: web.Request) -> web.Response:
    session_id = session_id_in_path(request)
    await delete_with_branches(request.app[SERVING], request[TENANT], session_id)
    return web.json_response({"id": session_id, "object": "session.deleted", "deleted": True})


def session_body(record: pb.SessionRecord) -> Json:
    return {
        "id": record.session_id,
        "object": "session",
        "created_at": record.created_ms // 1000,
        "last_used_at": record.last_used_ms // 1000,
        "ttl_s": record.ttl_s or None,
        "version": record.version,
        "model": record.model_name or None,
        "parent": record.parent or None,
        "agent": agent_of(record.session_id, record.parent),
        "cut": record.parent_messages if record.HasField("parent_messages") else None,
    }


def _preview(record: pb.SessionRecord) -> str:
    behind = record.messages[record.parent_messages :]
    return behind[0].content[:_PREVIEW_CHARS] if behind else ""


async def _tiers(serving: Serving, record: pb.SessionRecord) -> Json | None:
    """How many of the session's full blocks lie in which tier; None while the store cannot say. Whoever
    looks at a session does not use it: what is evicted next stays as it was."""
    store = serving.fleet.homed(session_key(record.tenant, record.root)).store()
    if store is None:
        return None
    wanted = pb.MatchRequest(model=record.model, block_ids=record.block_ids, peek=True)
    try:
        reply = await serving.fleet.blocks(store).Match(wanted, timeout=_MATCH_S)
    except KVCommonsError:
        return None
    tiers = list(reply.tiers)
    dram, disk = tiers.count(pb.TIER_DRAM), tiers.count(pb.TIER_DISK)
    return {"dram": dram, "disk": disk, "absent": len(record.block_ids) - dram - disk}


def session_id_in_path(request: web.Request) -> str:
    """Raises InvalidInput."""
    try:
        return check_session_id(request.match_info["id"])
    except ValueError as error:
        raise InvalidInput(str(error), param="id") from None


def _new_id() -> str:
    return f"sess-{secrets.token_hex(12)}"
