"""Records of both kinds for the tests of `Records`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import psycopg
from psycopg.sql import SQL, Identifier

from kvcommons.homes import session_key
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.families import HEADS, LEASES, RECORDS
from services.kvstore.records.embedded import EmbeddedRecords
from services.kvstore.records.interface import Records
from services.kvstore.records.sql import SqlRecords
from services.kvstore.session import Committed, TurnBegin, TurnCommit
from services.kvstore.sessions import Sessions, open_sessions
from services.kvstore.turn_lease import TurnLease
from tests.machine import scaled

MODEL = b"m" * 32
CALL_S = 10.0

Unnamed = Callable[[bytes, Sequence[bytes]], None]


class Clock:
    """Turned by the test."""

    def __init__(self) -> None:
        self.time_ms = 1_750_000_000_000

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic_s(self) -> float:
        return self.time_ms / 1000


def embedded(
    folder: Path, clock: Clock, default_ttl_s: int, unnamed: Unnamed, executor: Executor
) -> EmbeddedRecords:
    sessions = Sessions(open_sessions(folder), default_ttl_s=default_ttl_s, clock=clock, unnamed=unnamed)
    return EmbeddedRecords(sessions, executor)


def sql(
    conninfo: str,
    clock: Clock,
    default_ttl_s: int = 0,
    unnamed: Unnamed = lambda model, block_ids: None,
    *,
    connections: int = 4,
    waiting_max: int = 100,
    call_s: float = scaled(CALL_S),
) -> SqlRecords:
    return SqlRecords(
        conninfo,
        default_ttl_s=default_ttl_s,
        clock=clock,
        unnamed=unnamed,
        connections=connections,
        waiting_max=waiting_max,
        call_s=call_s,
    )


class Home:
    """Where records lie. `open` gives them; again, after `close`, as they were."""

    def __init__(self, kind: str, folder: Path, conninfo: str, executor: Executor) -> None:
        self._kind, self._folder, self._conninfo, self._executor = kind, folder, conninfo, executor
        self.clock = Clock()
        self.default_ttl_s = 3600
        self.unnamed: list[bytes] = []
        self._opened: list[Records] = []

    async def open(self) -> Records:
        records: Records
        if self._kind == "embedded":
            records = embedded(self._folder, self.clock, self.default_ttl_s, self._forget, self._executor)
        else:
            records = sql(self._conninfo, self.clock, self.default_ttl_s, self._forget)
        self._opened.append(records)
        return records

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def damage(self, session_id: str, value: bytes, what: str = "head") -> None:
        """Writes `value` where a session's head ("head") or its turn's lease ("lease") is. Nobody has the
        records open."""
        key = session_key("alice", session_id)
        if self._kind == "embedded":
            table = open_sessions(self._folder)
            families = (RECORDS, HEADS) if what == "head" else (LEASES,)
            table.write([(family, key, value) for family in families])
            table.close()
            return
        column = Identifier(what)
        async with await psycopg.AsyncConnection.connect(self._conninfo) as connection:
            statement = SQL("UPDATE sessions SET {} = %s WHERE key = %s").format(column)
            await connection.execute(statement, [value, key])

    def _forget(self, model: bytes, block_ids: Sequence[bytes]) -> None:
        assert model == MODEL
        self.unnamed += block_ids


def block(number: int) -> bytes:
    """The identity of one of MODEL's blocks."""
    return bytes([number]) * 32


async def begin(
    records: Records, turn_id: str, session_id: str = "s", *, owner: str = "router", lease_ms: int = 1000
) -> tuple[pb.SessionRecord, TurnLease]:
    wanted = TurnBegin(turn_id=turn_id, owner=owner, lease_ms=lease_ms)
    begun = await records.begin("alice", session_id, wanted)
    assert not begun.after_known
    return begun.record, begun.lease


def turn(
    lease: TurnLease,
    version: int,
    tokens: Sequence[int],
    block_ids: Sequence[bytes] = (),
    truncations: Sequence[pb.TruncationRecord] = (),
    *,
    kept_blocks: int = 0,
) -> TurnCommit:
    return TurnCommit(
        turn_id=lease.turn_id,
        fencing=lease.fencing,
        expected_version=version,
        model=MODEL,
        model_name="demo",
        new_tokens=tokens,
        new_messages=[pb.Message(role="user", content=f"{len(tokens)} from {tokens[:1]}")],
        kept_blocks=kept_blocks,
        block_ids=block_ids,
        new_truncations=truncations,
    )


async def commit(
    records: Records,
    turn_id: str,
    tokens: Sequence[int],
    session_id: str = "s",
    block_ids: Sequence[bytes] = (),
    *,
    kept_blocks: int = 0,
) -> Committed:
    record, lease = await begin(records, turn_id, session_id)
    added = turn(lease, record.version, tokens, block_ids, kept_blocks=kept_blocks)
    return await records.commit("alice", session_id, added)
