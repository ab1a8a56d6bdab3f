"""Records in a database that speaks PostgreSQL's protocol: PostgreSQL, CockroachDB, YugabyteDB.

A session is a row with its head and its lease, and a row for each turn with what that turn added. What
changes a session locks its row first, so that the rules of `session.py` decide over what nobody else changes
meanwhile. A session that is deleted and begun anew is another incarnation, with turns of its own.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvcommons.errors import Conflict, DataLoss
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore import session as rules
from services.kvstore.clock import Clock
from services.kvstore.database import end_of
from services.kvstore.records import tables
from services.kvstore.records.damaged import DamagedRecords
from services.kvstore.records.interface import RecordsObserver
from services.kvstore.records.postgres import Connection, Postgres, Transaction
from services.kvstore.records.tables import Row
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
    forgotten,
    names_in,
    on_its_way,
    under_way,
)

T = TypeVar("T")
V = TypeVar("V", pb.SessionRecord, TurnLease)

SWEEP_MAX = 100  # sessions in one sweep: each is a transaction
_LOOK_AGAIN_MS = 3_600_000  # after a session whose own time is over, but not its relatives'


class SqlRecords:
    """`Records` in a database. `unnamed` is called with the blocks of a model that no session names any more.

    A caller that is cancelled leaves its call to go on to its end, which `call_s` bounds.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        default_ttl_s: int,
        clock: Clock,
        unnamed: Callable[[bytes, Sequence[bytes]], None] = lambda model, block_ids: None,
        connections: int = 16,
        waiting_max: int = 1000,
        call_s: float = 5.0,
        dice: random.Random | None = None,
        observer: RecordsObserver | None = None,
        damaged: DamagedRecords | None = None,
    ) -> None:
        """See `Postgres` for the others. The database may come later."""
        self._observer = observer or RecordsObserver()
        self._postgres = Postgres(
            conninfo,
            connections=connections,
            waiting_max=waiting_max,
            call_s=call_s,
            dice=dice or random.Random(),
            observer=self._observer,
        )
        self._default_ttl_s = default_ttl_s
        self._now_ms = clock.now_ms
        self._unnamed = unnamed
        self._damaged = damaged or DamagedRecords()
        self._calls: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._postgres.close()

    # ---- sessions

    async def create(
        self, tenant: str, session_id: str, ttl_s: int, incarnation: bytes = b""
    ) -> pb.SessionRecord:
        key = checked_key(tenant, session_id)
        incarnation = incarnation or new_incarnation()
        record = rules.new_record(tenant, session_id, ttl_s, self._now_ms(), incarnation)

        async def work(transaction: Transaction) -> pb.SessionRecord:
            made = await self._made(transaction, key, incarnation)
            if made is None:
                row = Row(incarnation=uuid.UUID(bytes=incarnation), head=record)
                await tables.insert(transaction.connection, key, row)
            return made or record

        return await self._call("create", work)

    async def get(self, tenant: str, session_id: str) -> pb.SessionRecord:
        key = checked_key(tenant, session_id)

        async def work(transaction: Transaction) -> pb.SessionRecord:
            row = await self._live(transaction.connection, key, lock=False)
            if row is None or row.head is None:
                raise rules.not_found(session_id)
            return await tables.read_whole(transaction.connection, row.head)

        return await self._call("get", work)

    async def page(self, tenant: str, after: str, limit: int) -> tuple[list[pb.SessionRecord], bool]:
        rules.check_name(tenant, "tenant")
        rules.check_limit(limit)
        end = end_of(session_key(tenant, ""))
        assert end is not None  # it begins with a length

        async def work(transaction: Transaction) -> tuple[list[pb.SessionRecord], bool]:
            found: list[pb.SessionRecord] = []
            behind = session_key(tenant, after)
            while True:
                heads = await tables.read_heads(transaction.connection, behind, end, limit + 1)
                readable = [head for head in map(self._readable, heads) if head is not None]
                found += [head for head in readable if not await self._expired(transaction.connection, head)]
                if len(found) > limit or len(heads) <= limit:
                    return found[:limit], len(found) > limit
                behind = heads[-1][0]

        return await self._call("page", work)

    async def delete(self, tenant: str, session_id: str, incarnation: bytes = b"") -> None:
        key = checked_key(tenant, session_id)
        meant = incarnation  # or whichever the first try finds

        async def work(transaction: Transaction) -> None:
            nonlocal meant
            try:
                row = await self._live(transaction.connection, key)
            except DataLoss as error:
                self._damaged.found(key, error)
                row = await tables.find(transaction.connection, key)
                if row is not None:
                    await tables.remove(transaction.connection, row)
                    transaction.afterwards.append(partial(self._damaged.removed, key))
                return
            if row is not None and row.head is not None and meant in (b"", row.head.incarnation):
                meant = row.head.incarnation
                await self._remove(transaction, row)
            elif not meant:
                raise rules.not_found(session_id)

        await self._call("delete", work)

    async def fork(
        self,
        tenant: str,
        session_id: str,
        new_session_id: str,
        incarnation: bytes = b"",
        cut: Cut | None = None,
    ) -> pb.SessionRecord:
        key = checked_key(tenant, session_id)
        rules.check_name(new_session_id, "new_id")
        incarnation = incarnation or new_incarnation()

        async def work(transaction: Transaction) -> None:
            if await self._made(transaction, session_key(tenant, new_session_id), incarnation):
                return
            row = await self._live(transaction.connection, key)
            if row is None or row.head is None:
                raise rules.not_found(session_id)
            if cut is None:
                head = rules.fork_of(row.head, new_session_id, self._now_ms(), incarnation)
                await tables.fork(transaction.connection, row, head)
                return
            whole = await tables.read_whole(transaction.connection, row.head)
            fork = rules.fork_of(whole, new_session_id, self._now_ms(), incarnation, cut)
            await tables.insert_whole(transaction.connection, uuid.UUID(bytes=incarnation), fork)

        await self._call("fork", work)
        return await self.get(tenant, new_session_id)

    async def count(self) -> int:
        return await self._call("count", lambda transaction: tables.count(transaction.connection))

    # ---- turns

    async def begin(self, tenant: str, session_id: str, turn: TurnBegin) -> Begun:
        key = checked_key(tenant, session_id)

        async def work(transaction: Transaction) -> Begun:
            connection, now_ms = transaction.connection, self._now_ms()
            row = await self._live_or_removed(transaction, key)
            before = row.lease if row is not None else None
            drawn = row.fencing if row is not None else await tables.next_fencing(connection)
            lease = rules.begin(
                before,
                turn,
                # A database that draws numbers at several places may draw a lower one later.
                next_fencing=max(drawn, before.fencing + 1 if before is not None else 1),
                now_ms=now_ms,
            )
            if row is None:
                await tables.insert(connection, key, Row(incarnation=uuid.uuid4(), lease=lease))
            else:
                await tables.write_lease(connection, row, lease)
            document = None
            if row is not None and lease.document is not None:
                document = await tables.read_document(connection, row)
            if row is None or row.head is None:
                anew = rules.new_record(tenant, session_id, 0, now_ms)
                return Begun(record=anew, lease=lease, document=document)
            known = turn.known_turn_id
            after = await tables.read_after(connection, row.head, known) if known else None
            record = after if after is not None else await tables.read_whole(connection, row.head)
            return Begun(record=record, lease=lease, after_known=after is not None, document=document)

        return await self._call("begin", work)

    async def renew(self, tenant: str, session_id: str, turn: TurnRenewal) -> None:
        key = checked_key(tenant, session_id)

        async def work(transaction: Transaction) -> None:
            row = await self._row(transaction.connection, key)
            before = row.lease if row is not None else None
            exists = row is not None and row.head is not None
            lease = rules.renew(before, turn, exists=exists, now_ms=self._now_ms())
            assert row is not None  # it had the lease
            await tables.write_lease(transaction.connection, row, lease)
            if turn.document is not None:
                await tables.write_document(transaction.connection, row, turn.document)

        await self._call("renew", work)

    async def commit(self, tenant: str, session_id: str, turn: TurnCommit) -> Committed:
        key = checked_key(tenant, session_id)

        async def work(transaction: Transaction) -> Committed:
            connection, now_ms = transaction.connection, self._now_ms()
            row = await self._live(connection, key)
            stored = row.head if row is not None else None
            drawn = row.incarnation.bytes if row is not None else b""
            before = stored or rules.new_record(tenant, session_id, 0, now_ms, drawn)
            lease = row.lease if row is not None else None
            try:
                blocks = row.blocks if row is not None else 0
                head = rules.commit(before, lease, turn, now_ms, exists=stored is not None, blocks=blocks)
            except Conflict:
                version = await tables.find_turn(connection, row, turn.turn_id) if row is not None else None
                if version is None:
                    raise
                return Committed(version=version, new=False)
            if head is None:
                return Committed(version=before.version, new=False)
            assert row is not None  # it had the lease
            await tables.add_turn(connection, row, head, turn)
            return Committed(version=head.version, new=True)

        return await self._call("commit", work)

    async def abandon(self, tenant: str, session_id: str, *, turn_id: str, fencing: int) -> None:
        key = checked_key(tenant, session_id)

        async def work(transaction: Transaction) -> None:
            row = await self._row(transaction.connection, key)
            if row is not None and rules.may_abandon(row.lease, turn_id, fencing):
                await tables.write_lease(transaction.connection, row, None)

        await self._call("abandon", work)

    async def documents(self, tenant: str = "", session_id: str = "") -> list[DocumentOnItsWay]:
        key = checked_key(tenant, session_id) if session_id else None

        async def work(transaction: Transaction) -> list[DocumentOnItsWay]:
            now_ms = self._now_ms()
            leases = await tables.read_document_leases(transaction.connection, key)
            found = [(one[0], self._readable(one)) for one in leases]
            return [on_its_way(key, lease, now_ms) for key, lease in found if lease is not None]

        return await self._call("documents", work)

    # ---- upkeep

    async def sweep(self) -> int:
        """Those that ended first, at most `SWEEP_MAX`."""
        now_ms = self._now_ms()
        most = SWEEP_MAX + len(self._damaged)  # which stay, and come first again each time
        keys = await self._call(
            "sweep",
            lambda transaction: tables.read_ended(transaction.connection, now_ms, self._default_ttl_s, most),
        )
        readable = [key for key in keys if key not in self._damaged][:SWEEP_MAX]
        return sum([await self._call("sweep", partial(self._sweep_one, key)) for key in readable])

    async def _sweep_one(self, key: bytes, transaction: Transaction) -> bool:
        """Whether a session went."""
        try:
            row = await self._row(transaction.connection, key)
        except DataLoss as error:
            self._damaged.found(key, error)
            return False
        if row is None:
            return False
        if not await self._is_over(transaction.connection, row):
            if row.head is not None:
                await tables.look_again(transaction.connection, row, self._now_ms() + _LOOK_AGAIN_MS)
            return False
        await self._remove(transaction, row)
        return row.head is not None

    def _readable(self, item: tuple[bytes, V | DataLoss]) -> V | None:
        key, value = item
        if isinstance(value, DataLoss):
            self._damaged.found(key, value)
            return None
        return value

    # ---- within a transaction

    async def _row(self, connection: Connection, key: bytes, *, lock: bool = True) -> Row | None:
        row = await tables.read(connection, key, lock=lock)
        if row is not None and row.lease is not None and forgotten(row.lease, self._now_ms()):
            return replace(row, lease=None)
        return row

    async def _live(self, connection: Connection, key: bytes, *, lock: bool = True) -> Row | None:
        """None for a session that expired, too."""
        row = await self._row(connection, key, lock=lock)
        return row if row is not None and not await self._is_over(connection, row) else None

    async def _live_or_removed(self, transaction: Transaction, key: bytes) -> Row | None:
        """What is over makes room for something new."""
        row = await self._row(transaction.connection, key)
        if row is None or not await self._is_over(transaction.connection, row):
            return row
        await self._remove(transaction, row)
        return None

    async def _made(
        self, transaction: Transaction, key: bytes, incarnation: bytes
    ) -> pb.SessionRecord | None:
        """The session that an earlier try or call made; None where there is room for it. Raises
        AlreadyExists."""
        row = await self._live_or_removed(transaction, key)
        if row is None:
            return None
        if row.head is not None and row.head.incarnation == incarnation:
            return await tables.read_whole(transaction.connection, row.head)
        if row.head is not None or under_way(row.lease, self._now_ms()):
            raise rules.session_exists(names_in(key)[1])
        await self._remove(transaction, row)
        return None

    async def _is_over(self, connection: Connection, row: Row) -> bool:
        """Whether nothing in the row counts any more."""
        if under_way(row.lease, self._now_ms()):
            return False
        return row.lease is None if row.head is None else await self._expired(connection, row.head)

    async def _expired(self, connection: Connection, head: pb.SessionRecord) -> bool:
        """Whether nobody used it, or a relative of it, in time."""
        ttl_s, now_ms = self._default_ttl_s, self._now_ms()
        if rules.in_use(head, ttl_s, now_ms):
            return False
        for key, found, lease in await tables.read_relatives(connection, *rules.family_keys(head)):
            relative = self._readable((key, found))
            if relative is None or not rules.are_relatives(relative, head):
                continue
            turn = self._readable((key, lease)) if lease is not None else None
            if rules.in_use(relative, ttl_s, now_ms) or under_way(turn, now_ms):
                return False
        return True

    async def _remove(self, transaction: Transaction, row: Row) -> None:
        unnamed = await tables.remove(transaction.connection, row)
        if row.head is not None and unnamed:
            transaction.afterwards.append(partial(self._unnamed, row.head.model, unnamed))

    async def _call(self, name: str, work: Callable[[Transaction], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.create_task(self._postgres.transact(work))
        self._calls.add(task)
        task.add_done_callback(partial(self._over, name, time.monotonic()))
        return await asyncio.shield(task)

    def _over(self, name: str, began_s: float, task: asyncio.Task[Any]) -> None:
        self._observer.called(name, time.monotonic() - began_s)
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone
