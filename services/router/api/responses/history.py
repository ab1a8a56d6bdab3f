"""What a response goes on with: a session as it stands, or the messages of one from which it branches."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from kvcommons.errors import InvalidInput, NotFound, SessionNotFound
from kvcommons.pb import kvstore_pb2 as pb
from services.router.api.responses.ids import StoredResponse
from services.router.api.responses.requests import InputTokensRequest
from services.router.http.tenants import Tenant
from services.router.serving import Serving
from services.router.sessions.conversation import Message
from services.router.turn.idempotency import RequestKey
from services.router.turn.volatile import stable

_PATIENCE_S = 5.0  # with a store that restarts
_ID_CHARS = 24
_OWN = "resp-"  # ids of sessions that responses made begin with it


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`messages` come before those of the request, instructions first. `session_id`: the session that holds
    them already; None where none does. `held`: how many it holds; None where that does not matter.
    `instructions`: those of the messages that are."""

    messages: tuple[Message, ...] = ()
    instructions: tuple[Message, ...] = ()
    session_id: str | None = None
    held: int | None = None
    instructed: bool = False
    of_session: str | None = None  # that the request names, whether it goes on in that or not


async def history_of(serving: Serving, tenant: Tenant, body: InputTokensRequest) -> History:
    """Raises NotFound, InvalidInput, StoreUnavailable."""
    first = (Message(role="system", content=body.instructions),) if body.instructions else ()
    kept = stable(body.instructions or "", serving.config.volatile_lines)
    kept_first = (Message(role="system", content=kept),) if kept else ()
    if body.conversation_id is not None:
        await _check_instructions(serving, tenant, body.conversation_id, kept_first)
        return History(messages=first, session_id=body.conversation_id, of_session=body.conversation_id)
    if body.previous_response_id is None:
        return History(messages=first, instructed=bool(kept_first))
    previous, record = await stored_response(
        serving, tenant, body.previous_response_id, param="previous_response_id"
    )
    stored = tuple(map(Message.of, record.messages))
    instructions, said = stored[: previous.instructed], stored[previous.instructed : previous.messages]
    own = previous.session_id.startswith(_OWN)  # no conversation, which grows by its own responses only
    if own and previous.messages == len(stored) and instructions == kept_first:
        return History(
            messages=(*first, *said),
            instructions=first,
            session_id=previous.session_id,
            held=previous.messages,
            instructed=previous.instructed,
            of_session=previous.session_id,
        )
    return History(messages=(*first, *said), instructed=bool(kept_first), of_session=previous.session_id)


async def stored_response(
    serving: Serving, tenant: Tenant, id: str, *, param: str
) -> tuple[StoredResponse, pb.SessionRecord]:
    """The response, and the record of its session. Raises NotFound, StoreUnavailable."""
    named = StoredResponse.named(id, param=param)
    try:
        record = await serving.store.get(tenant.name, named.session_id, patience_s=_PATIENCE_S)
    except SessionNotFound:
        record = pb.SessionRecord()
    there = len(record.messages) >= named.messages
    if not there or record.messages[named.messages - 1].role != "assistant":
        raise NotFound(f"no response {id[:80]!r} is stored here, or no longer", param=param)
    return named, record


def new_session_id(key: RequestKey | None) -> str:
    """Of a response that goes on with none. With a `key` it is the same each time that the request comes:
    what it was answered is found there."""
    return _OWN + (secrets.token_hex(12) if key is None else key.key.hex()[:_ID_CHARS])


def new_conversation_id() -> str:
    return f"conv_{secrets.token_hex(12)}"


async def _check_instructions(
    serving: Serving, tenant: Tenant, conversation_id: str, first: tuple[Message, ...]
) -> None:
    """A conversation's head is computed once. Raises InvalidInput for instructions that are not those it
    began with."""
    try:
        record = await serving.store.get(tenant.name, conversation_id, patience_s=_PATIENCE_S)
    except SessionNotFound:
        raise NotFound(
            f"there is no conversation {conversation_id[:80]!r}: POST /v1/conversations makes one",
            param="conversation",
        ) from None
    if first and record.messages and Message.of(record.messages[0]) != first[0]:
        raise InvalidInput(
            "a conversation keeps the instructions of its first response: leave them out, repeat them, or go "
            "on with previous_response_id, which takes others",
            param="instructions",
        )
