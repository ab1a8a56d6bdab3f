"""What a database adds to the tests of records: others write, connections break, and a turn has a price."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

import psycopg
import pytest

from kvcommons.errors import Conflict, DataLoss, Overloaded, StoreUnavailable, TurnInProgress
from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.records.interface import RecordsObserver
from services.kvstore.records.postgres import CONFLICTS_MAX, Postgres, Transaction
from services.kvstore.records.schema import REVISION, migrate, render
from services.kvstore.records.sql import SqlRecords
from services.kvstore.session import TurnBegin, TurnRenewal
from tests.contract.postgres_server import PostgresServer, Proxy
from tests.contract.records_fixtures import CALL_S, MODEL, Clock, begin, commit, sql, turn
from tests.machine import scaled

T = TypeVar("T")


@pytest.fixture
def schema(postgres: PostgresServer) -> str:
    return postgres.new_schema()


@pytest.fixture
async def proxy(postgres: PostgresServer) -> AsyncIterator[Proxy]:
    proxy = Proxy(postgres)
    await proxy.start()
    yield proxy
    proxy.thaw()
    await proxy.stop()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def opened(stack: AsyncExitStack, conninfo: str, **settings: float) -> SqlRecords:
    records = sql(conninfo, Clock(), **settings)  # type: ignore[arg-type]
    stack.push_async_callback(records.close)
    return records


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What the call gives once the database is back; it may be repeated."""
    async with asyncio.timeout(scaled(60.0)):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


# ---- connections that break


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_whose_connection_breaks_is_there_once(
    proxy: Proxy, schema: str, stack: AsyncExitStack, when: str
) -> None:
    records = await opened(stack, proxy.conninfo + schema)
    await commit(records, "t1", [1])
    _, lease = await begin(records, "t2")
    proxy.cut_at_commit = when
    committed = await records.commit("alice", "s", turn(lease, 1, [2, 3]))
    assert proxy.cut_at_commit == ""
    assert (committed.version, committed.new) == (2, when == "before")
    assert list((await records.get("alice", "s")).tokens) == [1, 2, 3]
    assert (await commit(records, "t3", [4])).version == 3


async def test_what_else_breaks_in_its_commit_is_done_once(
    proxy: Proxy, schema: str, stack: AsyncExitStack
) -> None:
    records = await opened(stack, proxy.conninfo + schema)
    await commit(records, "t", [1])
    proxy.cut_at_commit = "after"
    await records.create("alice", "created", 0)
    proxy.cut_at_commit = "after"
    fork = await records.fork("alice", "s", "forked")
    assert list(fork.tokens) == [1]
    proxy.cut_at_commit = "after"
    await records.delete("alice", "created")
    proxy.cut_at_commit = "after"
    _, lease = await begin(records, "t2")
    proxy.cut_at_commit = "after"
    await records.renew("alice", "s", TurnRenewal(turn_id="t2", fencing=lease.fencing, lease_ms=1000))
    proxy.cut_at_commit = "after"
    await records.abandon("alice", "s", turn_id="t2", fencing=lease.fencing)
    assert proxy.cut_at_commit == ""
    assert [head.session_id for head in (await records.page("alice", "", 10))[0]] == ["forked", "s"]
    await begin(records, "t3")


async def test_a_document_whose_keeping_breaks_is_kept_once(
    proxy: Proxy, schema: str, stack: AsyncExitStack
) -> None:
    records = await opened(stack, proxy.conninfo + schema)
    _, lease = await begin(records, "d")
    document, state = pb.Document(format=1, tokens=range(1000)), pb.DocumentState(tokens=1000)
    renewal = TurnRenewal(
        turn_id="d", fencing=lease.fencing, lease_ms=1000, document_state=state, document=document
    )
    for when in ("before", "after"):
        proxy.cut_at_commit = when
        await records.renew("alice", "s", renewal)
        assert proxy.cut_at_commit == ""
        assert len(await records.documents()) == 1
    proxy.cut_at_commit = "after"
    begun = await records.begin("alice", "s", TurnBegin(turn_id="d", owner="router", lease_ms=1000))
    assert begun.document == document
    proxy.cut_at_commit = "after"
    await records.abandon("alice", "s", turn_id="d", fencing=begun.lease.fencing)
    assert await records.documents() == []
    _, lease = await begin(records, "t")
    assert (await records.commit("alice", "s", turn(lease, 0, [1]))).version == 1


async def test_a_commit_that_comes_again_after_the_next_turn_is_recognised(
    postgres: PostgresServer, schema: str, stack: AsyncExitStack
) -> None:
    records = await opened(stack, postgres.conninfo + schema)
    _, lease = await begin(records, "t1")
    first = turn(lease, 0, [1])
    await records.commit("alice", "s", first)
    await commit(records, "t2", [2])
    again = await records.commit("alice", "s", first)
    assert (again.version, again.new) == (1, False)
    _, third = await begin(records, "t3")
    assert (await records.commit("alice", "s", first)).version == 1
    assert (await records.commit("alice", "s", turn(third, 2, [3]))).version == 3
    assert list((await records.get("alice", "s")).tokens) == [1, 2, 3]


async def test_a_database_that_dies_keeps_what_was_acknowledged(stack: AsyncExitStack) -> None:
    server = PostgresServer()
    stack.callback(server.remove)
    records = await opened(stack, server.conninfo, call_s=scaled(1.0))
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await begin(records, "t0")  # it is not there yet
    server.start()
    await server.ready()
    _, lease = await patiently(lambda: begin(records, "t1"))
    await records.commit("alice", "s", turn(lease, 0, [1]))
    _, lease = await begin(records, "t2")
    server.kill()
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await records.commit("alice", "s", turn(lease, 1, [2]))
    server.start()
    await server.ready()
    assert (await patiently(lambda: records.commit("alice", "s", turn(lease, 1, [2])))).version == 2
    assert list((await records.get("alice", "s")).tokens) == [1, 2]


async def test_a_silent_database_holds_up_nobody_for_long(
    proxy: Proxy, schema: str, stack: AsyncExitStack
) -> None:
    records = await opened(stack, proxy.conninfo + schema, call_s=scaled(1.0))
    _, lease = await patiently(lambda: begin(records, "t1"))
    proxy.freeze()
    async with asyncio.timeout(scaled(30.0)):
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await records.commit("alice", "s", turn(lease, 0, [1]))
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await records.get("alice", "s")
    proxy.thaw()
    assert (await patiently(lambda: records.commit("alice", "s", turn(lease, 0, [1])))).version == 1
    assert list((await records.get("alice", "s")).tokens) == [1]


# ---- others that write


async def test_two_kvstores_race_and_no_turn_is_lost(
    postgres: PostgresServer, schema: str, stack: AsyncExitStack
) -> None:
    both = [await opened(stack, postgres.conninfo + schema) for _ in range(2)]
    dice = random.Random(7)

    async def write(records: SqlRecords, writer: int) -> None:
        for number in range(10):
            while True:
                try:
                    await commit(records, f"{writer} {number}", [100 * writer + number])
                    break
                except TurnInProgress:
                    await asyncio.sleep(0.01 * dice.random())

    async with asyncio.timeout(scaled(60.0)):
        await asyncio.gather(*(write(both[writer % 2], writer) for writer in range(4)))
    for records in both:
        record = await records.get("alice", "s")
        assert record.version == 40
        assert sorted(record.tokens) == [100 * writer + number for writer in range(4) for number in range(10)]
        for writer in range(4):
            own = [token for token in record.tokens if token // 100 == writer]
            assert own == sorted(own)


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
async def test_every_isolation_level_will_do(
    postgres: PostgresServer, schema: str, stack: AsyncExitStack, level: str
) -> None:
    escaped = level.replace(" ", r"\\ ")  # once for libpq, once for the server
    isolated = schema.replace("-c enable", f"-c default_transaction_isolation={escaped} -c enable")
    records = await opened(stack, postgres.conninfo + isolated, connections=8)
    begun = await asyncio.gather(*(begin(records, f"t{n}") for n in range(8)), return_exceptions=True)
    ((_, lease),) = [one for one in begun if isinstance(one, tuple)]
    commits = [records.commit("alice", "s", turn(lease, 0, [1])) for _ in range(8)]
    assert sum(one.new for one in await asyncio.gather(*commits)) == 1
    await asyncio.gather(*(commit(records, f"t{n}", [n], f"s{n}") for n in range(8)))
    assert await records.count() == 9


async def test_a_lease_is_fenced_whichever_kvstore_gave_it(
    postgres: PostgresServer, schema: str, stack: AsyncExitStack
) -> None:
    one, other = [await opened(stack, postgres.conninfo + schema) for _ in range(2)]
    _, stale = await begin(one, "t1", lease_ms=1)
    with pytest.raises(TurnInProgress):
        await begin(other, "t2")
    late = sql(postgres.conninfo + schema, Clock())
    stack.push_async_callback(late.close)
    late._now_ms = lambda: Clock().time_ms + 10  # its clock is ahead: the lease ran out for it
    _, fresh = await begin(late, "t2", lease_ms=60_000)
    assert fresh.fencing > stale.fencing
    with pytest.raises(Conflict, match="another turn"):
        await one.commit("alice", "s", turn(stale, 0, [1]))
    with pytest.raises(Conflict, match="another turn"):
        await one.renew("alice", "s", TurnRenewal(turn_id="t1", fencing=stale.fencing, lease_ms=1000))
    await one.abandon("alice", "s", turn_id="t1", fencing=stale.fencing)
    assert (await other.commit("alice", "s", turn(fresh, 0, [2]))).version == 1


class Observer(RecordsObserver):
    def __init__(self) -> None:
        self.retries: list[str] = []
        self.in_use_most = self.in_use_last = 0

    def retried(self, cause: str) -> None:
        self.retries.append(cause)

    def in_use(self, connections: int) -> None:
        self.in_use_most, self.in_use_last = max(self.in_use_most, connections), connections


async def test_conflicts_are_tried_again_and_not_for_ever(postgres: PostgresServer, schema: str) -> None:
    observer = Observer()
    database = Postgres(
        postgres.conninfo + schema,
        connections=1,
        waiting_max=1,
        call_s=scaled(CALL_S),
        dice=random.Random(1),
        observer=observer,
    )
    tried = 0

    async def conflict(transaction: Transaction, times: int) -> int:
        nonlocal tried
        tried += 1
        await transaction.connection.execute("SELECT nextval('fencing')")
        if tried <= times:
            await transaction.connection.execute(
                "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"
            )
        return tried

    assert await database.transact(lambda transaction: conflict(transaction, 3)) == 4
    tried = 0
    with pytest.raises(StoreUnavailable, match="others changed the same session"):
        await database.transact(lambda transaction: conflict(transaction, 1000))
    assert tried == CONFLICTS_MAX
    assert observer.retries == ["conflict"] * (3 + CONFLICTS_MAX - 1)
    assert (observer.in_use_most, observer.in_use_last) == (1, 0)
    await database.close()


# ---- bounds


async def test_connections_that_are_all_in_use_are_named(
    postgres: PostgresServer, schema: str, stack: AsyncExitStack
) -> None:
    records = await opened(
        stack, postgres.conninfo + schema, connections=1, waiting_max=1, call_s=scaled(1.0)
    )
    await patiently(lambda: commit(records, "t1", [1]))  # makes the tables
    release = asyncio.Event()

    async def hold(transaction: Transaction) -> None:
        await release.wait()

    holding = asyncio.create_task(records._postgres.transact(hold))
    await asyncio.sleep(0)  # it has the one connection now, for longer than the others wait
    others = await asyncio.gather(*(begin(records, f"t{n}") for n in (2, 3)), return_exceptions=True)
    release.set()
    await asyncio.gather(holding, return_exceptions=True)
    messages = [one.message for one in others if isinstance(one, Overloaded)]
    assert len(messages) == 2
    assert any("calls wait for a connection" in message for message in messages)
    assert any("all 1 connections" in message for message in messages)
    assert (await commit(records, "t4", [2])).version == 2


async def test_a_refusal_of_the_database_is_told(postgres: PostgresServer, stack: AsyncExitStack) -> None:
    records = await opened(
        stack, postgres.conninfo.replace("dbname=postgres", "dbname=nowhere"), call_s=scaled(1.0)
    )
    with pytest.raises(StoreUnavailable, match='"nowhere" does not exist'):
        await begin(records, "t1")


# ---- the tables


async def test_kvstores_that_start_at_once_make_the_tables_once(
    postgres: PostgresServer, schema: str, stack: AsyncExitStack
) -> None:
    several = [await opened(stack, postgres.conninfo + schema) for _ in range(4)]
    await asyncio.gather(*(commit(one, f"t{n}", [n], f"s{n}") for n, one in enumerate(several)))
    assert await several[0].count() == 4


def test_whoever_starts_a_stack_is_not_shown_what_alembic_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert "CREATE TABLE" in render(None)
    assert not caplog.records


async def test_tables_of_a_newer_version_are_left_alone(postgres: PostgresServer, schema: str) -> None:
    conninfo = postgres.conninfo + schema
    async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
        await migrate(connection)
        await migrate(connection)
        cursor = await connection.execute("SELECT version_num FROM alembic_version")
        assert await cursor.fetchall() == [(REVISION,)]
        await connection.execute("UPDATE alembic_version SET version_num = '9999'")
        with pytest.raises(DataLoss, match="9999"):
            await migrate(connection)


async def test_a_database_of_the_first_version_goes_on(
    postgres: PostgresServer, schema: str, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions had a digest of all their block identities."""
    conninfo, incarnation = postgres.conninfo + schema, uuid.uuid4()
    ids = [bytes([number]) * 32 for number in range(3)]
    head = pb.SessionRecord(
        format=1, tenant="alice", session_id="s", root="s", version=1, last_turn_id="t1", model=MODEL
    )
    added = pb.SessionRecord(tokens=[1, 2], messages=[pb.Message(role="user", content="hi")])
    async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection:
        with monkeypatch.context() as former:
            former.setattr("services.kvstore.records.schema.REVISION", "0001")
            await migrate(connection)
        await connection.execute(
            "INSERT INTO sessions (incarnation, key, head, blocks, blocks_digest, last_used_ms) "
            "VALUES (%s, %s, %s, 2, %s, 0)",
            [incarnation, session_key("alice", "s"), head.SerializeToString(), b"d" * 16],
        )
        await connection.execute(
            "INSERT INTO turns VALUES (%s, 1, 't1', %s, 0, %s)",
            [incarnation, added.SerializeToString(), ids[0] + ids[1]],
        )
        for block_id in ids[:2]:
            await connection.execute("INSERT INTO block_uses VALUES (%s, %s)", [block_id, incarnation])
    unnamed: list[bytes] = []
    records = sql(conninfo, Clock(), unnamed=lambda model, block_ids: unnamed.extend(block_ids))
    stack.push_async_callback(records.close)
    assert (await commit(records, "t2", [3], block_ids=ids[2:], kept_blocks=2)).version == 2
    record = await records.get("alice", "s")
    assert (list(record.tokens), list(record.block_ids)) == ([1, 2, 3], ids)
    assert [message.content for message in record.messages] == ["hi", "1 from [3]"]
    await records.fork("alice", "s", "copy")
    await records.delete("alice", "s")
    await records.delete("alice", "copy")
    assert unnamed == ids


# ---- what a turn costs


@dataclass(frozen=True)
class Cost:
    """Of one turn: rows that came over the wire, bytes both ways, how often the kvstore waited for an answer,
    rows that the server fetched and wrote."""

    rows: int
    bytes: int
    round_trips: int
    fetched: int
    written: int


async def statistics(records: SqlRecords, postgres: PostgresServer, schema: str) -> tuple[int, int]:
    """Rows fetched and written so far; only what the records' one connection did changes them."""

    async def flush(transaction: Transaction) -> None:
        await transaction.connection.execute("SELECT pg_stat_force_next_flush()")

    await records._postgres.transact(flush)
    await records._postgres.transact(flush)  # what is forced is written at the end of a transaction
    async with await psycopg.AsyncConnection.connect(postgres.conninfo + schema) as connection:
        if connection.info.server_version < 150_000:
            pytest.skip("PostgreSQL counts what was read at once from version 15 on")
        cursor = await connection.execute(
            "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), sum(n_tup_ins + n_tup_upd + n_tup_del) "
            "FROM pg_stat_user_tables WHERE schemaname = current_schema"
        )
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0]), int(row[1])


async def test_a_turn_costs_the_same_however_long_its_session(
    proxy: Proxy, postgres: PostgresServer, schema: str, stack: AsyncExitStack
) -> None:
    records = await opened(stack, proxy.conninfo + schema, connections=1)

    def blocks(session_id: str, tokens: int) -> list[bytes]:
        return [f"{session_id} {number}".encode().ljust(32) for number in range(tokens // 64)]

    async def one_turn(session_id: str, number: int, before: int, new: int) -> None:
        known = f"t{number - 1:04}" if number else ""
        wanted = TurnBegin(turn_id=f"t{number:04}", owner="router", lease_ms=1000, known_turn_id=known)
        begun = await records.begin("alice", session_id, wanted)
        assert (begun.record.version, len(begun.record.tokens)) == (number, 0)
        kept = len(blocks(session_id, before))
        ids = blocks(session_id, before + new)[kept:]
        added = turn(begun.lease, number, [90_000] * new, ids, kept_blocks=kept)
        await records.commit("alice", session_id, added)

    async def cost(session_id: str, number: int, before: int) -> Cost:
        fetched, written = await statistics(records, postgres, schema)
        rows, octets, round_trips = proxy.rows, proxy.bytes, proxy.round_trips
        await one_turn(session_id, number, before, 128)
        rows, octets = proxy.rows - rows, proxy.bytes - octets
        round_trips = proxy.round_trips - round_trips
        fetched_after, written_after = await statistics(records, postgres, schema)
        return Cost(rows, octets, round_trips, fetched_after - fetched, written_after - written)

    costs = []
    for session_id, tokens, turns in (("short", 1280, 10), ("long.", 100_096, 30)):
        await one_turn(session_id, 0, 0, tokens - (turns - 1) * 128)
        for number in range(1, turns):  # the statements are prepared, and the last turn is like all
            await one_turn(session_id, number, tokens - (turns - number) * 128, 128)
        costs.append(await cost(session_id, turns, tokens))
    short, long = costs
    assert (long.rows, long.fetched, long.written) == (short.rows, short.fetched, short.written)
    assert abs(long.bytes - short.bytes) <= 64  # a length that takes a byte more
    assert short.rows <= 5
    assert short.round_trips == long.round_trips == 6  # three of its begin, three of its commit
    assert short.bytes < 8192
