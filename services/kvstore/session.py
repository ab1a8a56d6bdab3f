"""Rules of a session record and of its turn lease. Pure: the time is passed in, nothing is read or written.

One turn at a time: `begin` takes the lease, `commit` gives it back with the turn's tokens, `abandon` without.
Every lease has a fencing number higher than all before it, so that an owner who lost his lease cannot commit
over the next.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcommons.errors import Conflict, InvalidInput, SessionNotFound, TurnInProgress, VersionConflict
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.folder import UnknownFormat

RECORD_FORMAT = 1
LEASE_FORMAT = 1
NAME_BYTES_MAX = 512
LEASE_MS_MAX = 600_000  # the router's `lease_ms` has the same bound

# format, fencing, expires ms, length of turn id, owner
_LEASE = struct.Struct("<BQqHH")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLease:
    """The right to commit the session's next turn.

    `expires_ms` is wall-clock time, so that it survives a restart.
    """

    turn_id: str
    owner: str
    fencing: int
    expires_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCommit:
    """What a turn adds to its session. `block_ids`: of all full blocks of the session's context after this
    turn."""

    turn_id: str
    fencing: int
    expected_version: int
    model: bytes
    model_name: str
    new_tokens: Sequence[int]
    new_messages: Sequence[pb.Message]
    block_ids: Sequence[bytes]
    new_truncations: Sequence[pb.TruncationRecord] = ()


def check_name(value: str, param: str) -> None:
    """Raises InvalidInput for an empty or overlong id."""
    if not value:
        raise InvalidInput(f"{param} is empty", param=param)
    if len(value.encode()) > NAME_BYTES_MAX:
        raise InvalidInput(f"{param} has more than {NAME_BYTES_MAX} bytes", param=param)


def new_record(tenant: str, session_id: str, ttl_s: int, now_ms: int) -> pb.SessionRecord:
    """A session without a turn."""
    return pb.SessionRecord(
        format=RECORD_FORMAT,
        tenant=tenant,
        session_id=session_id,
        root=session_id,
        ttl_s=ttl_s,
        created_ms=now_ms,
        last_used_ms=now_ms,
    )


def decode_record(value: bytes) -> pb.SessionRecord:
    """Raises UnknownFormat for a record that another version wrote."""
    record = pb.SessionRecord.FromString(value)
    if record.format != RECORD_FORMAT:
        raise UnknownFormat(
            f"session record of format {record.format}; this version of kvcommons reads {RECORD_FORMAT}"
        )
    return record


def head_of(record: pb.SessionRecord) -> pb.SessionRecord:
    """The record without what makes it long: for lists and sweeps."""
    head = pb.SessionRecord()
    head.CopyFrom(record)
    for field in ("tokens", "messages", "block_ids", "truncations"):
        head.ClearField(field)
    return head


def fork_of(record: pb.SessionRecord, new_id: str, now_ms: int) -> pb.SessionRecord:
    """A session that goes on from where this one is now."""
    fork = pb.SessionRecord()
    fork.CopyFrom(record)
    fork.session_id = new_id
    fork.parent = record.session_id
    fork.created_ms = fork.last_used_ms = now_ms
    fork.last_turn_id = ""
    return fork


def expires_ms(record: pb.SessionRecord, default_ttl_s: int) -> int | None:
    """When nobody may use the session any more; None: never."""
    ttl_s = record.ttl_s or default_ttl_s
    return record.last_used_ms + ttl_s * 1000 if ttl_s else None


def encode_lease(lease: TurnLease) -> bytes:
    turn_id, owner = lease.turn_id.encode(), lease.owner.encode()
    head = _LEASE.pack(LEASE_FORMAT, lease.fencing, lease.expires_ms, len(turn_id), len(owner))
    return head + turn_id + owner


def decode_lease(value: bytes) -> TurnLease:
    """Raises UnknownFormat for a lease that another version wrote."""
    if not value or value[0] != LEASE_FORMAT:
        raise UnknownFormat(
            f"turn lease of an unknown format; this version of kvcommons reads {LEASE_FORMAT}"
        )
    _, fencing, expires, turn_bytes, owner_bytes = _LEASE.unpack_from(value)
    turn_end = _LEASE.size + turn_bytes
    return TurnLease(
        turn_id=value[_LEASE.size : turn_end].decode(),
        owner=value[turn_end : turn_end + owner_bytes].decode(),
        fencing=fencing,
        expires_ms=expires,
    )


def begin(
    lease: TurnLease | None, *, turn_id: str, owner: str, lease_ms: int, next_fencing: int, now_ms: int
) -> TurnLease:
    """The lease of a new turn. The same turn asking again gets its own. Raises TurnInProgress."""
    check_name(turn_id, "turn_id")
    check_name(owner, "owner")
    until_ms = now_ms + _checked(lease_ms)
    if lease is not None and lease.turn_id == turn_id:
        return replace(lease, owner=owner, expires_ms=until_ms)
    if lease is not None and lease.expires_ms > now_ms:
        raise TurnInProgress(
            "another turn of this session is under way: wait for its answer, or fork the session",
            retry_after_ms=min(1000, lease.expires_ms - now_ms),
        )
    return TurnLease(turn_id=turn_id, owner=owner, fencing=next_fencing, expires_ms=until_ms)


def renew(
    lease: TurnLease | None, *, exists: bool, turn_id: str, fencing: int, lease_ms: int, now_ms: int
) -> TurnLease:
    """A longer lease, even if it ran out meanwhile and nobody took it. Raises Conflict, SessionNotFound."""
    held = _held(lease, turn_id, fencing, exists=exists)
    return replace(held, expires_ms=now_ms + _checked(lease_ms))


def commit(
    record: pb.SessionRecord, lease: TurnLease | None, turn: TurnCommit, now_ms: int, *, exists: bool
) -> pb.SessionRecord | None:
    """The record after the turn; None if the turn is committed already. `exists`: the record is stored.

    Raises VersionConflict where the session moved on, Conflict where the lease went to another turn,
    SessionNotFound where the session was deleted meanwhile.
    """
    check_name(turn.turn_id, "turn_id")
    if record.last_turn_id == turn.turn_id:
        return None
    _held(lease, turn.turn_id, turn.fencing, exists=exists)
    if record.version != turn.expected_version:
        raise VersionConflict(
            f"the session is at version {record.version} and the turn began at {turn.expected_version}: "
            "begin it anew"
        )
    after = pb.SessionRecord()
    after.CopyFrom(record)
    after.version += 1
    after.model = turn.model
    after.model_name = turn.model_name
    after.tokens.extend(turn.new_tokens)
    after.messages.extend(turn.new_messages)
    after.truncations.extend(turn.new_truncations)
    after.dropped_tokens = sum(one.dropped_tokens for one in after.truncations)
    del after.block_ids[:]
    after.block_ids.extend(turn.block_ids)
    after.last_used_ms = now_ms
    after.last_turn_id = turn.turn_id
    return after


def may_abandon(lease: TurnLease | None, turn_id: str, fencing: int) -> bool:
    """Whether there is a lease to give back; not if it is gone, or another turn's."""
    return lease is not None and lease.turn_id == turn_id and lease.fencing == fencing


def _held(lease: TurnLease | None, turn_id: str, fencing: int, *, exists: bool) -> TurnLease:
    if lease is None and not exists:
        raise SessionNotFound("the session was deleted while this turn was under way: nothing was committed")
    if lease is None or lease.turn_id != turn_id or lease.fencing != fencing:
        raise Conflict(
            "this turn's lease ran out and another turn has begun: nothing of this one was committed"
        )
    return lease


def _checked(lease_ms: int) -> int:
    if not 0 < lease_ms <= LEASE_MS_MAX:
        raise InvalidInput(f"lease_ms must be between 1 and {LEASE_MS_MAX}", param="lease_ms")
    return lease_ms
