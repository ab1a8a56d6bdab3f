"""What a router remembers of records, wherever these lie: only what it does not know is handed over, and what
it puts together is what is stored."""

from __future__ import annotations

import contextlib
import random

import pytest

from kvcommons.errors import SessionNotFound
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.records.interface import Records
from services.kvstore.session import TurnBegin
from services.kvstore.turn_lease import TurnLease
from services.router.sessions.copies import RecordCopies, grown
from tests.contract.records_fixtures import Clock, Home, begin, block, commit, turn

pytest_plugins = ("tests.contract.records_home",)


class Router:
    """Takes turns as one does that remembers the records it has seen."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.copies = RecordCopies()

    async def begin(self, turn_id: str, session_id: str = "s") -> tuple[pb.SessionRecord, TurnLease]:
        """The record, put together."""
        known = self.copies.get("alice", session_id)
        wanted = TurnBegin(turn_id=turn_id, owner="router", lease_ms=1000, known_turn_id=known.last_turn_id)
        self.begun = await self.records.begin("alice", session_id, wanted)
        record = self.begun.record
        if self.begun.after_known:
            record = grown(known, record, kept_blocks=len(known.block_ids))
        self.copies.put(record)
        return record, self.begun.lease

    async def abandon(self, turn_id: str, session_id: str = "s") -> pb.SessionRecord:
        """What its begin gave."""
        record, lease = await self.begin(turn_id, session_id)
        await self.records.abandon("alice", session_id, turn_id=turn_id, fencing=lease.fencing)
        return record


async def test_what_is_known_is_not_handed_over_again(records: Records) -> None:
    await commit(records, "t1", [1, 2], block_ids=[block(1)])
    router = Router(records)
    assert await router.abandon("t2") == await records.get("alice", "s")
    assert not router.begun.after_known
    assert await router.abandon("t3") == await records.get("alice", "s")
    assert router.begun.after_known
    given = router.begun.record
    assert list(given.tokens) == list(given.block_ids) == list(given.messages) == []


async def test_what_others_did_meanwhile_is_seen(records: Records) -> None:
    await commit(records, "t1", [1], block_ids=[block(1)])
    router = Router(records)
    await router.abandon("looks")
    await commit(records, "t2", [2], block_ids=[block(2)], kept_blocks=1)
    await commit(records, "t3", [3], kept_blocks=2)
    assert await router.abandon("looks again") == await records.get("alice", "s")
    record, lease = await begin(records, "t4")
    cut = pb.TruncationRecord(at_token=3, kept_head_tokens=0, dropped_tokens=1)
    added = turn(lease, record.version, [4], [block(4)], [cut], kept_blocks=1)
    await records.commit("alice", "s", added)
    assert await router.abandon("looks behind a truncation") == await records.get("alice", "s")
    await commit(records, "t5", [5], block_ids=[block(5)], kept_blocks=2)
    assert await router.abandon("and behind that") == await records.get("alice", "s")


async def test_another_session_of_the_same_name_is_not_taken_for_the_known_one(
    records: Records, clock: Clock
) -> None:
    """Not even at the same version: the former one was deleted, ran out, or its name went to a fork."""
    router = Router(records)
    for number, how in enumerate(("deleted", "expired", "forked")):
        await commit(records, f"known {how}", [1, 2], block_ids=[block(1)])
        assert list((await router.abandon(f"looks {how}")).tokens) == [1, 2]
        if how == "expired":
            clock.time_ms += 3_600_000
        else:
            await records.delete("alice", "s")
        if how == "forked":
            await commit(records, "of the source", [8], "source")
            await records.fork("alice", "source", "s")
        else:
            await commit(records, f"anew {number}", [9], block_ids=[block(9)])
        record = await router.abandon(f"looks at what is new {number}")
        assert record == await records.get("alice", "s")
        assert (record.version, len(record.tokens)) == (1, 1)
        assert not router.begun.after_known
        await records.delete("alice", "s")
        assert await router.abandon(f"looks at nothing {number}") == pb.SessionRecord(
            format=2,
            tenant="alice",
            session_id="s",
            root="s",
            created_ms=clock.time_ms,
            last_used_ms=clock.time_ms,
        )


async def test_only_a_committed_turn_of_this_session_is_known(records: Records) -> None:
    await commit(records, "elsewhere", [7], "other")
    await commit(records, "t1", [1])
    fork = await records.fork("alice", "s", "fork")
    for session_id, known in (("s", "elsewhere"), ("s", "t2"), ("s", "nobody's"), ("fork", "t1")):
        wanted = TurnBegin(turn_id="t2", owner="router", lease_ms=1000, known_turn_id=known)
        begun = await records.begin("alice", session_id, wanted)
        assert not begun.after_known
        assert list(begun.record.tokens) == [1]
    assert fork.last_turn_id == ""


@pytest.mark.parametrize("seed", range(4))
async def test_a_record_that_is_put_together_is_the_stored_one(
    home: Home, records: Records, clock: Clock, seed: int
) -> None:
    """Whatever three routers and others do to two sessions."""
    dice = random.Random(seed)
    routers = [Router(records) for _ in range(3)]
    whole = 0
    for number in range(120):
        router, session_id = dice.choice(routers), dice.choice("ab")
        record, lease = await router.begin(f"{number}", session_id)
        whole += not router.begun.after_known
        if record.version:
            assert record == await records.get("alice", session_id)
        if dice.random() < 0.2:
            await records.abandon("alice", session_id, turn_id=f"{number}", fencing=lease.fencing)
        else:
            blocks = len(record.block_ids)
            kept = blocks if dice.random() < 0.7 else dice.randint(0, blocks)
            added = turn(
                lease,
                record.version,
                [number] * dice.randint(0, 3),
                [f"{number} {at}".encode().ljust(32) for at in range(dice.randint(0, 3))],
                [pb.TruncationRecord(at_token=number, dropped_tokens=1)] if kept < blocks else [],
                kept_blocks=kept,
            )
            version = (await records.commit("alice", session_id, added)).version
            if dice.random() < 0.7:  # else its answer is lost
                after = pb.SessionRecord(
                    version=version,
                    last_turn_id=f"{number}",
                    tokens=added.new_tokens,
                    messages=added.new_messages,
                    block_ids=added.block_ids,
                    truncations=added.new_truncations,
                )
                router.copies.put(grown(record, after, kept_blocks=kept))
            if dice.random() < 0.1:
                await records.delete("alice", session_id)
            elif dice.random() < 0.1:
                other = "b" if session_id == "a" else "a"
                with contextlib.suppress(SessionNotFound):
                    await records.delete("alice", other)
                await records.fork("alice", session_id, other)
        if dice.random() < 0.05:
            clock.time_ms += 3_600_000
    assert 20 < whole < 110
