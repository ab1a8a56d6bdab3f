"""Session records and turn leases on disk: every call that changes something is durable when it returns.

Calls block (RocksDB) and are meant for an executor. One lock makes read, decide, write one step.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvcommons.errors import DataLoss
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore import session as rules
from services.kvstore.ballast import Ballast
from services.kvstore.clock import Clock
from services.kvstore.database import DamagedDatabase, Database, Put, Table
from services.kvstore.families import DOCUMENTS, HEADS, LEASES, META, RECORDS, STAMPS
from services.kvstore.folder import UnknownFormat
from services.kvstore.integrity import damaged_sessions
from services.kvstore.records.damaged import DamagedRecords
from services.kvstore.session import (
    Begun,
    Committed,
    Cut,
    TurnBegin,
    TurnCommit,
    TurnRenewal,
    checked_key,
    new_incarnation,
)
from services.kvstore.turn_lease import (
    DocumentOnItsWay,
    TurnLease,
    decode_document,
    decode_lease,
    encode_lease,
    forgotten,
    on_its_way,
    under_way,
)
from services.kvstore.uses import USES, BlockUses

T = TypeVar("T")

SWEEP_MAX = 1000

_FENCING_KEY = b"fencing"


def open_sessions(path: Path, ballast: Ballast | None = None) -> Database:
    """The sessions' database. Raises StoreUnavailable, DamagedDatabase."""
    try:
        return Database(path, [RECORDS, HEADS, LEASES, DOCUMENTS, META, USES, STAMPS], ballast)
    except DamagedDatabase as error:
        raise damaged_sessions(error, path) from error


class Sessions:
    """All sessions of all tenants. A tenant sees its own only; another's is SessionNotFound.

    `default_ttl_s` is for sessions without one of their own; 0 keeps them for ever. Raises StoreUnavailable
    where RocksDB fails, and UnknownFormat where the folder was one of several, for another one may have later
    turns.
    """

    def __init__(
        self,
        table: Table,
        *,
        default_ttl_s: int,
        clock: Clock,
        unnamed: Callable[[bytes, Sequence[bytes]], None] = lambda model, block_ids: None,
        damaged: DamagedRecords | None = None,
    ) -> None:
        if next(table.items(STAMPS), None) is not None:
            raise UnknownFormat(
                "these session records are one copy of two, which kvstores kept for each other before "
                "records could lie in a database: `kvcommons records move` takes what all of the stack's "
                "folders have to a database, or to one folder"
            )
        self._table = table
        self._uses = BlockUses(table, unnamed)
        self._damaged = damaged or DamagedRecords()
        self._default_ttl_s = default_ttl_s
        self._now_ms = clock.now_ms
        self._lock = threading.Lock()
        stored = self._table.get(META, _FENCING_KEY)
        self._fencing = struct.unpack("<Q", stored)[0] if stored else 0
        self._uses.migrate(self._readable(self._table.items(RECORDS), rules.decode_record))
        self._count = sum(1 for _ in self._table.items(HEADS))
        self._sweep_from: dict[str, bytes] = {}

    @property
    def count(self) -> int:
        """Sessions that exist, expired ones included until they are swept."""
        return self._count

    def create(self, tenant: str, session_id: str, ttl_s: int, incarnation: bytes = b"") -> pb.SessionRecord:
        """A session without a turn; the one that an earlier call with this incarnation made, as it is now.
        Raises AlreadyExists."""
        key = checked_key(tenant, session_id)
        incarnation = incarnation or new_incarnation()
        with self._lock:
            made = self._made(key, session_id, incarnation)
            if made is not None:
                return made
            record = rules.new_record(tenant, session_id, ttl_s, self._now_ms(), incarnation)
            self._table.write(puts_of(record))
            self._count += 1
            return record

    def get(self, tenant: str, session_id: str) -> pb.SessionRecord:
        """Raises SessionNotFound."""
        key = checked_key(tenant, session_id)
        with self._lock:
            return self._require(key, session_id)

    def page(self, tenant: str, after: str, limit: int) -> tuple[list[pb.SessionRecord], bool]:
        """Heads of a tenant's sessions in the order of their ids, and whether there are more."""
        rules.check_name(tenant, "tenant")
        rules.check_limit(limit)
        prefix = _prefix(tenant)
        found: list[pb.SessionRecord] = []
        now_ms = self._now_ms()
        heads = self._table.items(HEADS, prefix + after.encode(), prefix)
        for key, head in self._readable(heads, rules.decode_record):
            if key == prefix + after.encode() or self._expired(head, now_ms):
                continue
            if len(found) == limit:
                return found, True
            found.append(head)
        return found, False

    def delete(self, tenant: str, session_id: str, incarnation: bytes = b"") -> None:
        """A turn under way cannot commit any more. Without an incarnation, whichever is there: raises
        SessionNotFound where none is."""
        key = checked_key(tenant, session_id)
        with self._lock:
            try:
                record = self._live(key)
            except DataLoss as error:
                self._damaged.found(key, error)
                self._remove(key)
                return
            if record is not None and incarnation in (b"", record.incarnation):
                self._remove(key)
            elif not incarnation:
                raise rules.not_found(session_id)

    def fork(
        self,
        tenant: str,
        session_id: str,
        new_session_id: str,
        incarnation: bytes = b"",
        cut: Cut | None = None,
    ) -> pb.SessionRecord:
        """A new session with all that this one has committed, or what it had at the `cut`; as in `create`, it
        may be there already. Raises SessionNotFound, AlreadyExists, InvalidInput."""
        source = checked_key(tenant, session_id)
        rules.check_name(new_session_id, "new_id")
        key = session_key(tenant, new_session_id)
        incarnation = incarnation or new_incarnation()
        with self._lock:
            made = self._made(key, new_session_id, incarnation)
            if made is not None:
                return made
            record = self._require(source, session_id)
            fork = rules.fork_of(record, new_session_id, self._now_ms(), incarnation, cut)
            self._table.write([*puts_of(fork), *self._uses.changes(key, [], fork.block_ids)])
            self._count += 1
            return fork

    def begin(self, tenant: str, session_id: str, turn: TurnBegin) -> Begun:
        """Takes the turn lease. A session that does not exist has version 0 and begins with its first commit.
        Only the last turn is known here: what single turns added is not kept.

        Raises TurnInProgress.
        """
        key = checked_key(tenant, session_id)
        now_ms = self._now_ms()
        with self._lock:
            record = self._live(key) or rules.new_record(tenant, session_id, 0, now_ms)
            lease = rules.begin(self._lease(key), turn, next_fencing=self._fencing + 1, now_ms=now_ms)
            self._write_step([(LEASES, key, encode_lease(lease))], max(self._fencing, lease.fencing))
            known = bool(turn.known_turn_id) and turn.known_turn_id == record.last_turn_id
            return Begun(
                record=rules.head_of(record) if known else record,
                lease=lease,
                after_known=known,
                document=self._document(key) if lease.document is not None else None,
            )

    def renew(self, tenant: str, session_id: str, turn: TurnRenewal) -> None:
        """Raises Conflict where another turn has begun, SessionNotFound where the session was deleted."""
        key = checked_key(tenant, session_id)
        with self._lock:
            exists = self._table.get(HEADS, key) is not None
            lease = rules.renew(self._lease(key), turn, exists=exists, now_ms=self._now_ms())
            puts: list[Put] = [(LEASES, key, encode_lease(lease))]
            if turn.document is not None:
                puts.append((DOCUMENTS, key, turn.document.SerializeToString(deterministic=True)))
            # Survives kill -9 all the same; a lease that a power failure shortens can still be committed.
            self._table.write(puts, sync=turn.document is not None)

    def commit(self, tenant: str, session_id: str, turn: TurnCommit) -> Committed:
        """Adds the turn and gives its lease back, in one step. See `session.commit` for what it raises."""
        with self._lock:
            now_ms = self._now_ms()
            key = checked_key(tenant, session_id)
            stored = self._live(key)
            record = stored or rules.new_record(tenant, session_id, 0, now_ms, new_incarnation())
            blocks = len(record.block_ids)
            lease = self._lease(key)
            head = rules.commit(record, lease, turn, now_ms, exists=stored is not None, blocks=blocks)
            if head is None:
                return Committed(version=record.version, new=False)
            uses = self._uses.changes(key, record.block_ids[turn.kept_blocks :], turn.block_ids)
            rules.grow(record, head, turn)
            self._write_step([*puts_of(record), *uses, *_end_of(key, lease)], self._fencing + 1)
            self._count += stored is None
            return Committed(version=record.version, new=True)

    def abandon(self, tenant: str, session_id: str, *, turn_id: str, fencing: int) -> None:
        """Gives the lease back; nothing happens where it is gone already."""
        key = checked_key(tenant, session_id)
        with self._lock:
            lease = self._lease(key)
            if rules.may_abandon(lease, turn_id, fencing):
                self._table.write(_end_of(key, lease))

    def documents(self, tenant: str = "", session_id: str = "") -> list[DocumentOnItsWay]:
        """Those of all tenants, or a session's."""
        now_ms = self._now_ms()
        if session_id:
            key = checked_key(tenant, session_id)
            value = self._table.get(LEASES, key)
            leases = [(key, value)] if value is not None else []
        else:
            leases = list(self._table.items(LEASES))
        decoded = self._readable(leases, decode_lease)
        return [on_its_way(key, lease, now_ms) for key, lease in decoded if lease.document is not None]

    def sweep(self) -> int:
        """Removes expired sessions and forgotten leases, going through all of them over several calls.

        Returns how many sessions went.
        """
        now_ms = self._now_ms()
        removed = 0
        for key, head in self._readable(self._slice(HEADS), rules.decode_record):
            if self._expired(head, now_ms):
                removed += self._sweep_one(key, now_ms)
        for key, found in self._readable(self._slice(LEASES), decode_lease):
            if forgotten(found, now_ms):
                with self._lock:
                    lease = self._lease(key)
                    if lease is not None and forgotten(lease, now_ms):
                        self._table.write([(LEASES, key, None)])
        return removed

    def _sweep_one(self, key: bytes, now_ms: int) -> bool:
        """Whether the session went: it may have been used since it was looked at."""
        with self._lock:
            try:
                head, lease = self._table.get(HEADS, key), self._lease(key)
                over = head is not None and self._expired(rules.decode_record(head), now_ms)
            except DataLoss as error:
                self._damaged.found(key, error)
                return False
            if not over or under_way(lease, now_ms):
                return False
            self._remove(key)
            return True

    def _readable(
        self, items: Iterable[tuple[bytes, bytes]], decode: Callable[[bytes], T]
    ) -> Iterator[tuple[bytes, T]]:
        """What can be read of stored items, by their sessions' keys."""
        for key, value in items:
            try:
                decoded = decode(value)
            except DataLoss as error:
                self._damaged.found(key, error)
                continue
            yield key, decoded

    def _slice(self, family: str) -> list[tuple[bytes, bytes]]:
        """The next items of a family, from where the last slice ended; after the last item the first ones."""
        items = self._table.items(family, self._sweep_from.get(family, b""))
        part = list(itertools.islice(items, SWEEP_MAX))
        self._sweep_from[family] = part[-1][0] + b"\0" if len(part) == SWEEP_MAX else b""
        return part

    def close(self) -> None:
        with self._lock:
            self._table.close()

    # ---- within; the lock is held

    def _write_step(self, puts: Sequence[Put], fencing: int) -> None:
        # Counted even if the write fails: it may have reached the log all the same.
        self._fencing = fencing
        self._table.write([*puts, (META, _FENCING_KEY, struct.pack("<Q", fencing))])

    def _live(self, key: bytes) -> pb.SessionRecord | None:
        value = self._table.get(RECORDS, key)
        if value is None:
            return None
        record = rules.decode_record(value)
        if not self._expired(record, self._now_ms()):
            return record
        if under_way(self._lease(key), self._now_ms()):
            return record  # a turn began in time
        self._remove(key)
        return None

    def _require(self, key: bytes, session_id: str) -> pb.SessionRecord:
        record = self._live(key)
        if record is None:
            raise rules.not_found(session_id)
        return record

    def _made(self, key: bytes, session_id: str, incarnation: bytes) -> pb.SessionRecord | None:
        """The session that an earlier call made; None where there is room for it. Raises AlreadyExists."""
        record = self._live(key)
        if record is not None and record.incarnation == incarnation:
            return record
        if record is not None or under_way(self._lease(key), self._now_ms()):
            raise rules.session_exists(session_id)
        return None

    def _lease(self, key: bytes) -> TurnLease | None:
        value = self._table.get(LEASES, key)
        return decode_lease(value) if value is not None else None

    def _document(self, key: bytes) -> pb.Document | None:
        value = self._table.get(DOCUMENTS, key)
        return decode_document(value) if value is not None else None

    def _expired(self, record: pb.SessionRecord, now_ms: int) -> bool:
        """Whether nobody used it, or a relative of it, in time."""
        ttl_s = self._default_ttl_s
        return not rules.in_use(record, ttl_s, now_ms) and not any(
            rules.in_use(relative, ttl_s, now_ms) or under_way(self._lease(key), now_ms)
            for key, relative in self._relatives(record)
        )

    def _relatives(self, record: pb.SessionRecord) -> Iterator[tuple[bytes, pb.SessionRecord]]:
        """Heads of the session and the branches that this record is one of, by their keys."""
        key, prefix = rules.family_keys(record)
        own = self._table.get(HEADS, key)
        heads = itertools.chain(
            [(key, own)] if own is not None else [], self._table.items(HEADS, prefix, prefix)
        )
        for key, head in self._readable(heads, rules.decode_record):
            if rules.are_relatives(head, record):
                yield key, head

    def _remove(self, key: bytes) -> None:
        value = self._table.get(RECORDS, key)
        record = pb.SessionRecord()
        with contextlib.suppress(DataLoss):  # its blocks stay until they are evicted
            record = rules.decode_record(value) if value is not None else record
        uses = self._uses.changes(key, record.block_ids, [])
        families = (RECORDS, HEADS, LEASES, DOCUMENTS)
        self._table.write([*((family, key, None) for family in families), *uses])
        self._count -= 1
        self._damaged.removed(key)
        self._uses.released(record.model, record.block_ids)


def _prefix(tenant: str) -> bytes:
    return session_key(tenant, "")


def _end_of(key: bytes, lease: TurnLease | None) -> Sequence[Put]:
    """A turn is over."""
    is_document = lease is not None and lease.document is not None
    return [(family, key, None) for family in ((LEASES, DOCUMENTS) if is_document else (LEASES,))]


def puts_of(record: pb.SessionRecord) -> Sequence[Put]:
    """What a record is on disk."""
    key = session_key(record.tenant, record.session_id)
    return [
        (RECORDS, key, record.SerializeToString(deterministic=True)),
        (HEADS, key, rules.head_of(record).SerializeToString(deterministic=True)),
    ]
