"""Connections to a database that speaks PostgreSQL's protocol, and transactions on them that end in time.

A transaction is tried again where the database says that it did not happen (a conflict with another one), and
where nobody knows (the connection broke in the middle of its commit): what is done in it has to find out
whether it was done before.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import psycopg
from psycopg import errors

from kvcommons.errors import Overloaded, StoreUnavailable
from services.kvstore.records.interface import RecordsObserver
from services.kvstore.records.schema import migrate

T = TypeVar("T")
Connection = psycopg.AsyncConnection[tuple[object, ...]]

CONFLICTS_MAX = 10  # in one call
MIGRATION_S = 60.0
IDLE_S = 60.0
_DELAY_S_MIN = 0.005
_DELAY_S_MAX = 0.2

# The transaction did not happen, for what others did at the same time.
_CONFLICTS = (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation)
# Of a server that stops or starts, or does not write any more: another connection may find another one.
_MOVED = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.ReadOnlySqlTransaction,
    errors.StatementCompletionUnknown,
)


class ReadAgain(Exception):
    """What a transaction read does not fit together: another one came in between."""


@dataclass(slots=True, kw_only=True)
class Transaction:
    """One try of a transaction. `afterwards`: what to call once it has happened.

    The connection is in pipeline mode: a statement is sent with those behind it, once somebody asks for an
    answer, which brings all answers until then; one that fails raises there.
    """

    connection: Connection
    afterwards: list[Callable[[], None]] = field(default_factory=list)


class Postgres:
    """At most `connections` at once, and at most `waiting_max` calls that wait for one. On the event loop's
    thread.

    `conninfo` is what libpq takes, a URL or `key=value` pairs: several hosts, TLS and where the password is
    are in it, or in libpq's environment. Connections are made when they are needed, and kept.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        connections: int,
        waiting_max: int,
        call_s: float,
        dice: random.Random,
        observer: RecordsObserver,
    ) -> None:
        self._conninfo = conninfo
        self._connections = connections
        self._waiting_max = waiting_max
        self._call_s = call_s
        self._dice = dice
        self._observer = observer
        self._free = asyncio.Semaphore(connections)
        self._waiting = self._in_use = 0
        self._idle: list[tuple[Connection, float]] = []  # since when; the last one was used last
        self._migrated = False
        self._migrating: asyncio.Task[None] | None = None
        self._why = ""  # the last connection that broke, or could not be made

    async def close(self) -> None:
        """After the last call."""
        if self._migrating is not None:
            await asyncio.wait([self._migrating])
        await self._drop_idle()

    async def transact(self, work: Callable[[Transaction], Awaitable[T]]) -> T:
        """What `work` returns from a transaction that was committed; its errors take the transaction back.

        Raises StoreUnavailable where no transaction came to its end in `call_s`, or too many met with others,
        and Overloaded where no connection came free. Raises DataLoss where the tables are of a newer version.
        """
        deadline_s = asyncio.get_running_loop().time() + self._call_s
        await self._wait_for_turn(deadline_s)
        self._count(1)
        try:
            return await self._try_until(deadline_s, work)
        finally:
            self._count(-1)
            self._free.release()

    def _count(self, more: int) -> None:
        self._in_use += more
        self._observer.in_use(self._in_use)

    async def _wait_for_turn(self, deadline_s: float) -> None:
        if self._free.locked() and self._waiting >= self._waiting_max:
            raise Overloaded(
                f"{self._waiting} calls wait for a connection to the database of records: retry later",
                retry_after_ms=500,
            )
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Overloaded(
                f"all {self._connections} connections to the database of records were in use for "
                f"{self._call_s:g} s{self._reason}: retry later, or allow more connections",
                retry_after_ms=1000,
            ) from error
        finally:
            self._waiting -= 1

    async def _try_until(self, deadline_s: float, work: Callable[[Transaction], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        conflicts, delay_s = 0, _DELAY_S_MIN
        while loop.time() < deadline_s:
            connection: Connection | None = None
            try:
                connection = await self._connection(deadline_s)
                transaction = Transaction(connection=connection)
                with _cut_off(connection, deadline_s):
                    result = await _carry_out(transaction, work)
                for call in transaction.afterwards:
                    call()
                return result
            except (*_CONFLICTS, ReadAgain) as error:
                conflicts += 1
                if conflicts == CONFLICTS_MAX:
                    raise StoreUnavailable(
                        f"others changed the same session {conflicts} times in between: try again",
                        retry_after_ms=500,
                    ) from error
                self._observer.retried("conflict")
            except psycopg.Error as error:
                self._why = _line(error)
                if connection is not None:
                    if not (connection.broken or connection.closed or isinstance(error, _MOVED)):
                        raise StoreUnavailable(
                            f"the database of records refused ({error.sqlstate}): {self._why}"
                        ) from error
                    await connection.close()
                    await self._drop_idle()  # what broke one has mostly broken all
                self._observer.retried("connection")
            finally:
                if connection is not None and not connection.closed:
                    self._idle.append((connection, loop.time()))
            delay_s = min(delay_s * 2, _DELAY_S_MAX)
            await asyncio.sleep(min(delay_s * self._dice.random(), max(deadline_s - loop.time(), 0.0)))
        raise StoreUnavailable(
            f"the database of records did not answer for {self._call_s:g} s{self._reason}: see that it runs "
            "where the setting records says, and that this kvstore may connect to it",
            retry_after_ms=1000,
        )

    @property
    def _reason(self) -> str:
        return f" ({self._why})" if self._why else ""

    async def _connection(self, deadline_s: float) -> Connection:
        """Raises psycopg's errors, and DataLoss where the tables are of a newer version."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection, used_s = self._idle.pop()
            if used_s + IDLE_S > now_s:
                return connection
            await connection.close()  # what lies between may have forgotten it
        if not self._migrated:
            if self._migrating is None or self._migrating.done():
                self._migrating = asyncio.create_task(self._migrate(), name="migrate")
            try:
                async with asyncio.timeout_at(deadline_s):
                    await asyncio.shield(self._migrating)
            except TimeoutError as error:
                raise psycopg.OperationalError(self._why or "the tables are not ready yet") from error
        return await self._connect(deadline_s)

    async def _connect(self, deadline_s: float) -> Connection:
        left_s = deadline_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(deadline_s):
                connection = await psycopg.AsyncConnection.connect(
                    self._conninfo, autocommit=True, connect_timeout=max(2, math.ceil(left_s))
                )
        except TimeoutError as error:
            raise psycopg.OperationalError("connecting took too long") from error
        try:
            with _cut_off(connection, deadline_s):
                # The server gives up what this side has given up.
                limit = f"{math.ceil(self._call_s * 1000)}ms"
                async with connection.pipeline():
                    for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
                        await connection.execute("SELECT set_config(%s, %s, false)", [name, limit])
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _migrate(self) -> None:
        now_s = asyncio.get_running_loop().time()
        connection = await self._connect(now_s + self._call_s)
        try:
            with _cut_off(connection, now_s + MIGRATION_S):
                await connection.execute("SELECT set_config('statement_timeout', '0', false)")
                await migrate(connection)
            self._migrated = True
        finally:
            await connection.close()

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop()[0].close()


async def _carry_out(transaction: Transaction, work: Callable[[Transaction], Awaitable[T]]) -> T:
    connection = transaction.connection
    try:
        async with connection.pipeline() as pipeline:
            await connection.execute("BEGIN")
            result = await work(transaction)
            # A row that is new has no lock yet. If its INSERT went out with COMMIT and reached the server
            # late, another connection might have made it, and somebody deleted it, before.
            await pipeline.sync()
            await connection.execute("COMMIT")  # sent at the end of the pipeline
        return result
    except BaseException:
        if not connection.closed:
            with suppress(psycopg.Error):
                await connection.rollback()
        raise


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


@contextmanager
def _cut_off(connection: Connection, deadline_s: float) -> Iterator[None]:
    """Ends the connection at the deadline: whoever waits on it then is told, however silent the server is."""
    own = os.dup(connection.fileno())

    def cut() -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(own)) as one:
            one.shutdown(socket.SHUT_RDWR)

    timer = asyncio.get_running_loop().call_at(deadline_s, cut)
    try:
        yield
    finally:
        timer.cancel()
        os.close(own)
