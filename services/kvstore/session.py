"""Rules of a session record and of its turn lease. Pure: the time is passed in, nothing is read or written.

Every implementation of `Records` keeps these. A rule needs a record's *head* only, which is the record
without what its turns added, so that nobody has to read a long session in order to add a turn to it.

One turn at a time: `begin` takes the lease, `commit` gives it back with the turn's tokens, `abandon` without.
Every lease has a fencing number higher than all before it, so that an owner who lost his lease cannot commit
over the next.

A turn may be a *document*, which takes long to compute: what it is going to add is kept beside its lease, and
the session is its own until it is committed or abandoned. Where the lease runs out, another owner takes the
same turn over, under a number of his own.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from kvcommons.branch_ids import branch_prefix, root_of_branch
from kvcommons.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    InvalidInput,
    SessionNotFound,
    TurnInProgress,
    VersionConflict,
)
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.folder import UnknownFormat
from services.kvstore.turn_lease import LEASE_MS_MAX, TurnLease, has_ended, under_way

RECORD_FORMAT = 2
_FORMATS = (1, RECORD_FORMAT)  # that are read; 1 knew neither tools nor calls
LIST_MAX = 1000
NAME_BYTES_MAX = 512
INCARNATION_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBegin:
    """A turn that wants its session's lease. `known_turn_id`: its caller has the record as that turn left
    it."""

    turn_id: str
    owner: str
    lease_ms: int
    known_turn_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A turn that has its session's lease. `record` is the whole session; with `after_known` its head, and of
    tokens, messages, block ids, truncations and tools only what turns after the known one added. `document`:
    which the turn is going to add."""

    record: pb.SessionRecord
    lease: TurnLease
    after_known: bool = False
    document: pb.Document | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRenewal:
    """A turn that keeps its session's lease. `document_state`: it is a document, and so far; `document`: what
    it is going to add, which is kept from now on."""

    turn_id: str
    fencing: int
    lease_ms: int
    document_state: pb.DocumentState | None = None
    document: pb.Document | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCommit:
    """What a turn adds to its session. Of the full blocks of the session's context before the turn, the first
    `kept_blocks` still begin it; `block_ids` are of those that follow on them."""

    turn_id: str
    fencing: int
    expected_version: int
    model: bytes
    model_name: str
    new_tokens: Sequence[int]
    new_messages: Sequence[pb.Message]
    kept_blocks: int = 0
    block_ids: Sequence[bytes]
    new_truncations: Sequence[pb.TruncationRecord] = ()
    tools: str = ""  # that the session began with, in its first turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A turn in its session. `new` is False where it had been committed before."""

    version: int
    new: bool


def new_incarnation() -> bytes:
    return uuid.uuid4().bytes


def check_name(value: str, param: str) -> None:
    """Raises InvalidInput for an id that is empty, overlong, or has a zero byte."""
    if not value:
        raise InvalidInput(f"{param} is empty", param=param)
    if "\0" in value:
        raise InvalidInput(f"{param} contains a zero byte", param=param)
    if len(value.encode()) > NAME_BYTES_MAX:
        raise InvalidInput(f"{param} has more than {NAME_BYTES_MAX} bytes", param=param)


def checked_key(tenant: str, session_id: str) -> bytes:
    """The session's. Raises InvalidInput."""
    check_name(tenant, "tenant")
    check_name(session_id, "session_id")
    return session_key(tenant, session_id)


def check_incarnation(value: bytes) -> None:
    """Raises InvalidInput."""
    if len(value) not in (0, INCARNATION_BYTES):
        raise InvalidInput(f"an incarnation has {INCARNATION_BYTES} bytes", param="incarnation")


def check_limit(limit: int) -> None:
    """Of sessions in one page. Raises InvalidInput."""
    if not 0 < limit <= LIST_MAX:
        raise InvalidInput(f"limit must be between 1 and {LIST_MAX}", param="limit")


def not_found(session_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {session_id!r}", param="session_id")


def session_exists(session_id: str) -> AlreadyExists:
    return AlreadyExists(f"a session {session_id!r} exists already", param="session_id")


def new_record(
    tenant: str, session_id: str, ttl_s: int, now_ms: int, incarnation: bytes = b""
) -> pb.SessionRecord:
    """A session without a turn."""
    return pb.SessionRecord(
        format=RECORD_FORMAT,
        tenant=tenant,
        session_id=session_id,
        root=session_id,
        ttl_s=ttl_s,
        created_ms=now_ms,
        last_used_ms=now_ms,
        incarnation=incarnation,
    )


def decode_record(value: bytes) -> pb.SessionRecord:
    """Raises UnknownFormat for a record that another version wrote, DataLoss for bytes that are none."""
    try:
        record = pb.SessionRecord.FromString(value)
    except DecodeError:
        raise DataLoss(
            "the session's record is damaged: restore it from a backup, or DELETE the session"
        ) from None
    if record.format not in _FORMATS:
        raise UnknownFormat(
            f"session record of format {record.format}; this version of kvcommons reads "
            + " and ".join(map(str, _FORMATS))
        )
    return record


_OF_TURNS = ("tokens", "messages", "block_ids", "truncations", "tools")


def head_of(record: pb.SessionRecord) -> pb.SessionRecord:
    """The record without what its turns added."""
    # Not copied and cut down: that takes milliseconds where the session is long.
    fields = {field.name: value for field, value in record.ListFields() if field.name not in _OF_TURNS}
    return pb.SessionRecord(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a fork leaves its parent: behind the first `messages`, where a turn ended; 0: at its
    beginning."""

    messages: int
    block_tokens: int


def fork_of(
    record: pb.SessionRecord, new_id: str, now_ms: int, incarnation: bytes, cut: Cut | None = None
) -> pb.SessionRecord:
    """A session that goes on from where this one is now, or was at a `cut`, for which the whole record is
    needed. Raises InvalidInput where no turn ended there."""
    fork = pb.SessionRecord()
    fork.CopyFrom(record)
    fork.ClearField("parent_messages")
    if cut is not None:
        _cut(fork, cut)
        fork.parent_messages = cut.messages
    fork.session_id = new_id
    fork.parent = record.session_id
    fork.created_ms = fork.last_used_ms = now_ms
    fork.last_turn_id = ""
    fork.incarnation = incarnation
    return fork


def _cut(record: pb.SessionRecord, cut: Cut) -> None:
    """Takes away all that came behind the cut."""
    if cut.messages == 0:
        empty = new_record(record.tenant, record.session_id, record.ttl_s, record.created_ms)
        empty.root = record.root
        record.CopyFrom(empty)
        return
    if not 0 < cut.messages <= len(record.messages) or not record.messages[cut.messages - 1].end_token:
        raise InvalidInput(
            f"no turn of the session {record.session_id!r} ends behind its first {cut.messages} messages: "
            "leave messages out, or count to the end of an answer",
            param="messages",
        )
    if not cut.block_tokens:
        raise InvalidInput("a cut needs the number of tokens in a block", param="block_tokens")
    tokens = record.messages[cut.messages - 1].end_token
    del record.messages[cut.messages :]
    del record.tokens[tokens:]
    kept = 0  # truncations before the cut
    while kept < len(record.truncations) and 0 < record.truncations[kept].at_token < tokens:
        kept += 1
    if kept < len(record.truncations):
        # Its blocks are those of a context that this one never had.
        del record.truncations[kept:]
        del record.block_ids[:]
    record.dropped_tokens = sum(one.dropped_tokens for one in record.truncations)
    del record.block_ids[(tokens - record.dropped_tokens) // cut.block_tokens :]


def expires_ms(record: pb.SessionRecord, default_ttl_s: int) -> int | None:
    """When nobody may use the session any more; None: never."""
    ttl_s = record.ttl_s or default_ttl_s
    return record.last_used_ms + ttl_s * 1000 if ttl_s else None


def in_use(record: pb.SessionRecord, default_ttl_s: int, now_ms: int) -> bool:
    """Whether it was used within its time to live. A session and its branches live as long as one of them."""
    limit_ms = expires_ms(record, default_ttl_s)
    return limit_ms is None or limit_ms > now_ms


def family_keys(record: pb.SessionRecord) -> tuple[bytes, bytes]:
    """The key of the session that a record is of, or of a branch of, and what the keys of its branches begin
    with."""
    root = _root_of(record)
    return session_key(record.tenant, root), session_key(record.tenant, branch_prefix(root))


def are_relatives(one: pb.SessionRecord, other: pb.SessionRecord) -> bool:
    """Whether two of a tenant's are a session and its branch, or branches of one."""
    return one.session_id != other.session_id and _root_of(one) == _root_of(other)


def _root_of(record: pb.SessionRecord) -> str:
    return root_of_branch(record.session_id) if record.parent else record.session_id


def begin(lease: TurnLease | None, turn: TurnBegin, *, next_fencing: int, now_ms: int) -> TurnLease:
    """The lease of a new turn. The same turn asking again gets its own; a document's gets a new number, for
    it may be another router that goes on, and only once its lease ran out. Raises TurnInProgress."""
    check_name(turn.turn_id, "turn_id")
    check_name(turn.owner, "owner")
    if turn.known_turn_id:
        check_name(turn.known_turn_id, "known_turn_id")
    until_ms = now_ms + _checked(turn.lease_ms)
    if lease is not None and lease.turn_id == turn.turn_id:
        if lease.document is None:
            return replace(lease, owner=turn.owner, expires_ms=until_ms)
        if lease.owner == turn.owner or has_ended(lease, now_ms):
            return replace(lease, owner=turn.owner, fencing=next_fencing, expires_ms=until_ms)
    if lease is not None and lease.document is not None:
        raise _document_in_progress(lease.document)
    if lease is not None and under_way(lease, now_ms):
        raise TurnInProgress(
            "another turn of this session is under way: wait for its answer, or fork the session",
            retry_after_ms=min(1000, lease.expires_ms - now_ms),
        )
    return TurnLease(turn_id=turn.turn_id, owner=turn.owner, fencing=next_fencing, expires_ms=until_ms)


def renew(lease: TurnLease | None, turn: TurnRenewal, *, exists: bool, now_ms: int) -> TurnLease:
    """A longer lease, even if it ran out meanwhile and nobody took it. Raises Conflict, SessionNotFound, and
    InvalidInput for a document without its state."""
    if turn.document is not None and turn.document_state is None:
        raise InvalidInput("a document comes with its state", param="document_state")
    held = _held(lease, turn.turn_id, turn.fencing, exists=exists)
    state = turn.document_state if turn.document_state is not None else held.document
    if held.document is None and turn.document is None and state is not None:
        raise InvalidInput("a turn's document is kept before its state is told", param="document")
    return replace(held, expires_ms=now_ms + _checked(turn.lease_ms), document=state)


def commit(
    record: pb.SessionRecord,
    lease: TurnLease | None,
    turn: TurnCommit,
    now_ms: int,
    *,
    exists: bool,
    blocks: int,
) -> pb.SessionRecord | None:
    """The head after the turn; None if the turn is the one committed last. `exists`: the record, or its head,
    is stored; `blocks`: how many block identities it has.

    Raises VersionConflict where the session moved on, Conflict where the lease went to another turn,
    SessionNotFound where the session was deleted meanwhile, InvalidInput for a turn that keeps more blocks
    than there are, and for tools that are not the first turn's.
    """
    check_name(turn.turn_id, "turn_id")
    if record.last_turn_id == turn.turn_id:
        return None
    if record.version != turn.expected_version and not _holds(lease, turn.turn_id, turn.fencing) and exists:
        raise VersionConflict(
            f"the session is at version {record.version}, the turn began at {turn.expected_version}, and it "
            "does not hold the session any more: it was committed before later turns, or not at all; the "
            "session's messages say which"
        )
    _held(lease, turn.turn_id, turn.fencing, exists=exists)
    if record.version != turn.expected_version:
        raise VersionConflict(
            f"the session is at version {record.version} and the turn began at {turn.expected_version}: "
            "begin it anew"
        )
    if turn.tools and record.version:
        raise InvalidInput("a session's first turn says what tools it has, and no later one", param="tools")
    if turn.kept_blocks > blocks:
        raise InvalidInput(
            f"the session has {blocks} full blocks, and {turn.kept_blocks} cannot be kept",
            param="kept_blocks",
        )
    after = head_of(record)
    after.format = RECORD_FORMAT
    after.version += 1
    after.model = turn.model
    after.model_name = turn.model_name
    after.dropped_tokens += sum(one.dropped_tokens for one in turn.new_truncations)
    after.last_used_ms = now_ms
    after.last_turn_id = turn.turn_id
    return after


def grow(record: pb.SessionRecord, head: pb.SessionRecord, turn: TurnCommit) -> None:
    """Makes a whole record what it is after a turn: with the head that `commit` gave, and what the turn
    adds."""
    del record.block_ids[turn.kept_blocks :]
    record.block_ids.extend(turn.block_ids)
    record.tokens.extend(turn.new_tokens)
    record.messages.extend(turn.new_messages)
    record.truncations.extend(turn.new_truncations)
    if turn.tools:
        record.tools = turn.tools
    record.model, record.model_name = head.model, head.model_name  # they may have become empty
    record.MergeFrom(head)


def may_abandon(lease: TurnLease | None, turn_id: str, fencing: int) -> bool:
    """Whether there is a lease to give back; not if it is gone, or another turn's."""
    return _holds(lease, turn_id, fencing)


def _document_in_progress(state: pb.DocumentState) -> TurnInProgress:
    percent = state.computed_tokens * 1000 // max(state.tokens, 1) / 10
    end = f", some {state.left_ms / 1000:.0f} s are left" if state.left_ms else ""
    return TurnInProgress(
        f"the session is given a document: {percent:g}% of its {state.tokens} tokens are computed{end}: wait "
        "for it (GET /v1/sessions/{id}/prefill), or end it with DELETE",
        retry_after_ms=min(max(state.left_ms, 1000), 60_000),
    )


def _held(lease: TurnLease | None, turn_id: str, fencing: int, *, exists: bool) -> TurnLease:
    if lease is None and not exists:
        raise SessionNotFound("the session was deleted while this turn was under way: nothing was committed")
    if lease is None or not _holds(lease, turn_id, fencing):
        raise Conflict(
            "this turn's lease ran out and another turn has begun: nothing of this one was committed"
        )
    return lease


def _holds(lease: TurnLease | None, turn_id: str, fencing: int) -> bool:
    return lease is not None and lease.turn_id == turn_id and lease.fencing == fencing


def _checked(lease_ms: int) -> int:
    if not 0 < lease_ms <= LEASE_MS_MAX:
        raise InvalidInput(f"lease_ms must be between 1 and {LEASE_MS_MAX}", param="lease_ms")
    return lease_ms
