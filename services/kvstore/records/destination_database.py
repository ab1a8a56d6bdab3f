"""A database as that to which session records are moved."""

from __future__ import annotations

import random
import uuid

from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.records import tables
from services.kvstore.records.destination import goes_on_from
from services.kvstore.records.interface import RecordsObserver
from services.kvstore.records.postgres import Postgres, Transaction

CALL_S = 60.0  # the first one waits for the tables to be made, on whatever machine


class DatabaseDestination:
    """Raises what `Postgres` does."""

    def __init__(self, conninfo: str, *, connections: int) -> None:
        self._postgres = Postgres(
            conninfo,
            connections=connections,
            waiting_max=connections,
            call_s=CALL_S,
            dice=random.Random(),
            observer=RecordsObserver(),
        )

    async def put(self, record: pb.SessionRecord) -> bool:
        key = session_key(record.tenant, record.session_id)
        incarnation = uuid.uuid4()

        async def work(transaction: Transaction) -> bool:
            connection = transaction.connection
            row = await tables.read(connection, key, lock=True)
            if row is not None and row.incarnation == incarnation:
                return True  # an earlier try has put it there
            if row is not None and row.head is not None:
                if row.head.version >= record.version:
                    return False
                there = await tables.read_whole(connection, row.head)
                if not goes_on_from(record, there):
                    return False
            if row is not None:
                await tables.remove(connection, row)
            await tables.insert_whole(connection, incarnation, record)
            return True

        return await self._postgres.transact(work)

    async def get(self, tenant: str, session_id: str) -> pb.SessionRecord | None:
        key = session_key(tenant, session_id)

        async def work(transaction: Transaction) -> pb.SessionRecord | None:
            row = await tables.read(transaction.connection, key, lock=True)
            if row is None or row.head is None:
                return None
            return await tables.read_whole(transaction.connection, row.head)

        return await self._postgres.transact(work)

    async def close(self) -> None:
        await self._postgres.close()
