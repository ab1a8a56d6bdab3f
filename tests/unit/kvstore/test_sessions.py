"""Session records with a real RocksDB and a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    SessionNotFound,
    TurnInProgress,
    VersionConflict,
)
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.session import LEASE_KEPT_MS, TurnCommit, TurnLease
from services.kvstore.sessions import Sessions, open_sessions

MODEL = b"m" * 32


class Clock:
    def __init__(self) -> None:
        self.time_ms = 1_750_000_000_000

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic_s(self) -> float:
        return self.time_ms / 1000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(tmp_path: Path, clock: Clock) -> Iterator[Sessions]:
    opened = Sessions(open_sessions(tmp_path), default_ttl_s=3600, clock=clock)
    yield opened
    opened.close()


def begin(
    sessions: Sessions, turn_id: str, session_id: str = "s", *, owner: str = "router", lease_ms: int = 1000
) -> tuple[pb.SessionRecord, TurnLease]:
    return sessions.begin("alice", session_id, turn_id=turn_id, owner=owner, lease_ms=lease_ms)


def turn(lease: TurnLease, version: int, tokens: list[int]) -> TurnCommit:
    return TurnCommit(
        turn_id=lease.turn_id,
        fencing=lease.fencing,
        expected_version=version,
        model=MODEL,
        model_name="demo",
        new_tokens=tokens,
        new_messages=[pb.Message(role="user", content=str(tokens))],
        block_ids=[bytes([len(tokens)]) * 32],
    )


def commit(sessions: Sessions, turn_id: str, tokens: list[int], session_id: str = "s") -> int:
    record, lease = begin(sessions, turn_id, session_id)
    return sessions.commit("alice", session_id, turn(lease, record.version, tokens)).version


def test_turns_add_up_and_survive(tmp_path: Path, clock: Clock) -> None:
    sessions = Sessions(open_sessions(tmp_path), default_ttl_s=0, clock=clock)
    record, _ = begin(sessions, "t1")
    assert (record.version, list(record.tokens)) == (0, [])
    assert commit(sessions, "t1", [1, 2]) == 1
    assert commit(sessions, "t2", [3]) == 2
    sessions.close()
    again = Sessions(open_sessions(tmp_path), default_ttl_s=0, clock=clock)
    stored = again.get("alice", "s")
    assert list(stored.tokens) == [1, 2, 3]
    assert [message.content for message in stored.messages] == ["[1, 2]", "[3]"]
    assert list(stored.block_ids) == [b"\x01" * 32]
    assert (stored.version, stored.root, stored.last_turn_id, stored.model) == (2, "s", "t2", MODEL)
    assert again.count == 1
    again.close()


def test_one_turn_at_a_time(sessions: Sessions, clock: Clock) -> None:
    _, lease = begin(sessions, "t1")
    with pytest.raises(TurnInProgress) as error:
        begin(sessions, "t2")
    assert 0 < error.value.retry_after_ms <= 1000
    sessions.abandon("alice", "s", turn_id="t1", fencing=lease.fencing)
    _, next_lease = begin(sessions, "t2")
    assert next_lease.fencing > lease.fencing


def test_a_turn_that_asks_twice_keeps_its_lease(sessions: Sessions) -> None:
    _, lease = begin(sessions, "t1")
    _, same = begin(sessions, "t1", owner="another router")
    assert (same.fencing, same.owner) == (lease.fencing, "another router")


def test_a_commit_is_idempotent_by_turn(sessions: Sessions) -> None:
    _, lease = begin(sessions, "t1")
    first = turn(lease, 0, [1, 2])
    assert sessions.commit("alice", "s", first).new
    repeated = sessions.commit("alice", "s", first)
    assert (repeated.version, repeated.new) == (1, False)
    assert list(sessions.get("alice", "s").tokens) == [1, 2]


def test_a_stale_owner_cannot_commit_over_the_next(sessions: Sessions, clock: Clock) -> None:
    _, stale = begin(sessions, "t1")
    clock.time_ms += 1001
    _, fresh = begin(sessions, "t2")
    assert fresh.fencing > stale.fencing
    with pytest.raises(Conflict, match="another turn"):
        sessions.commit("alice", "s", turn(stale, 0, [9]))
    with pytest.raises(Conflict, match="another turn"):
        sessions.renew("alice", "s", turn_id="t1", fencing=stale.fencing, lease_ms=1000)
    sessions.abandon("alice", "s", turn_id="t1", fencing=stale.fencing)  # takes nothing from t2
    assert sessions.commit("alice", "s", turn(fresh, 0, [1])).version == 1
    with pytest.raises(Conflict):
        sessions.renew("alice", "s", turn_id="t1", fencing=stale.fencing, lease_ms=1000)


def test_a_lease_that_ran_out_still_counts_while_nobody_took_it(sessions: Sessions, clock: Clock) -> None:
    _, lease = begin(sessions, "t1")
    clock.time_ms += 60_000
    sessions.renew("alice", "s", turn_id="t1", fencing=lease.fencing, lease_ms=1000)
    with pytest.raises(TurnInProgress):
        begin(sessions, "t2")
    clock.time_ms += 60_000
    assert sessions.commit("alice", "s", turn(lease, 0, [1])).version == 1


def test_the_version_decides(sessions: Sessions) -> None:
    commit(sessions, "t1", [1])
    _, lease = begin(sessions, "t2")
    with pytest.raises(VersionConflict, match="version 1"):
        sessions.commit("alice", "s", turn(lease, 0, [2]))
    assert list(sessions.get("alice", "s").tokens) == [1]


def test_leases_and_fencing_survive_a_restart(tmp_path: Path, clock: Clock) -> None:
    sessions = Sessions(open_sessions(tmp_path), default_ttl_s=0, clock=clock)
    _, lease = begin(sessions, "t1", lease_ms=1000)
    sessions.renew("alice", "s", turn_id="t1", fencing=lease.fencing, lease_ms=5000)
    sessions.close()
    again = Sessions(open_sessions(tmp_path), default_ttl_s=0, clock=clock)
    clock.time_ms += 4000
    with pytest.raises(TurnInProgress):
        begin(again, "t2")
    _, other = begin(again, "t1", "other")
    assert other.fencing > lease.fencing
    assert again.commit("alice", "s", turn(lease, 0, [1])).version == 1
    again.close()


def test_a_deleted_session_stays_deleted(sessions: Sessions) -> None:
    commit(sessions, "t1", [1])
    _, lease = begin(sessions, "t2")
    sessions.delete("alice", "s")
    with pytest.raises(SessionNotFound):
        sessions.get("alice", "s")
    with pytest.raises(SessionNotFound):
        sessions.commit("alice", "s", turn(lease, 1, [2]))
    with pytest.raises(SessionNotFound):
        sessions.delete("alice", "s")
    assert sessions.count == 0
    assert begin(sessions, "t3")[0].version == 0


def test_another_tenants_session_is_not_there(sessions: Sessions) -> None:
    commit(sessions, "t1", [1])
    with pytest.raises(SessionNotFound):
        sessions.get("bob", "s")
    with pytest.raises(SessionNotFound):
        sessions.fork("bob", "s", "copy")
    with pytest.raises(SessionNotFound):
        sessions.delete("bob", "s")
    assert sessions.page("bob", "", 10) == ([], False)
    assert sessions.create("bob", "s", 0).version == 0  # his own, of the same name
    assert list(sessions.get("alice", "s").tokens) == [1]


def test_a_fork_goes_its_own_way(sessions: Sessions) -> None:
    commit(sessions, "t1", [1, 2])
    fork = sessions.fork("alice", "s", "s-fork")
    assert (fork.parent, fork.root, list(fork.tokens), fork.version) == ("s", "s", [1, 2], 1)
    grandchild = sessions.fork("alice", "s-fork", "")
    assert (grandchild.parent, grandchild.root) == ("s-fork", "s")
    record, lease = begin(sessions, "t1", "s-fork")  # a turn id of the original is new here
    assert sessions.commit("alice", "s-fork", turn(lease, record.version, [3])).new
    assert list(sessions.get("alice", "s-fork").tokens) == [1, 2, 3]
    assert list(sessions.get("alice", "s").tokens) == [1, 2]
    with pytest.raises(AlreadyExists):
        sessions.fork("alice", "s", "s-fork")


def test_creating_takes_a_free_name_only(sessions: Sessions) -> None:
    made_up = sessions.create("alice", "", 0)
    assert sessions.get("alice", made_up.session_id) == made_up
    sessions.create("alice", "s", 5)
    with pytest.raises(AlreadyExists):
        sessions.create("alice", "s", 5)
    begin(sessions, "t1", "begun")
    with pytest.raises(AlreadyExists):
        sessions.create("alice", "begun", 5)
    for name in ("", "x" * 600):
        with pytest.raises(InvalidInput):
            sessions.get("alice", name)


def test_pages_are_in_order_and_light(sessions: Sessions) -> None:
    for name in ("c", "a", "d", "b"):
        commit(sessions, f"turn of {name}", [1, 2, 3], name)
    sessions.create("alice2", "between", 0)
    first, more = sessions.page("alice", "", 3)
    assert [head.session_id for head in first] == ["a", "b", "c"]
    assert more
    assert all(not head.tokens and not head.messages and not head.block_ids for head in first)
    assert [head.session_id for head in sessions.page("alice", "c", 3)[0]] == ["d"]
    with pytest.raises(InvalidInput):
        sessions.page("alice", "", 0)


def test_sessions_end_when_nobody_uses_them(sessions: Sessions, clock: Clock) -> None:
    sessions.create("alice", "short", 10)
    sessions.create("alice", "default", 0)
    commit(sessions, "t", [1], "used")
    clock.time_ms += 10_000
    with pytest.raises(SessionNotFound):
        sessions.get("alice", "short")
    clock.time_ms += 3_580_000
    begin(sessions, "t2", "used", lease_ms=60_000)
    clock.time_ms += 20_000
    assert sessions.page("alice", "", 10)[0] == []
    assert sessions.sweep() == 1  # "default"; a turn of "used" is under way
    assert sessions.count == 1
    clock.time_ms += 60_000
    assert sessions.sweep() == 1
    assert sessions.count == 0
    assert sessions.sweep() == 0


def test_forgotten_leases_are_swept(sessions: Sessions, clock: Clock) -> None:
    _, lease = begin(sessions, "t1")
    clock.time_ms += LEASE_KEPT_MS + 2000
    sessions.sweep()
    with pytest.raises(SessionNotFound):
        sessions.renew("alice", "s", turn_id="t1", fencing=lease.fencing, lease_ms=1000)


@pytest.mark.parametrize("lease_ms", [0, 10**9])
def test_a_lease_has_bounds(sessions: Sessions, lease_ms: int) -> None:
    with pytest.raises(InvalidInput, match="lease_ms"):
        begin(sessions, "t1", lease_ms=lease_ms)
