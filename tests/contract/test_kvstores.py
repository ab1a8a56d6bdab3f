"""Several kvstores with their session records in one database, asked as a router asks: each may die or hang
at any time. And several whose records lie in folders of their own, of which but one may serve."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    SessionNotFound,
    StoreUnavailable,
    TurnInProgress,
)
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.pb.common_pb2 import ModelInfo
from kvcommons.pb.ledger_pb2 import Instance
from services.router.sessions.conversation import Message
from services.router.sessions.copies import RecordCopies
from services.router.sessions.store import SessionStore
from services.router.sessions.truncation import Truncation
from services.router.sessions.turn import SessionTurn
from tests.contract.kvstores import LEASE_MS, PATIENCE_S, TENANT, Kvstores
from tests.contract.ledger_process import Ledger
from tests.contract.postgres_server import PostgresServer
from tests.machine import scaled
from tests.pausing import pause
from tests.unit.kvstore.samples import SHAPE, block_ids
from tests.waiting import eventually

NAMES = [f"session-{number}" for number in range(12)]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def kvstores(folder: Path, postgres: PostgresServer) -> AsyncIterator[Kvstores]:
    """Two that serve, with a database."""
    it = Kvstores(folder, postgres.new_url())
    try:
        it.directory.start()
        for name in ("a", "b"):
            it.start(name)
        await it.serve("a", "b")
        yield it
    finally:
        await it.close()


def changed(one: Instance, **fields: Any) -> Instance:
    """Who else one might say that it is."""
    other = Instance()
    other.CopyFrom(one)
    other.MergeFrom(Instance(**fields))
    return other


def at_home(kvstores: Kvstores, name: str) -> str:
    """A session whose home is this kvstore."""
    return next(session_id for session_id in NAMES if kvstores.home(session_id) == name)


async def test_another_goes_on_at_once_where_one_died(kvstores: Kvstores) -> None:
    """Also with turns that were under way, whose leases hold."""
    for number, name in enumerate(NAMES):
        assert await kvstores.turn(name, [number]) == 1
    of_both = (at_home(kvstores, "a"), at_home(kvstores, "b"))
    under_way = {name: await kvstores.begin(name) for name in of_both}
    kvstores.processes["a"].kill()
    for name, begun in under_way.items():
        with pytest.raises(TurnInProgress):
            await kvstores.begin(name)
        assert await kvstores.commit(kvstores.committing(begun, [100])) == 2
    for number, name in enumerate(NAMES):
        expected = [number, 100] if name in under_way else [number]
        assert await kvstores.tokens(name) == expected
    kvstores.start("a")
    await kvstores.serve("a", "b")
    kvstores.processes["b"].kill()
    for name in under_way:
        assert (await kvstores.tokens(name))[1:] == [100]


async def test_what_a_kvstore_that_hung_says_when_it_wakes_is_true(kvstores: Kvstores) -> None:
    name = at_home(kvstores, "a")
    await kvstores.turn(name, [1])
    begun = await kvstores.begin(name)
    hung = kvstores.processes["a"]
    pause(hung.process.pid)
    late = asyncio.create_task(
        asyncio.to_thread(hung.sessions.CommitTurn, kvstores.committing(begun, [9]), timeout=scaled(60))
    )
    # The same turn by another way; of the two, one is committed.
    assert await kvstores.commit(kvstores.committing(begun, [2])) == 2
    await kvstores.turn(name, [3])
    hung.process.send_signal(signal.SIGCONT)
    assert (await late).version == 2  # the turn's, whoever committed it
    stale = pb.RenewTurnRequest(
        tenant=TENANT,
        session_id=name,
        turn_id=begun[0].turn_id,
        fencing=begun[1].fencing,
        lease_ms=LEASE_MS,
    )
    with pytest.raises(Conflict):
        await asyncio.to_thread(hung.sessions.RenewTurn, stale, timeout=scaled(60))
    wanted = pb.GetSessionRequest(tenant=TENANT, session_id=name)
    record = await asyncio.to_thread(hung.sessions.Get, wanted, timeout=scaled(60))
    assert list(record.tokens) == [1, 2, 3]


async def test_a_commit_whose_answer_was_lost_is_not_made_twice(kvstores: Kvstores) -> None:
    """Neither at the same kvstore nor at another one."""
    name = at_home(kvstores, "a")
    commit = kvstores.committing(await kvstores.begin(name), [1])
    assert await kvstores.commit(commit) == 1
    assert await kvstores.commit(commit) == 1
    kvstores.processes["a"].kill()
    assert await kvstores.commit(commit) == 1
    assert await kvstores.tokens(name) == [1]


class Remembering(SessionStore):
    """Keeps what it asked last, to be asked again as if its answer had been lost, or late, and the answer."""

    last: Any = None
    answer: Any = None

    async def call(self, make: Any, **where: Any) -> Any:
        self.last = make
        self.answer = await super().call(make, **where)
        return self.answer


async def test_what_makes_and_deletes_sessions_may_be_asked_of_another_again(kvstores: Kvstores) -> None:
    store = Remembering(kvstores.fleet)
    name = at_home(kvstores, "a")

    async def again(call: Any) -> Any:
        return await kvstores.store.call(call, tenant=TENANT, root=name, patience_s=PATIENCE_S)

    made = await store.create(TENANT, name, 60, patience_s=PATIENCE_S)
    creation = store.last
    forked = await store.fork(TENANT, name, "a copy", patience_s=PATIENCE_S)
    fork = store.last
    kvstores.processes["a"].kill()
    assert await again(creation) == made
    assert await again(fork) == forked
    with pytest.raises(AlreadyExists):
        await store.create(TENANT, name, 60, patience_s=PATIENCE_S)
    with pytest.raises(AlreadyExists):
        await store.fork(TENANT, name, "a copy", patience_s=PATIENCE_S)
    await store.delete(TENANT, name, patience_s=PATIENCE_S)
    deletion = store.last
    await again(deletion)
    with pytest.raises(SessionNotFound):
        await store.delete(TENANT, name, patience_s=PATIENCE_S)
    await kvstores.turn(name, [2])
    await again(deletion)  # it was another session's
    assert await kvstores.tokens(name) == [2]


async def test_routers_are_told_what_they_do_not_know_yet(kvstores: Kvstores) -> None:
    """Two that take turns on one session, each at the kvstore that serves."""
    store, copies = Remembering(kvstores.fleet), [RecordCopies(), RecordCopies()]
    blocks: list[bytes] = []
    reported: list[tuple[bool, list[int]]] = []
    for number, router in enumerate([0, 0, 1, 1, 0, 0, 0, 1]):
        turn = await SessionTurn.begin(
            store,
            copies[router],
            tenant=TENANT,
            session_id=NAMES[0],
            turn_id=f"turn {number}",
            owner="test",
            lease_ms=LEASE_MS,
        )
        reported.append((store.answer.after_known, list(store.answer.record.tokens)))
        assert list(turn.record.tokens) == list(range(number))
        assert list(turn.record.block_ids) == blocks
        cut = number == 5
        blocks = [*blocks[:1], *blocks[3 if cut else 1 :], *block_ids(1, f"{number}")]
        await turn.commit(
            model=ModelInfo(fingerprint=SHAPE.model, name="demo"),
            new_tokens=[number],
            new_messages=[Message(role="user", content=f"{number}")],
            block_ids=blocks,
            new_truncations=[Truncation(at_token=48, head_tokens=16, dropped_tokens=32)] if cut else [],
            durable_wait_ms=0,
            patience_s=PATIENCE_S,
        )
    assert reported == [
        (False, []),  # there was no session
        (True, []),
        (False, [0, 1]),
        (True, []),
        (True, [2, 3]),
        (True, []),
        (True, []),
        (False, [0, 1, 2, 3, 4, 5, 6]),  # blocks were dropped since
    ]
    wanted = pb.GetSessionRequest(tenant=TENANT, session_id=NAMES[0])
    record = await asyncio.to_thread(kvstores.processes["a"].sessions.Get, wanted, timeout=scaled(20))
    assert [message.content for message in record.messages] == [str(number) for number in range(8)]
    assert list(record.block_ids) == blocks


async def test_turns_go_on_without_ledger_and_etcd(kvstores: Kvstores) -> None:
    kvstores.etcd.kill()
    kvstores.ledger.kill()
    kvstores.processes["b"].kill()
    for name in NAMES:
        await kvstores.turn(name, [1])
    assert [await kvstores.tokens(name) for name in NAMES] == [[1]] * len(NAMES)


async def test_a_third_one_takes_its_share_and_leaves_it_again(kvstores: Kvstores) -> None:
    for number, name in enumerate(NAMES):
        await kvstores.turn(name, [number])
    before = {name: kvstores.home(name) for name in NAMES}
    kvstores.start("c")
    await kvstores.serve("a", "b", "c")
    after = {name: kvstores.home(name) for name in NAMES}
    assert all(after[name] in (before[name], "c") for name in NAMES)
    reply = await kvstores.store.list(pb.ListSessionsRequest(tenant=TENANT, limit=5), patience_s=PATIENCE_S)
    assert [one.session_id for one in reply.sessions] == sorted(NAMES)[:5]
    assert reply.more
    kvstores.processes["c"].kill()
    await kvstores.serve("a", "b")
    assert {name: kvstores.home(name) for name in NAMES} == before
    for number, name in enumerate(NAMES):
        await kvstores.turn(name, [50])
        assert await kvstores.tokens(name) == [number, 50]


async def test_all_of_them_forget_the_blocks_of_a_deleted_session(kvstores: Kvstores) -> None:
    ids = block_ids(6)
    for process in kvstores.processes.values():
        process.put_blocks(ids)
    commit = kvstores.committing(await kvstores.begin(NAMES[0]), [1], ids[:4])
    commit.model = SHAPE.model
    await kvstores.commit(commit)
    delete = pb.DeleteSessionRequest(tenant=TENANT, session_id=NAMES[0])
    kvstores.processes["a"].sessions.Delete(delete, timeout=scaled(20))

    def forgotten(name: str) -> bool:
        request = pb.MatchRequest(model=SHAPE.model, block_ids=ids[:1])
        return not kvstores.processes[name].blocks.Match(request, timeout=scaled(20)).tiers

    for name in kvstores.processes:
        await eventually(lambda name=name: forgotten(name), f"{name} has forgotten them", within_s=20)
        kept = pb.MatchRequest(model=SHAPE.model, block_ids=ids[4:])
        assert len(kvstores.processes[name].blocks.Match(kept, timeout=scaled(20)).tiers) == 2


async def test_no_session_is_written_before_its_place_is_chosen(
    folder: Path, postgres: PostgresServer
) -> None:
    """A ledger shows a kvstore as soon as it hears it, and chooses when etcd lets it: of a folder and a
    database that are there by then, the database, unless it had asked etcd for the folder before. What the
    other one had taken meanwhile would look empty."""
    it = Kvstores(folder)
    try:
        it.directory.start()
        await eventually(lambda: it.directory.connected, "the ledger is connected", within_s=30)
        it.etcd.pause()
        one = it.start("a")
        await eventually(lambda: len(it.fleet.stores()) == 1, "a is known", within_s=30)
        turn = asyncio.create_task(it.turn("s", [1]))
        wanted = pb.CreateSessionRequest(tenant=TENANT, session_id="t", incarnation=bytes(16))
        with pytest.raises(StoreUnavailable, match="not decided yet"):
            one.sessions.Create(wanted, timeout=scaled(20), wait_for_ready=True)
        assert not one.is_ready()
        it.start("b", records=postgres.new_url())
        known = it.directory.instances
        await eventually(lambda: len(known("kvstore", ready=False)) == 2, "b is known", within_s=30)
        assert not turn.done()
        it.etcd.resume()
        await eventually(lambda: it.directory.records, "a place is chosen", within_s=30)
        chosen = "a" if it.directory.records == "folder a" else "b"
        await it.serve(chosen)
        assert await turn == 1
        assert await it.tokens("s") == [1]
        assert [name for name, one in it.processes.items() if one.is_ready()] == [chosen]
    finally:
        await it.close()


# ---- records in folders


async def test_the_place_is_known_again_while_no_ledger_answers(embedded: Kvstores) -> None:
    await embedded.turn("s", [1])
    await eventually(lambda: embedded.directory.records == "folder a", "the folder counts", within_s=30)
    place = embedded.folder / "a.data" / "records.place"
    await eventually(place.exists, "it is kept", within_s=30)
    embedded.ledger.kill()
    embedded.processes["a"].kill()
    back = embedded.start("a").wait_ready()
    wanted = pb.GetSessionRequest(tenant=TENANT, session_id="s")
    assert list(back.sessions.Get(wanted, timeout=scaled(20)).tokens) == [1]


@pytest.fixture
async def embedded(folder: Path) -> AsyncIterator[Kvstores]:
    it = Kvstores(folder)
    try:
        it.directory.start()
        it.start("a").wait_ready()
        await it.serve("a")
        yield it
    finally:
        await it.close()


async def test_a_second_one_with_a_folder_of_its_own_serves_nothing(embedded: Kvstores) -> None:
    """Not even while the first one is away: sessions would look empty."""
    await embedded.turn("s", [1])
    other = embedded.start("b")
    await eventually(
        lambda: len(embedded.directory.instances("kvstore", ready=False)) == 2,
        "the second one is known",
        within_s=30,
    )
    await eventually(lambda: not other.is_ready(), "the second one is not ready", within_s=30)
    assert await embedded.turn("s", [2]) == 2
    embedded.processes["a"].kill()
    await eventually(lambda: not embedded.fleet.stores(), "the first one is gone", within_s=30)
    wanted = pb.GetSessionRequest(tenant=TENANT, session_id="s")
    with pytest.raises(StoreUnavailable, match="Set records in"):
        other.sessions.Get(wanted, timeout=scaled(20))
    with pytest.raises(StoreUnavailable, match="session records in the folder b"):
        await embedded.store.get(TENANT, "s", patience_s=0)
    embedded.start("a").wait_ready()
    assert await embedded.turn("s", [3]) == 3
    other.kill()
    assert "Set records in [kvstore]" in other.errors


async def test_one_that_is_killed_and_started_again_is_no_second_one(embedded: Kvstores) -> None:
    for number in range(3):
        assert await embedded.turn("s", [number]) == number + 1
        embedded.processes["a"].kill()
        embedded.start("a").wait_ready()
    assert await embedded.tokens("s") == [0, 1, 2]
    assert "Set records" not in embedded.ledger.log()


async def test_no_forged_heartbeat_stops_sessions(embedded: Kvstores) -> None:
    """One call that says that a kvstore has another folder, or its records elsewhere, in its own name or in
    another one; and none while it begins anew."""
    assert await embedded.turn("s", [0]) == 1
    (there,) = embedded.directory.instances("kvstore")
    ledger = Ledger(embedded.ledger.address)
    others = {"control_address": "127.0.0.1:1", "started_ms": 1 << 60}
    places = {"records": "database nowhere:1/kv"}, {"folder": "nowhere"}
    try:
        for place in places:
            with pytest.raises(InvalidInput) as refused:
                await ledger.beat(changed(there, **place))
            assert refused.value.param == f"instance.{next(iter(place))}"
        await eventually(lambda: embedded.directory.records == there.records, "decided", within_s=30)
        for number, forged in enumerate(({}, *places), 1):
            name = f"forged-{number}"
            await ledger.beat(changed(there, id=name, **others, **forged))
            await eventually(lambda name=name: embedded.directory.find(name) is not None, "told")
            assert await embedded.turn("s", [number]) == number + 1
            assert embedded.directory.find(name) is not None, "it went on meanwhile"
        embedded.processes["a"].kill()
        known = embedded.directory.instances
        await eventually(lambda: not known("kvstore", ready=False), "nobody is there", within_s=30)
        await ledger.beat(changed(there, id="forged", **others, **places[0]))
        embedded.start("a").wait_ready()
        assert await embedded.turn("s", [4]) == 5
        assert await embedded.tokens("s") == [0, 1, 2, 3, 4]
    finally:
        await ledger.close()


async def test_a_folder_that_was_begun_anew_serves(embedded: Kvstores, folder: Path) -> None:
    await embedded.turn("s", [1])
    embedded.processes["a"].kill()
    shutil.rmtree(folder / "a.data")
    embedded.start("a").wait_ready()
    with pytest.raises(SessionNotFound):
        await embedded.tokens("s")
    assert await embedded.turn("s", [2]) == 1


async def test_a_database_follows_on_a_folder_that_nobody_has(
    embedded: Kvstores, postgres: PostgresServer
) -> None:
    """And no folder follows on a database."""
    url = postgres.new_url()
    # The ledger chooses within moments of a's start: of two that are there by then, the database.
    await eventually(lambda: embedded.directory.records == "folder a", "the folder counts", within_s=30)
    both = embedded.start("b", records=url)
    assert await embedded.turn("s", [1]) == 1
    assert embedded.home("s") == "a"
    assert not both.is_ready()
    embedded.processes["a"].kill()
    await embedded.serve("b")
    assert await embedded.turn("s", [2]) == 1
    both.kill()
    back = embedded.start("a")
    await eventually(lambda: not back.is_ready(), "the database counts", within_s=30)
    await eventually(lambda: not embedded.fleet.stores(), "the kvstore with it is gone", within_s=30)
    assert not back.is_ready()
