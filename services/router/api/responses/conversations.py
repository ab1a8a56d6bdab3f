"""/v1/conversations: sessions under OpenAI's name"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvcommons.errors import InvalidInput, NotFound, SessionNotFound
from kvcommons.pb import kvstore_pb2 as pb
from services.router.api.body import read_body
from services.router.api.query import limit_of
from services.router.api.responses.history import new_conversation_id
from services.router.api.responses.items import items_of
from services.router.api.responses.requests import ConversationCreate
from services.router.api.sessions import session_id_in_path
from services.router.http.middleware import SERVING, TENANT
from services.router.sessions.branches import delete_with_branches
from services.router.sessions.conversation import Message
from services.router.sessions.count import check_room

Json = dict[str, object]

_PATIENCE_S = 5.0


async def create_conversation(request: web.Request) -> web.Response:
    body = await read_body(request, ConversationCreate, may_be_empty=True)
    await check_room(request.app[SERVING], request[TENANT])
    record = await request.app[SERVING].store.create(
        request[TENANT].name, new_conversation_id(), 0, patience_s=_PATIENCE_S
    )
    return web.json_response(_conversation(record) | {"metadata": body.metadata or {}})


async def get_conversation(request: web.Request) -> web.Response:
    return web.json_response(_conversation(await _record(request)))


async def delete_conversation(request: web.Request) -> web.Response:
    id = session_id_in_path(request)
    try:
        await delete_with_branches(request.app[SERVING], request[TENANT], id)
    except SessionNotFound:
        raise _missing(id) from None
    return web.json_response({"id": id, "object": "conversation.deleted", "deleted": True})


async def list_items(request: web.Request) -> web.Response:
    """Newest first, as OpenAI does, or with order=asc."""
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput("order is asc or desc", param="order")
    limit = limit_of(request)
    items = await _items(request)
    if order == "desc":
        items.reverse()
    if after := request.query.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidInput(f"the conversation has no item {after[:80]!r}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return web.json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(items) > limit,
        }
    )


async def get_item(request: web.Request) -> web.Response:
    id = request.match_info["item"]
    for item in await _items(request):
        if item["id"] == id:
            return web.json_response(item)
    raise NotFound(f"the conversation has no item {id[:80]!r}: GET its items names them", param="item")


async def _items(request: web.Request) -> list[dict[str, Any]]:
    record = await _record(request)
    return items_of(record.session_id, tuple(map(Message.of, record.messages)))


async def _record(request: web.Request) -> pb.SessionRecord:
    id = session_id_in_path(request)
    try:
        return await request.app[SERVING].store.get(request[TENANT].name, id, patience_s=_PATIENCE_S)
    except SessionNotFound:
        raise _missing(id) from None


def _conversation(record: pb.SessionRecord) -> Json:
    return {
        "id": record.session_id,
        "object": "conversation",
        "created_at": record.created_ms // 1000,
        "metadata": {},
    }


def _missing(id: str) -> NotFound:
    return NotFound(f"there is no conversation {id[:80]!r}: POST /v1/conversations makes one", param="id")
