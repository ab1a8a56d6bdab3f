"""Several real kvstores, a real ledger and etcd, asked as a router asks: one dies, hangs, comes back."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvcommons.errors import KVCommonsError, SessionNotFound, StoreUnavailable, TurnInProgress, WrongShard
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.rpc.channel import open_channel
from kvcommons.rpc.directory import Directory
from kvcommons.shards import ShardView, session_key
from services.router.fleet.fleet import Fleet
from services.router.sessions.store import SessionStore
from tests.contract.kvstore_process import KvstoreProcess
from tests.contract.ledger_process import LedgerProcess, eventually
from tests.etcd import RealEtcd
from tests.machine import scaled
from tests.pausing import pause

TENANT = "tenant"
LEASE_MS = scaled(60_000)
PATIENCE_S = scaled(30)  # for another shard to take over
NAMES = [f"session-{number}" for number in range(12)]


class Cluster:
    """Shards in folders of their own, and a router's way to them."""

    def __init__(self, folder: Path) -> None:
        self.etcd = RealEtcd()
        self.etcd.start()
        self.ledger = LedgerProcess(folder, "l", self.etcd.endpoint)
        self.ledger.start()
        self._folder = folder
        self.shards: dict[str, KvstoreProcess] = {}
        self.directory = Directory([self.ledger.address], "test")
        self.fleet = Fleet(self.directory, open_channel)
        self.store = SessionStore(self.fleet, takeover_wait_s=scaled(15.0))
        self._turns = 0

    def start(self, name: str) -> None:
        sockets = self._folder / name
        sockets.mkdir(exist_ok=True)
        data = self._folder / f"{name}.data"
        process = KvstoreProcess(sockets, data, ledger=self.ledger.address, shard=name, dram_bytes=1 << 20)
        self.shards[name] = process.wait_ready()

    async def serve(self, *names: str, within_s: float = 30.0) -> None:
        """Waits until just these serve, and have all that they need."""

        def served() -> bool:
            view = self.view
            if view is None or not view.settled or view.joining:
                return False
            return sorted(shard.rpartition(".")[0] for shard in view.serving) == sorted(names)

        await eventually(f"{names} serve", served, within_s=within_s)

    @property
    def view(self) -> ShardView | None:
        return self.directory.shards

    def home(self, session_id: str) -> str:
        assert self.view is not None
        return self.view.home(session_key(TENANT, session_id)).rpartition(".")[0]

    def at_home(self, name: str) -> str:
        """A session whose home is this shard."""
        return next(session_id for session_id in NAMES if self.home(session_id) == name)

    async def begin(self, session_id: str) -> tuple[pb.BeginTurnRequest, pb.BeginTurnReply]:
        self._turns += 1
        request = pb.BeginTurnRequest(
            tenant=TENANT, session_id=session_id, turn_id=f"{self._turns}", owner="test", lease_ms=LEASE_MS
        )
        reply = await self.store.call(
            lambda stub, timeout_s: stub.BeginTurn(request, timeout=timeout_s),
            tenant=TENANT,
            session_id=session_id,
            patience_s=PATIENCE_S,
        )
        return request, reply

    def committing(
        self, begun: tuple[pb.BeginTurnRequest, pb.BeginTurnReply], tokens: list[int]
    ) -> pb.CommitTurnRequest:
        request, reply = begun
        return pb.CommitTurnRequest(
            tenant=TENANT,
            session_id=request.session_id,
            turn_id=request.turn_id,
            fencing=reply.fencing,
            expected_version=reply.record.version,
            model=b"m" * 32,
            model_name="demo",
            new_tokens=tokens,
        )

    async def commit(self, commit: pb.CommitTurnRequest) -> int:
        reply = await self.store.call(
            lambda stub, timeout_s: stub.CommitTurn(commit, timeout=timeout_s),
            tenant=TENANT,
            session_id=commit.session_id,
            patience_s=PATIENCE_S,
        )
        return reply.version

    async def turn(self, session_id: str, tokens: list[int]) -> int:
        return await self.commit(self.committing(await self.begin(session_id), tokens))

    async def tokens(self, session_id: str) -> list[int]:
        wanted = pb.GetSessionRequest(tenant=TENANT, session_id=session_id)
        record = await self.store.call(
            lambda stub, timeout_s: stub.Get(wanted, timeout=timeout_s),
            tenant=TENANT,
            session_id=session_id,
            patience_s=PATIENCE_S,
        )
        return list(record.tokens)

    async def delete(self, session_id: str) -> None:
        request = pb.DeleteSessionRequest(tenant=TENANT, session_id=session_id)
        await self.store.call(
            lambda stub, timeout_s: stub.Delete(request, timeout=timeout_s),
            tenant=TENANT,
            session_id=session_id,
            patience_s=PATIENCE_S,
        )

    async def close(self) -> None:
        await self.directory.stop()
        await self.fleet.close()
        for shard in self.shards.values():
            with contextlib.suppress(ProcessLookupError):
                shard.process.send_signal(signal.SIGCONT)
            if shard.process.poll() is None:
                shard.kill()
        self.ledger.close()
        self.etcd.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvs-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """Two shards that serve."""
    it = Cluster(folder)
    try:
        it.directory.start()
        it.start("a")
        await it.serve("a")
        it.start("b")
        await it.serve("a", "b")
        yield it
    finally:
        await it.close()


async def test_the_other_shard_goes_on_where_one_died(cluster: Cluster) -> None:
    """Also with turns that were under way, whose leases hold; and what came meanwhile is there in the end."""
    for number, name in enumerate(NAMES):
        assert await cluster.turn(name, [number]) == 1
    under_way = {name: await cluster.begin(name) for name in (cluster.at_home("a"), cluster.at_home("b"))}
    cluster.shards["a"].kill()
    for name, begun in under_way.items():
        with pytest.raises(TurnInProgress):
            await cluster.begin(name)
        assert await cluster.commit(cluster.committing(begun, [100])) == 2
    for number, name in enumerate(NAMES):
        expected = [number, 100] if name in under_way else [number]
        assert await cluster.tokens(name) == expected
    await cluster.serve("b")
    gone, stayed = NAMES[0], NAMES[1]
    await cluster.delete(gone)
    await cluster.turn(stayed, [200])

    cluster.start("a")
    await cluster.serve("a", "b")
    cluster.shards["b"].kill()  # now the one that was away has to know all of it
    await cluster.serve("a")
    with pytest.raises(SessionNotFound):
        await cluster.tokens(gone)
    assert (await cluster.tokens(stayed))[-1] == 200
    for name in NAMES[2:]:
        assert await cluster.tokens(name)


async def test_a_shard_that_hung_can_say_nothing_when_it_wakes(cluster: Cluster) -> None:
    """A router with yesterday's view asks it directly: for reading, beginning and committing."""
    name = cluster.at_home("a")
    await cluster.turn(name, [1])
    begun = await cluster.begin(name)
    stale = cluster.shards["a"]
    pause(stale.process.pid)
    # Sent while it hangs, so that it is asked before it can hear of anything.
    sessions = stale.sessions
    calls = [
        asyncio.create_task(asyncio.to_thread(method, request, timeout=scaled(60)))
        for method, request in (
            (sessions.Get, pb.GetSessionRequest(tenant=TENANT, session_id=name)),
            (sessions.CommitTurn, cluster.committing(begun, [9])),
            (
                sessions.BeginTurn,
                pb.BeginTurnRequest(tenant=TENANT, session_id=name, turn_id="x", owner="o", lease_ms=1000),
            ),
            (sessions.List, pb.ListSessionsRequest(tenant=TENANT)),
        )
    ]
    assert await cluster.commit(cluster.committing(begun, [2])) == 2  # by the other one, in a new view
    await cluster.turn(name, [3])
    stale.process.send_signal(signal.SIGCONT)
    for call in calls:
        with pytest.raises((WrongShard, StoreUnavailable)):
            await call
    await cluster.serve("a", "b")
    assert await cluster.tokens(name) == [1, 2, 3]


async def test_nothing_is_committed_by_a_shard_whose_partner_hangs_until_a_view_says_so(
    cluster: Cluster,
) -> None:
    name = cluster.at_home("a")
    await cluster.turn(name, [1])
    commit = cluster.committing(await cluster.begin(name), [2])
    assert cluster.ledger.process is not None
    pause(cluster.ledger.process.pid)  # no new view
    pause(cluster.shards["b"].process.pid)
    with pytest.raises(KVCommonsError):
        await asyncio.to_thread(cluster.shards["a"].sessions.CommitTurn, commit, timeout=6)
    cluster.ledger.send(signal.SIGCONT)
    assert await cluster.commit(commit) == 2  # the same turn, once
    await cluster.serve("a")
    cluster.shards["b"].process.send_signal(signal.SIGCONT)
    await cluster.serve("a", "b")
    assert await cluster.tokens(name) == [1, 2]


async def test_a_commit_whose_answer_was_lost_is_not_made_twice(cluster: Cluster) -> None:
    """Neither at the same shard nor at the one that takes over."""
    name = cluster.at_home("a")
    commit = cluster.committing(await cluster.begin(name), [1])
    assert await cluster.commit(commit) == 1
    assert await cluster.commit(commit) == 1
    cluster.shards["a"].kill()
    assert await cluster.commit(commit) == 1
    assert await cluster.tokens(name) == [1]


async def test_turns_go_on_without_ledger_and_etcd(cluster: Cluster) -> None:
    cluster.etcd.kill()
    cluster.ledger.kill()
    for name in NAMES:
        await cluster.turn(name, [1])
    assert [await cluster.tokens(name) for name in NAMES] == [[1]] * len(NAMES)


async def test_a_third_shard_takes_its_share_and_leaves_it_again(cluster: Cluster) -> None:
    for number, name in enumerate(NAMES):
        await cluster.turn(name, [number])
    before = {name: cluster.home(name) for name in NAMES}
    cluster.start("c")
    await cluster.serve("a", "b", "c")
    after = {name: cluster.home(name) for name in NAMES}
    assert all(after[name] in (before[name], "c") for name in NAMES)
    reply = await cluster.store.list(pb.ListSessionsRequest(tenant=TENANT, limit=5), patience_s=PATIENCE_S)
    assert [one.session_id for one in reply.sessions] == sorted(NAMES)[:5]
    assert reply.more
    fork = pb.ForkSessionRequest(tenant=TENANT, session_id=NAMES[3], new_id="fork")
    assert list((await cluster.store.fork(fork)).tokens) == [3]
    cluster.shards["c"].kill()
    await cluster.serve("a", "b")
    for number, name in enumerate(NAMES):
        await cluster.turn(name, [50])
        assert await cluster.tokens(name) == [number, 50]
    assert await cluster.tokens("fork") == [3]


async def test_a_folder_that_was_deleted_loses_nothing_that_the_other_has(
    cluster: Cluster, folder: Path
) -> None:
    for number, name in enumerate(NAMES):
        await cluster.turn(name, [number])
    cluster.shards["a"].kill()
    shutil.rmtree(folder / "a.data")
    before = cluster.view
    cluster.start("a")
    await eventually("its loss is known", lambda: cluster.view != before, within_s=30)
    await cluster.serve("a", "b")
    cluster.shards["b"].kill()
    await cluster.serve("a")
    assert [await cluster.tokens(name) for name in NAMES] == [[number] for number in range(len(NAMES))]
