"""What holds of session records wherever they lie: in RocksDB, and in a real PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from kvcommons.errors import (
    AlreadyExists,
    Conflict,
    DataLoss,
    InvalidInput,
    SessionNotFound,
    TurnInProgress,
    VersionConflict,
)
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.records.interface import Records
from services.kvstore.records.sql import SqlRecords
from services.kvstore.session import Cut, TurnRenewal
from services.kvstore.turn_lease import LEASE_KEPT_MS
from tests.contract.records_fixtures import MODEL, Clock, Home, begin, block, commit, turn

pytest_plugins = ("tests.contract.records_home",)


async def test_turns_add_up_and_survive(home: Home) -> None:
    records = await home.open()
    record, _ = await begin(records, "t1")
    assert (record.version, list(record.tokens)) == (0, [])
    assert (await commit(records, "t1", [1, 2], block_ids=[block(1)])).version == 1
    assert (await commit(records, "t2", [300_000], block_ids=[block(2)], kept_blocks=1)).version == 2
    before = await records.get("alice", "s")
    await home.close()
    again = await home.open()
    stored = await again.get("alice", "s")
    assert stored == before
    assert list(stored.tokens) == [1, 2, 300_000]
    assert [message.content for message in stored.messages] == ["2 from [1]", "1 from [300000]"]
    assert list(stored.block_ids) == [block(1), block(2)]
    assert (stored.version, stored.root, stored.last_turn_id, stored.model) == (2, "s", "t2", MODEL)
    assert (await begin(again, "t3"))[0] == stored
    assert await again.count() == 1


async def test_one_turn_at_a_time(records: Records) -> None:
    _, lease = await begin(records, "t1")
    with pytest.raises(TurnInProgress) as error:
        await begin(records, "t2")
    assert 0 < error.value.retry_after_ms <= 1000
    await records.abandon("alice", "s", turn_id="t1", fencing=lease.fencing)
    await records.abandon("alice", "s", turn_id="t1", fencing=lease.fencing)
    _, next_lease = await begin(records, "t2")
    assert next_lease.fencing > lease.fencing


async def test_of_many_that_begin_at_once_one_does(records: Records) -> None:
    for session_id in ("new", "old"):
        if session_id == "old":
            await commit(records, "t", [1], session_id)
        begun = await asyncio.gather(
            *(begin(records, f"turn {number}", session_id) for number in range(8)), return_exceptions=True
        )
        assert sum(isinstance(one, tuple) for one in begun) == 1
        assert sum(isinstance(one, TurnInProgress) for one in begun) == 7


async def test_a_turn_that_asks_twice_keeps_its_lease(records: Records) -> None:
    _, lease = await begin(records, "t1")
    _, same = await begin(records, "t1", owner="another router")
    assert (same.fencing, same.owner) == (lease.fencing, "another router")


async def test_the_first_turns_tools_stay(home: Home) -> None:
    """And lists do not read them."""
    records = await home.open()
    record, lease = await begin(records, "t1")
    call = pb.ToolCall(id="c", name="f", arguments="{}")
    message = pb.Message(role="assistant", reasoning="hm", tool_calls=[call])
    first = dataclasses.replace(turn(lease, 0, [1]), tools='["f"]', new_messages=[message])
    await records.commit("alice", "s", first)
    await commit(records, "t2", [2])
    await home.close()
    again = await home.open()
    stored = await again.get("alice", "s")
    assert (stored.tools, stored.messages[0]) == ('["f"]', message)
    assert [one.tools for one in (await again.page("alice", "", 10))[0]] == [""]
    fork = await again.fork("alice", "s", "other")
    assert fork.tools == '["f"]'
    record, lease = await begin(again, "t3")
    with pytest.raises(InvalidInput, match="first turn"):
        await again.commit("alice", "s", dataclasses.replace(turn(lease, record.version, [3]), tools='["g"]'))


async def test_a_commit_is_idempotent_by_turn(records: Records) -> None:
    _, lease = await begin(records, "t1")
    first = turn(lease, 0, [1, 2])
    both = await asyncio.gather(*(records.commit("alice", "s", first) for _ in range(2)))
    assert sorted(one.new for one in both) == [False, True]
    repeated = await records.commit("alice", "s", first)
    assert (repeated.version, repeated.new) == (1, False)
    assert list((await records.get("alice", "s")).tokens) == [1, 2]


async def test_a_commit_that_is_repeated_after_later_turns_is_told_the_truth(records: Records) -> None:
    """A database knows that it was committed. A folder does not, and must not say that it was not."""
    _, lease = await begin(records, "t1")
    first = turn(lease, 0, [1])
    await records.commit("alice", "s", first)
    await commit(records, "t2", [2])
    for later_is_under_way in (False, True):
        if later_is_under_way:
            await begin(records, "t3")
        if isinstance(records, SqlRecords):
            assert not (await records.commit("alice", "s", first)).new
            continue
        with pytest.raises(VersionConflict, match=r"version 2.*or not at all"):
            await records.commit("alice", "s", first)
    assert list((await records.get("alice", "s")).tokens) == [1, 2]


async def test_a_stale_owner_cannot_commit_over_the_next(records: Records, clock: Clock) -> None:
    _, stale = await begin(records, "t1")
    clock.time_ms += 1001
    _, fresh = await begin(records, "t2")
    assert fresh.fencing > stale.fencing
    with pytest.raises(Conflict, match="another turn"):
        await records.commit("alice", "s", turn(stale, 0, [9]))
    with pytest.raises(Conflict, match="another turn"):
        await records.renew("alice", "s", TurnRenewal(turn_id="t1", fencing=stale.fencing, lease_ms=1000))
    await records.abandon("alice", "s", turn_id="t1", fencing=stale.fencing)  # takes nothing from t2
    assert (await records.commit("alice", "s", turn(fresh, 0, [1]))).version == 1
    with pytest.raises(Conflict):
        await records.renew("alice", "s", TurnRenewal(turn_id="t1", fencing=stale.fencing, lease_ms=1000))


async def test_a_lease_that_ran_out_still_counts_while_nobody_took_it(records: Records, clock: Clock) -> None:
    _, lease = await begin(records, "t1")
    clock.time_ms += 60_000
    await records.renew("alice", "s", TurnRenewal(turn_id="t1", fencing=lease.fencing, lease_ms=1000))
    with pytest.raises(TurnInProgress):
        await begin(records, "t2")
    clock.time_ms += 60_000
    assert (await records.commit("alice", "s", turn(lease, 0, [1]))).version == 1


async def test_the_version_decides(records: Records) -> None:
    await commit(records, "t1", [1])
    _, lease = await begin(records, "t2")
    with pytest.raises(VersionConflict, match="version 1"):
        await records.commit("alice", "s", turn(lease, 0, [2]))
    assert list((await records.get("alice", "s")).tokens) == [1]


async def test_leases_and_fencing_survive_a_restart(home: Home, clock: Clock) -> None:
    home.default_ttl_s = 0
    records = await home.open()
    _, lease = await begin(records, "t1", lease_ms=1000)
    await records.renew("alice", "s", TurnRenewal(turn_id="t1", fencing=lease.fencing, lease_ms=5000))
    await home.close()
    again = await home.open()
    clock.time_ms += 4000
    with pytest.raises(TurnInProgress):
        await begin(again, "t2")
    _, other = await begin(again, "t1", "other")
    assert other.fencing > lease.fencing
    assert (await again.commit("alice", "s", turn(lease, 0, [1]))).version == 1


async def test_a_deleted_session_stays_deleted(records: Records) -> None:
    await commit(records, "t1", [1])
    _, lease = await begin(records, "t2")
    await records.delete("alice", "s")
    with pytest.raises(SessionNotFound):
        await records.get("alice", "s")
    with pytest.raises(SessionNotFound):
        await records.commit("alice", "s", turn(lease, 1, [2]))
    with pytest.raises(SessionNotFound):
        await records.renew("alice", "s", TurnRenewal(turn_id="t2", fencing=lease.fencing, lease_ms=1000))
    with pytest.raises(SessionNotFound):
        await records.delete("alice", "s")
    assert await records.count() == 0
    record, fresh = await begin(records, "t3")
    assert (record.version, list(record.tokens)) == (0, [])
    assert fresh.fencing > lease.fencing
    with pytest.raises(Conflict):
        await records.commit("alice", "s", turn(lease, 1, [2]))
    assert (await records.commit("alice", "s", turn(fresh, 0, [7]))).version == 1
    assert list((await records.get("alice", "s")).tokens) == [7]


async def test_another_tenants_session_is_not_there(records: Records) -> None:
    await commit(records, "t1", [1])
    with pytest.raises(SessionNotFound):
        await records.get("bob", "s")
    with pytest.raises(SessionNotFound):
        await records.fork("bob", "s", "copy")
    with pytest.raises(SessionNotFound):
        await records.delete("bob", "s")
    assert await records.page("bob", "", 10) == ([], False)
    assert (await records.create("bob", "s", 0)).version == 0  # his own, of the same name
    assert list((await records.get("alice", "s")).tokens) == [1]


async def test_a_fork_goes_its_own_way(records: Records) -> None:
    await commit(records, "t1", [1, 2])
    fork = await records.fork("alice", "s", "s-fork")
    assert (fork.parent, fork.root, list(fork.tokens), fork.version) == ("s", "s", [1, 2], 1)
    grandchild = await records.fork("alice", "s-fork", "s-fork-fork")
    assert (grandchild.parent, grandchild.root) == ("s-fork", "s")
    record, lease = await begin(records, "t1", "s-fork")  # a turn id of the original is new here
    assert (await records.commit("alice", "s-fork", turn(lease, record.version, [3]))).new
    assert list((await records.get("alice", "s-fork")).tokens) == [1, 2, 3]
    assert list((await records.get("alice", "s")).tokens) == [1, 2]
    with pytest.raises(AlreadyExists):
        await records.fork("alice", "s", "s-fork")
    await records.delete("alice", "s")
    assert list((await records.get("alice", "s-fork")).tokens) == [1, 2, 3]


async def test_a_fork_at_a_cut_has_what_came_before_it(home: Home) -> None:
    """Over a truncation, too; and blocks that only the fork's parent names go with it."""
    records = await home.open()
    ids = [bytes([at]) * 32 for at in range(8)]
    ends = 0
    for at, (tokens, blocks, kept) in enumerate([(4, ids[:2], 0), (4, ids[2:4], 2), (2, ids[4:6], 1)]):
        record, lease = await begin(records, f"t{at}")
        ends += tokens
        said = [
            pb.Message(role="user", content="q"),
            pb.Message(role="assistant", content="a", end_token=ends),
        ]
        dropped = pb.TruncationRecord(at_token=8, kept_head_tokens=2, dropped_tokens=4)
        one = turn(
            lease, record.version, list(range(tokens)), blocks, [dropped] if at == 2 else [], kept_blocks=kept
        )
        await records.commit("alice", "s", dataclasses.replace(one, new_messages=said))
    whole = await records.get("alice", "s")
    assert list(whole.block_ids) == [ids[0], *ids[4:6]]

    for messages, tokens, blocks, dropped in ((6, 10, whole.block_ids, 4), (4, 8, [], 0), (2, 4, [], 0)):
        name = f"s~{messages}"
        cut = Cut(messages=messages, block_tokens=2)
        fork = await records.fork("alice", "s", name, b"", cut)
        assert (fork.parent, fork.root, fork.parent_messages) == ("s", "s", messages)
        assert list(fork.tokens) == list(whole.tokens)[:tokens]
        assert list(fork.messages) == list(whole.messages)[:messages]
        assert (list(fork.block_ids), fork.dropped_tokens) == (list(blocks), dropped)
        record, lease = await begin(records, "on", name)
        assert (await records.commit("alice", name, turn(lease, record.version, [7]))).new
        assert list((await records.get("alice", name)).tokens) == [*list(whole.tokens)[:tokens], 7]
    empty = await records.fork("alice", "s", "s~0", b"", Cut(messages=0, block_tokens=2))
    assert (empty.version, list(empty.tokens), empty.parent_messages) == (0, [], 0)
    for messages in (1, 3, 7):
        with pytest.raises(InvalidInput, match="no turn"):
            await records.fork("alice", "s", "other", b"", Cut(messages=messages, block_tokens=2))
    with pytest.raises(SessionNotFound):
        await records.get("alice", "other")
    await home.close()
    again = await home.open()
    assert list((await again.get("alice", "s~4")).tokens) == [*list(whole.tokens)[:8], 7]
    await again.delete("alice", "s~6")
    await again.delete("alice", "s")
    assert sorted(home.unnamed) == sorted({ids[0], *ids[4:6]})


async def test_a_cut_before_any_truncation_keeps_its_blocks(records: Records) -> None:
    ids = [bytes([at]) * 32 for at in range(4)]
    for at, blocks in enumerate((ids[:2], ids[2:])):
        record, lease = await begin(records, f"t{at}")
        said = [pb.Message(role="assistant", content="a", end_token=5 * (at + 1))]
        one = turn(lease, record.version, [at] * 5, blocks, kept_blocks=2 * at)
        await records.commit("alice", "s", dataclasses.replace(one, new_messages=said))
    fork = await records.fork("alice", "s", "s~2", b"", Cut(messages=1, block_tokens=2))
    assert (list(fork.tokens), list(fork.block_ids)) == ([0] * 5, ids[:2])


async def test_creating_takes_a_free_name_only(records: Records, clock: Clock) -> None:
    made = await records.create("alice", "s", 5)
    assert await records.get("alice", "s") == made
    with pytest.raises(AlreadyExists, match="'s'"):
        await records.create("alice", "s", 5)
    await begin(records, "t1", "begun")
    with pytest.raises(AlreadyExists):
        await records.create("alice", "begun", 5)
    clock.time_ms += 5001
    await records.create("alice", "begun", 5)  # its turn ran out
    await records.create("alice", "s", 5)  # the former one expired
    for name in ("", "x" * 600, "a\0b"):
        with pytest.raises(InvalidInput):
            await records.get("alice", name)
        with pytest.raises(InvalidInput):
            await records.create("alice", name, 0)
        with pytest.raises(InvalidInput):
            await records.fork("alice", "s", name)


async def test_creation_and_fork_may_be_asked_twice(home: Home) -> None:
    records = await home.open()
    made = await records.create("alice", "s", 0, b"1" * 16)
    assert await records.create("alice", "s", 0, b"1" * 16) == made
    await commit(records, "t1", [1, 2])
    fork = await records.fork("alice", "s", "fork", b"2" * 16)
    assert (made.incarnation, fork.incarnation) == (b"1" * 16, b"2" * 16)
    await commit(records, "t2", [3])
    await home.close()
    again = await home.open()
    assert list((await again.create("alice", "s", 0, b"1" * 16)).tokens) == [1, 2, 3]
    await again.delete("alice", "s")
    assert await again.fork("alice", "s", "fork", b"2" * 16) == fork
    with pytest.raises(AlreadyExists):
        await again.create("alice", "fork", 0, b"1" * 16)


async def test_only_the_incarnation_that_is_meant_is_deleted(records: Records) -> None:
    incarnations = set()
    for number in range(3):
        await commit(records, f"t{number}", [number])
        record = await records.get("alice", "s")
        incarnations.add(record.incarnation)
        for incarnation in incarnations - {record.incarnation}:
            await records.delete("alice", "s", incarnation)  # late
        assert list((await records.get("alice", "s")).tokens) == [number]
        await records.delete("alice", "s", record.incarnation)
        await records.delete("alice", "s", record.incarnation)
        assert await records.count() == 0
    assert len(incarnations) == 3


async def test_of_many_that_create_at_once_one_does(records: Records) -> None:
    made = await asyncio.gather(*(records.create("alice", "s", 0) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(one, pb.SessionRecord) for one in made) == 1
    assert sum(isinstance(one, AlreadyExists) for one in made) == 7


async def test_pages_are_in_order_and_light(records: Records) -> None:
    names = ["é", "c", "B", "a", "d", "a b", "\U0001f408"]  # no collation would give this order by itself
    for name in names:
        await commit(records, f"turn of {name}", [1, 2, 3], name)
    await begin(records, "t", "begun")  # has no record yet
    await records.create("alice2", "between", 0)
    ordered = sorted(names, key=str.encode)
    first, more = await records.page("alice", "", 3)
    assert [head.session_id for head in first] == ordered[:3]
    assert more
    assert all(not head.tokens and not head.messages and not head.block_ids for head in first)
    rest, more = await records.page("alice", ordered[2], 4)
    assert [head.session_id for head in rest] == ordered[3:]
    assert not more
    with pytest.raises(InvalidInput):
        await records.page("alice", "", 0)


async def test_a_page_is_full_though_some_have_expired(records: Records, clock: Clock) -> None:
    for number in range(8):
        await records.create("alice", f"{number}", 1 if number % 4 else 100)
    clock.time_ms += 2000
    first, more = await records.page("alice", "", 1)
    assert ([head.session_id for head in first], more) == (["0"], True)
    second, more = await records.page("alice", "0", 1)
    assert ([head.session_id for head in second], more) == (["4"], False)


async def test_sessions_end_when_nobody_uses_them(records: Records, clock: Clock) -> None:
    await records.create("alice", "short", 10)
    await records.create("alice", "default", 0)
    await commit(records, "t", [1], "used")
    clock.time_ms += 10_000
    with pytest.raises(SessionNotFound):
        await records.get("alice", "short")
    clock.time_ms += 3_580_000
    _, lease = await begin(records, "t2", "used", lease_ms=60_000)
    clock.time_ms += 20_000
    assert (await records.page("alice", "", 10))[0] == []
    await records.sweep()
    assert await records.count() == 1  # a turn of "used" is under way
    assert (await records.commit("alice", "used", turn(lease, 1, [2]))).version == 2  # it began in time
    clock.time_ms += 3_601_000
    assert await records.sweep() == 1
    assert await records.count() == 0
    assert await records.sweep() == 0


async def test_a_session_and_its_branches_live_as_long_as_one_of_them(records: Records, clock: Clock) -> None:
    await commit(records, "t1", [1, 2], "s")
    for other in ("s~2", "s~3", "apart"):
        await records.fork("alice", "s", other)
    await records.create("alice", "s~4", 0)  # a name like a branch's makes no branch
    await records.create("alice", "s~no", 0)
    clock.time_ms += 3_000_000
    await commit(records, "t2", [3], "s~2")
    clock.time_ms += 3_000_000
    family = ["s", "s~2", "s~3"]
    assert [one.session_id for one in (await records.page("alice", "", 10))[0]] == family
    assert await records.sweep() == 3
    assert await records.count() == 3
    assert await records.sweep() == 0
    for session in family:
        assert (await records.get("alice", session)).session_id == session
    _, lease = await begin(records, "t3", "s", lease_ms=600_000)  # used last is the session itself
    clock.time_ms += 599_000
    assert await records.sweep() == 0
    assert (await records.get("alice", "s~3")).session_id == "s~3"  # while the turn is under way
    await records.commit("alice", "s", turn(lease, 1, [4]))
    clock.time_ms += 3_601_000
    assert (await records.page("alice", "", 10))[0] == []
    assert await records.sweep() == 3
    assert await records.count() == 0


async def test_an_expired_session_begins_anew(records: Records, clock: Clock) -> None:
    await commit(records, "t1", [1, 2])
    clock.time_ms += 3_600_000
    record, lease = await begin(records, "t2")
    assert (record.version, list(record.tokens)) == (0, [])
    await records.commit("alice", "s", turn(lease, 0, [3]))
    assert list((await records.get("alice", "s")).tokens) == [3]


async def test_forgotten_leases_are_swept(records: Records, clock: Clock) -> None:
    _, lease = await begin(records, "t1")
    clock.time_ms += LEASE_KEPT_MS + 2000
    assert await records.sweep() == 0
    with pytest.raises(SessionNotFound):
        await records.renew("alice", "s", TurnRenewal(turn_id="t1", fencing=lease.fencing, lease_ms=1000))


@pytest.mark.parametrize("lease_ms", [0, 10**9])
async def test_a_lease_has_bounds(records: Records, lease_ms: int) -> None:
    with pytest.raises(InvalidInput, match="lease_ms"):
        await begin(records, "t1", lease_ms=lease_ms)


async def test_blocks_go_with_the_last_session_that_names_them(home: Home, records: Records) -> None:
    await commit(records, "t1", [1], "a", [block(1), block(2)])
    await commit(records, "t2", [2], "a", [block(3)], kept_blocks=2)
    await records.fork("alice", "a", "b")
    await commit(records, "t3", [3], "b", [block(4)], kept_blocks=3)
    await commit(records, "t4", [3], "c", [block(1), block(9)])
    await records.delete("alice", "a")
    assert home.unnamed == []
    await records.delete("alice", "b")
    assert home.unnamed == [block(2), block(3), block(4)]
    await records.delete("alice", "c")
    assert home.unnamed[3:] == [block(1), block(9)]


async def test_what_a_truncation_drops_is_not_named_any_more(home: Home, records: Records) -> None:
    before = [block(number) for number in range(6)]
    await commit(records, "t1", range(6), block_ids=before)
    record, lease = await begin(records, "t2")
    cut = pb.TruncationRecord(at_token=6, kept_head_tokens=1, dropped_tokens=3)
    added = turn(lease, record.version, [6], [block(4), block(5), block(6)], [cut], kept_blocks=1)
    await records.commit("alice", "s", added)
    after = [block(0), block(4), block(5), block(6)]
    await commit(records, "t3", [7], block_ids=[block(7)], kept_blocks=4)
    await home.close()
    again = await home.open()
    stored = await again.get("alice", "s")
    assert list(stored.block_ids) == [*after, block(7)]
    assert (list(stored.tokens), list(stored.truncations)) == (list(range(8)), [cut])
    assert stored.dropped_tokens == 3
    await again.delete("alice", "s")
    assert home.unnamed == [*after, block(7)]


async def test_a_turn_names_some_blocks_anew_all_or_none(home: Home, records: Records) -> None:
    await commit(records, "t1", [1], block_ids=[block(1), block(2), block(3)])
    await commit(records, "t2", [2], block_ids=[block(9), block(3)], kept_blocks=1)
    assert list((await records.get("alice", "s")).block_ids) == [block(1), block(9), block(3)]
    await commit(records, "t3", [3], block_ids=[block(3), block(4)])
    await commit(records, "t4", [4], kept_blocks=2)
    assert list((await records.get("alice", "s")).block_ids) == [block(3), block(4)]
    await records.delete("alice", "s")
    assert home.unnamed == [block(3), block(4)]


async def test_no_more_blocks_are_kept_than_there_are(records: Records) -> None:
    await commit(records, "t1", [1], block_ids=[block(1)])
    before = await records.get("alice", "s")
    _, lease = await begin(records, "t2")
    with pytest.raises(InvalidInput, match="1 full blocks"):
        await records.commit("alice", "s", turn(lease, 1, [2], [block(2)], kept_blocks=2))
    assert await records.get("alice", "s") == before
    assert (await records.commit("alice", "s", turn(lease, 1, [2], [block(2)], kept_blocks=1))).version == 2


async def test_a_caller_that_goes_away_leaves_no_half_a_turn(records: Records) -> None:
    _, lease = await begin(records, "t1")
    call = asyncio.ensure_future(records.commit("alice", "s", turn(lease, 0, [1])))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await records.commit("alice", "s", turn(lease, 0, [1]))).version == 1
    assert list((await records.get("alice", "s")).tokens) == [1]


# No protobuf, one of another version of kvcommons, and one cut off in a text.
BAD_RECORDS = [b"\xff" * 40, pb.SessionRecord(format=99, tenant="alice").SerializeToString(), b"\x12\xff"]


@pytest.mark.parametrize("value", BAD_RECORDS, ids=["no record", "another version", "cut off"])
async def test_a_bad_record_costs_its_own_session_only(home: Home, value: bytes) -> None:
    """It stops no list and no sweep, says what it is to whoever asks for it, and can be deleted."""
    home.default_ttl_s = 10
    records = await home.open()
    for name in ("a", "b", "c"):
        await records.create("alice", name, 0)
    await home.close()
    await home.damage("b", value)
    records = await home.open()
    page, more = await records.page("alice", "", 2)
    assert ([one.session_id for one in page], more) == (["a", "c"], False)
    with pytest.raises(DataLoss, match="record"):
        await records.get("alice", "b")
    with pytest.raises(DataLoss, match="record"):
        await begin(records, "t1", "b")
    await begin(records, "t1", "c")
    home.clock.time_ms += 20_000
    assert await records.sweep() == 2
    assert await records.sweep() == 0
    with pytest.raises(DataLoss):
        await records.get("alice", "b")  # the bytes are still there for whoever looks into it
    await records.delete("alice", "b")
    with pytest.raises(SessionNotFound):
        await records.get("alice", "b")
    assert await records.count() == 0
    assert (await records.create("alice", "b", 0)).session_id == "b"


BAD_LEASES = [b"\x09", b"\x02", b"\x01" + b"\xff" * 20]


@pytest.mark.parametrize("value", BAD_LEASES, ids=["version", "short", "names"])
async def test_a_bad_lease_costs_its_own_session_only(home: Home, value: bytes) -> None:
    records = await home.open()
    for name in ("a", "b"):
        document = pb.Document(format=1, tokens=[1])
        _, lease = await begin(records, "t1", name)
        renewal = TurnRenewal(
            turn_id="t1", fencing=lease.fencing, lease_ms=1000, document=document,
            document_state=pb.DocumentState(tokens=1),
        )  # fmt: skip
        await records.renew("alice", name, renewal)
    await home.close()
    await home.damage("b", value, "lease")
    records = await home.open()
    assert [one.session_id for one in await records.documents()] == ["a"]
    await records.sweep()
    with pytest.raises(DataLoss, match="lease"):
        await begin(records, "t2", "b")
