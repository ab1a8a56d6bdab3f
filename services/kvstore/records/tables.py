"""Statements on the tables of `migrations`, in a dialect that PostgreSQL, CockroachDB and YugabyteDB take.

Each function runs within the transaction that is under way on the connection.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString, TypeVar

from kvcommons.errors import DataLoss
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore import session as rules
from services.kvstore.database import end_of
from services.kvstore.records.postgres import Connection, ReadAgain
from services.kvstore.session import TurnCommit
from services.kvstore.turn_lease import LEASE_KEPT_MS, TurnLease, decode_document, decode_lease, encode_lease

T = TypeVar("T")

ID_BYTES = 32  # of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A session. `head`, which names the incarnation too, is None while there is but a lease; `blocks` says
    how many block ids it has; `fencing` is a number drawn when the row was locked."""

    incarnation: uuid.UUID
    head: pb.SessionRecord | None = None
    lease: TurnLease | None = None
    blocks: int = 0
    fencing: int = 0
    unread: bool = False  # nothing but its incarnation is known


async def next_fencing(connection: Connection) -> int:
    ((number,),) = await _rows(connection, "SELECT nextval('fencing')")
    return int(number)


async def read(connection: Connection, key: bytes, *, lock: bool) -> Row | None:
    """With `lock`, nobody else changes the session before this transaction ends."""
    columns: LiteralString = "SELECT incarnation, head, lease, blocks"
    which: LiteralString = " FROM sessions WHERE key = %s"
    if lock:
        rows = await _rows(connection, columns + ", nextval('fencing')" + which + " FOR UPDATE", key)
    else:
        rows = await _rows(connection, columns + ", 0" + which, key)
    if not rows:
        return None
    incarnation, stored, lease, blocks, fencing = rows[0]
    head = rules.decode_record(stored) if stored is not None else None
    if head is not None:
        head.incarnation = incarnation.bytes  # in the bytes of before there was this field it is not
    return Row(
        incarnation=incarnation,
        head=head,
        lease=decode_lease(lease) if lease is not None else None,
        blocks=blocks,
        fencing=fencing,
    )


async def find(connection: Connection, key: bytes) -> Row | None:
    """The row, locked, with its incarnation alone: of a session whose head or lease cannot be read."""
    rows = await _rows(connection, "SELECT incarnation FROM sessions WHERE key = %s FOR UPDATE", key)
    return Row(incarnation=rows[0][0], unread=True) if rows else None


async def read_heads(
    connection: Connection, behind: bytes, end: bytes, limit: int
) -> list[tuple[bytes, pb.SessionRecord | DataLoss]]:
    """Keys and heads in the order of the keys, between two of them; why, where a head cannot be read."""
    rows = await _rows(
        connection,
        "SELECT key, head FROM sessions WHERE key > %s AND key < %s AND head IS NOT NULL "
        "ORDER BY key LIMIT %s",
        behind,
        end,
        limit,
    )
    return [(key, _decoded(rules.decode_record, head)) for key, head in rows]


async def read_relatives(
    connection: Connection, key: bytes, prefix: bytes
) -> list[tuple[bytes, pb.SessionRecord | DataLoss, TurnLease | DataLoss | None]]:
    """Keys, heads and leases of the session with this key, and of those whose keys begin with `prefix`; why,
    where one cannot be read."""
    rows = await _rows(
        connection,
        "SELECT key, head, lease FROM sessions "
        "WHERE head IS NOT NULL AND (key = %s OR (key > %s AND key < %s))",
        key,
        prefix,
        end_of(prefix),
    )
    return [
        (
            one,
            _decoded(rules.decode_record, head),
            _decoded(decode_lease, lease) if lease is not None else None,
        )
        for one, head, lease in rows
    ]


async def read_ended(connection: Connection, now_ms: int, default_ttl_s: int, limit: int) -> list[bytes]:
    """Keys of rows whose time is over, unless a turn holds them."""
    query: LiteralString = "SELECT key FROM sessions WHERE "
    own = query + "ends_ms <= %s ORDER BY ends_ms LIMIT %s"
    rows = await _rows(connection, own, now_ms, limit)
    if default_ttl_s:
        default = query + "ends_ms IS NULL AND last_used_ms <= %s ORDER BY last_used_ms LIMIT %s"
        rows += await _rows(connection, default, now_ms - default_ttl_s * 1000, limit)
    return [key for (key,) in rows][:limit]


async def count(connection: Connection) -> int:
    ((number,),) = await _rows(connection, "SELECT count(*) FROM sessions WHERE head IS NOT NULL")
    return int(number)


async def insert(connection: Connection, key: bytes, row: Row) -> None:
    """Raises psycopg's UniqueViolation where another transaction was faster: tried again, it is seen."""
    await connection.execute(
        "INSERT INTO sessions (incarnation, key, head, lease, blocks, ends_ms, last_used_ms) "
        "VALUES (%s, %s, %s, %s, %s, %s, %s)",
        [
            row.incarnation,
            key,
            _encoded(row.head) if row.head is not None else None,
            encode_lease(row.lease) if row.lease is not None else None,
            row.blocks,
            _ends_ms(row.head, row.lease),
            row.head.last_used_ms if row.head is not None else 0,
        ],
    )


async def write_lease(connection: Connection, row: Row, lease: TurnLease | None) -> None:
    """A row that has nothing but its lease goes with it, and with a document's lease the document."""
    if lease is None:
        await _remove_document(connection, row)
    if row.head is None and lease is None:
        await connection.execute("DELETE FROM sessions WHERE incarnation = %s", [row.incarnation])
        return
    await connection.execute(
        "UPDATE sessions SET lease = %s, ends_ms = %s WHERE incarnation = %s",
        [
            encode_lease(lease) if lease is not None else None,
            _ends_ms(row.head, lease),
            row.incarnation,
        ],
    )


async def look_again(connection: Connection, row: Row, at_ms: int) -> None:
    """The sweep comes to this row at that time, unless a turn ends before."""
    await connection.execute(
        "UPDATE sessions SET ends_ms = %s WHERE incarnation = %s", [at_ms, row.incarnation]
    )


async def remove(connection: Connection, row: Row) -> list[bytes]:
    """Returns the blocks that no session names any more."""
    ids = await _block_ids(connection, row.incarnation)
    await _unname(connection, row.incarnation, ids)
    await _remove_document(connection, row)
    await connection.execute("DELETE FROM turns WHERE incarnation = %s", [row.incarnation])
    await connection.execute("DELETE FROM sessions WHERE incarnation = %s", [row.incarnation])
    if not ids:
        return []
    query = "SELECT DISTINCT block_id FROM block_uses WHERE block_id = ANY(%s)"
    others = {block_id for (block_id,) in await _rows(connection, query, ids)}
    return [block_id for block_id in ids if block_id not in others]


async def fork(connection: Connection, source: Row, head: pb.SessionRecord) -> None:
    incarnation = uuid.UUID(bytes=head.incarnation)
    row = Row(incarnation=incarnation, head=head, blocks=source.blocks)
    await insert(connection, session_key(head.tenant, head.session_id), row)
    # Without the turns' ids: a turn of the one session may be a turn of the other, too.
    await connection.execute(
        "INSERT INTO turns (incarnation, version, turn_id, added, kept_blocks, block_ids) "
        "SELECT %s, version, NULL, added, kept_blocks, block_ids FROM turns WHERE incarnation = %s",
        [incarnation, source.incarnation],
    )
    await _name(connection, incarnation, await _block_ids(connection, source.incarnation))


async def insert_whole(connection: Connection, incarnation: uuid.UUID, record: pb.SessionRecord) -> None:
    """A session whose turns are not known one by one: it gets one with all that it has, of its version."""
    ids = list(record.block_ids)
    row = Row(incarnation=incarnation, head=record, blocks=len(ids))
    await insert(connection, session_key(record.tenant, record.session_id), row)
    if record.version:
        added = pb.SessionRecord(
            tokens=record.tokens,
            messages=record.messages,
            truncations=record.truncations,
            tools=record.tools,
        )
        await _insert_turn(connection, incarnation, record, record.last_turn_id or None, added, 0, ids)
    await _name(connection, incarnation, ids)


async def add_turn(connection: Connection, row: Row, head: pb.SessionRecord, turn: TurnCommit) -> None:
    """Writes what the turn adds and the head after it, and takes the lease. Of what the session had, only a
    turn that does not keep all blocks reads anything: their identities."""
    kept, ids = turn.kept_blocks, list(turn.block_ids)
    if kept < row.blocks:
        before = await _block_ids(connection, row.incarnation)
        await _unname(connection, row.incarnation, {*before[kept:]} - {*ids})
    added = pb.SessionRecord(
        tokens=turn.new_tokens,
        messages=turn.new_messages,
        truncations=turn.new_truncations,
        tools=turn.tools,
    )
    await _insert_turn(connection, row.incarnation, head, turn.turn_id, added, kept, ids)
    await _name(connection, row.incarnation, ids)
    await _remove_document(connection, row)
    await connection.execute(
        "UPDATE sessions SET head = %s, lease = NULL, blocks = %s, ends_ms = %s, last_used_ms = %s "
        "WHERE incarnation = %s",
        [_encoded(head), kept + len(ids), _ends_ms(head), head.last_used_ms, row.incarnation],
    )


async def find_turn(connection: Connection, row: Row, turn_id: str) -> int | None:
    """The version that a turn made, be it long ago; None if it was not committed."""
    query = "SELECT version FROM turns WHERE incarnation = %s AND turn_id = %s"
    rows = await _rows(connection, query, row.incarnation, turn_id)
    return int(rows[0][0]) if rows else None


async def read_whole(connection: Connection, head: pb.SessionRecord) -> pb.SessionRecord:
    """The record of a head."""
    record = pb.SessionRecord()
    rows = await _rows(
        connection,
        "SELECT version, added, kept_blocks, block_ids FROM turns "
        "WHERE incarnation = %s AND version <= %s ORDER BY version",
        uuid.UUID(bytes=head.incarnation),
        head.version,
    )
    for _, added, kept, block_ids in rows:
        record.MergeFromString(added)
        del record.block_ids[kept:]
        record.block_ids.extend(_divided(block_ids))
    if head.version != (rows[-1][0] if rows else 0):
        raise ReadAgain("the session was changed while it was read")
    record.MergeFrom(head)
    return record


async def read_after(connection: Connection, head: pb.SessionRecord, turn_id: str) -> pb.SessionRecord | None:
    """A head, with what the session's turns after this one added. None where it is no turn of the session, or
    where one after it did not keep all blocks."""
    if head.last_turn_id == turn_id:
        return head
    incarnation = uuid.UUID(bytes=head.incarnation)
    rows = await _rows(
        connection,
        "SELECT added, kept_blocks, block_ids FROM turns WHERE incarnation = %s AND version >= "
        "(SELECT version FROM turns WHERE incarnation = %s AND turn_id = %s) ORDER BY version",
        incarnation,
        incarnation,
        turn_id,
    )
    if not rows:
        return None
    record, blocks = pb.SessionRecord(), rows[0][1] + len(_divided(rows[0][2]))
    for added, kept, block_ids in rows[1:]:
        if kept < blocks:
            return None
        record.MergeFromString(added)
        record.block_ids.extend(_divided(block_ids))
        blocks = kept + len(_divided(block_ids))
    record.MergeFrom(head)
    return record


async def write_document(connection: Connection, row: Row, document: pb.Document) -> None:
    await _remove_document(connection, row)  # of a call that is done again
    await connection.execute(
        "INSERT INTO documents (incarnation, document) VALUES (%s, %s)",
        [row.incarnation, document.SerializeToString(deterministic=True)],
    )


async def read_document(connection: Connection, row: Row) -> pb.Document | None:
    query = "SELECT document FROM documents WHERE incarnation = %s"
    rows = await _rows(connection, query, row.incarnation)
    return decode_document(rows[0][0]) if rows else None


async def read_document_leases(
    connection: Connection, key: bytes | None
) -> list[tuple[bytes, TurnLease | DataLoss]]:
    """Keys and leases of sessions with a document; of one session, where a key is given. Why, where a lease
    cannot be read."""
    query: LiteralString = (
        "SELECT key, lease FROM documents JOIN sessions ON sessions.incarnation = documents.incarnation"
    )
    if key is None:
        rows = await _rows(connection, query)
    else:
        rows = await _rows(connection, query + " WHERE key = %s", key)
    return [(key, _decoded(decode_lease, lease)) for key, lease in rows]


async def _remove_document(connection: Connection, row: Row) -> None:
    if row.unread or (row.lease is not None and row.lease.document is not None):
        await connection.execute("DELETE FROM documents WHERE incarnation = %s", [row.incarnation])


async def _insert_turn(
    connection: Connection,
    incarnation: uuid.UUID,
    head: pb.SessionRecord,
    turn_id: str | None,
    added: pb.SessionRecord,
    kept_blocks: int,
    block_ids: Sequence[bytes],
) -> None:
    await connection.execute(
        "INSERT INTO turns (incarnation, version, turn_id, added, kept_blocks, block_ids) "
        "VALUES (%s, %s, %s, %s, %s, %s)",
        [
            incarnation,
            head.version,
            turn_id,
            added.SerializeToString(deterministic=True),
            kept_blocks,
            b"".join(block_ids),
        ],
    )


# ---- which session names which block


async def _block_ids(connection: Connection, incarnation: uuid.UUID) -> list[bytes]:
    """Of all full blocks of a session's context."""
    query = "SELECT kept_blocks, block_ids FROM turns WHERE incarnation = %s ORDER BY version"
    ids: list[bytes] = []
    for kept, new in await _rows(connection, query, incarnation):
        ids[kept:] = _divided(new)
    return ids


async def _name(connection: Connection, incarnation: uuid.UUID, ids: Collection[bytes]) -> None:
    if ids:
        await connection.execute(
            "INSERT INTO block_uses (block_id, incarnation) "
            "SELECT one, %s FROM unnest(%s::bytea[]) AS one ON CONFLICT DO NOTHING",
            [incarnation, list(ids)],
        )


async def _unname(connection: Connection, incarnation: uuid.UUID, ids: Collection[bytes]) -> None:
    if ids:
        await connection.execute(
            "DELETE FROM block_uses WHERE incarnation = %s AND block_id = ANY(%s)", [incarnation, list(ids)]
        )


# ---- values


async def _rows(connection: Connection, query: LiteralString, *values: object) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, values, binary=True)).fetchall()


def _decoded(decode: Callable[[bytes], T], value: bytes) -> T | DataLoss:
    try:
        return decode(value)
    except DataLoss as error:
        return error


def _encoded(head: pb.SessionRecord) -> bytes:
    return rules.head_of(head).SerializeToString(deterministic=True)


def _divided(block_ids: bytes) -> list[bytes]:
    return [block_ids[at : at + ID_BYTES] for at in range(0, len(block_ids), ID_BYTES)]


def _ends_ms(head: pb.SessionRecord | None, lease: TurnLease | None = None) -> int | None:
    """When the sweep should look at a row; None: where the default time to live says."""
    if head is not None:
        return rules.expires_ms(head, 0)
    assert lease is not None  # a row has one of them
    return lease.expires_ms + LEASE_KEPT_MS + 1
