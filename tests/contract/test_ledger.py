"""The ledger's contract: two real replicas on one real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.rpc.directory import Directory, Heartbeat
from services.ledger.candidates import REFUSAL_S
from tests.contract.ledger_process import HEARTBEAT_MS, LEASE_S, Ledger, LedgerProcess, beaten, instance
from tests.etcd import RealEtcd
from tests.machine import scaled
from tests.waiting import eventually


def _shouting(**facts: Any) -> pb.Instance:
    """One that says more of itself than others should hear."""
    one = instance("decode-1")
    one.MergeFrom(pb.Instance(**facts))
    return one


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LedgerProcess, LedgerProcess]]:
    etcd = RealEtcd()
    etcd.start()
    pair = tuple(LedgerProcess(etcd.folder, name, etcd.endpoint) for name in ("a", "b"))
    for process in pair:
        process.start()
    yield pair  # type: ignore[misc]
    for process in pair:
        process.close()
    etcd.close()


@pytest.fixture
async def ledgers(replicas: tuple[LedgerProcess, LedgerProcess]) -> AsyncIterator[tuple[Ledger, Ledger]]:
    pair = Ledger(replicas[0].address), Ledger(replicas[1].address)
    for ledger in pair:
        await eventually(ledger.ready, "ready", within_s=20)
    yield pair
    for ledger in pair:
        await ledger.close()


async def test_what_one_replica_hears_all_tell(ledgers: tuple[Ledger, Ledger]) -> None:
    a, b = ledgers
    one = instance("decode-1", free=7)
    assert await a.beat(one) == HEARTBEAT_MS
    await eventually(lambda: a.has("decode-1"), "in a's view", within_s=10)
    await eventually(lambda: beaten(a, b, one), "in b's view", within_s=10)
    assert (await b.view())["decode-1"] == one
    assert await b.has("ledger-a", "ledger-b")
    # The heartbeat moves to the other replica, with news.
    moved = instance("decode-1", free=3)

    async def a_knows() -> bool:
        # As instances do, again and again: for as long as a's heartbeat is fresh, a writes over the first.
        await b.beat(moved)
        found = (await a.view()).get("decode-1")
        return found is not None and found.load.free_blocks == 3

    await eventually(a_knows, "a has b's news", within_s=10)
    await a.beat(moved, leaving=True)
    await eventually(lambda: _lacks(a, "decode-1"), "left", within_s=LEASE_S - 1)  # long before its lease
    # A replica whose etcd was away, at its start too, doubts for the time of a lease what that deletes.
    await eventually(lambda: _lacks(b, "decode-1"), "left for b", within_s=LEASE_S + 2)
    # A heartbeat that was under way comes late: it does not come back.
    await a.beat(moved)
    after = instance("decode-3")
    await eventually(lambda: beaten(a, b, after), "b has what a heard after that", within_s=10)
    await a.beat(after, leaving=True)
    for ledger in ledgers:
        assert await _lacks(ledger, "decode-1")
    # Another life under the same name does.
    again = instance("decode-1", started_ms=2)
    await eventually(lambda: beaten(a, b, again), "back", within_s=10)
    await a.beat(again, leaving=True)


async def _lacks(ledger: Ledger, name: str) -> bool:
    return name not in await ledger.view()


async def test_who_falls_silent_is_gone_after_its_lease(ledgers: tuple[Ledger, Ledger]) -> None:
    a, b = ledgers
    await eventually(lambda: beaten(a, b, instance("decode-2")), "b knows it", within_s=10)
    lease_s = scaled(float(LEASE_S))
    until = time.monotonic() + 2 * lease_s
    while time.monotonic() < until:  # far longer than a lease: heartbeats keep it
        await a.beat(instance("decode-2"))
        await asyncio.sleep(HEARTBEAT_MS / 1e3)
        if time.monotonic() > until - lease_s:
            assert await a.has("decode-2")
            assert await b.has("decode-2")
    within_s = 2 * LEASE_S + 2
    gone_s = await eventually(lambda: _lacks(a, "decode-2"), "gone from a", within_s=within_s)
    await eventually(lambda: _lacks(b, "decode-2"), "gone from b", within_s=10)
    assert gone_s > lease_s / 4


async def test_candidates_over_the_wire(ledgers: tuple[Ledger, Ledger]) -> None:
    a, b = ledgers
    # On a host of their own, so that other tests' instances are far.
    mine = [
        instance("pool-1", service="attention_pool", lendable=50),
        instance("pool-2", service="attention_pool", lendable=60),
        instance("kvstore-1", service="kvstore", lendable=90),
        instance("pool-far", service="attention_pool", lendable=99, host="h2"),
    ]

    async def beat(names: set[str]) -> None:
        for one in mine:
            if one.id in names:
                await a.beat(one)

    async def promised(ledger: Ledger) -> list[list[str]]:
        # Until its next heartbeat it has 20 less: who was told of it may be there first.
        return [await ledger.candidates(20), await ledger.candidates(55)]

    async def refused() -> list[list[str]]:
        named = [await a.candidates(55)]
        await a.refuse("pool-2")
        named.append(await a.candidates(20))
        await beat({"pool-1"})
        named.append(await a.candidates(20))
        await beat({"pool-2"})
        return [*named, await a.candidates(20)]

    async def in_time(calls: Callable[[], Awaitable[list[list[str]]]]) -> list[list[str]]:
        """What they answer, made while what was promised or refused among them counts."""
        for _ in range(10):
            await beat({one.id for one in mine})
            began = time.monotonic()
            answers = await calls()
            if time.monotonic() - began < REFUSAL_S / 2:
                return answers
            await asyncio.sleep(REFUSAL_S)  # all of it is forgotten then
        raise AssertionError(f"the calls never took less than {REFUSAL_S / 2} s")

    await eventually(lambda: beaten(a, b, *mine), "b knows them", within_s=10)
    for ledger in ledgers:
        assert await in_time(lambda ledger=ledger: promised(ledger)) == [
            ["pool-2", "pool-1", "pool-far"],
            ["pool-far"],
        ]
    assert await in_time(refused) == [
        ["pool-2", "pool-far"],
        ["pool-1", "pool-far"],
        ["pool-1", "pool-far"],
        ["pool-2", "pool-1", "pool-far"],
    ]
    for one in mine:
        await a.beat(one, leaving=True)


async def test_bad_heartbeats_are_refused(ledgers: tuple[Ledger, Ledger]) -> None:
    for bad, param in (
        (instance(""), "instance.id"),
        (instance("x" * 300), "instance.id"),
        (_shouting(records="x" * 300_000), "instance"),
        (_shouting(load=pb.Load(loans={f"debtor-{number}": 1 for number in range(20_000)})), "instance"),
        (instance("x", service="decod"), "instance.service"),
        (pb.Instance(id="x", service="decode"), "instance.control_address"),
        # All parts that were missing were named: of so many, in 20 GB.
        (_shouting(heads=pb.HeadPart(group="g", number=0, parts=2**32 - 1)), "instance.heads"),
        (_shouting(heads=pb.HeadPart(group="g", number=2, parts=2)), "instance.heads"),
    ):
        with pytest.raises(InvalidInput) as caught:
            await ledgers[0].beat(bad)
        assert caught.value.param == param


async def test_load_that_changes_all_the_time_is_no_storm(ledgers: tuple[Ledger, Ledger]) -> None:
    a, b = ledgers
    names = [f"decode-s{index}" for index in range(20)]
    await eventually(lambda: beaten(a, b, *map(instance, names)), "b knows them", within_s=10)
    stop = asyncio.Event()

    async def chatter() -> None:
        free = 0
        while not stop.is_set():
            for name in names:
                free += 1
                await a.beat(instance(name, free=free))

    task = asyncio.create_task(chatter())
    views: list[pb.View] = []
    began = time.monotonic()
    async with contextlib.aclosing(a.views(scaled(30))) as watch:
        async for view in watch:
            views.append(view)
            if len(views) == 6:
                break
    took_s = time.monotonic() - began
    stop.set()
    await task
    # Two a second, after the first two; one or the other may come for who leaves the registry meanwhile.
    assert len(views) == 6
    assert took_s > 1.0
    frees = [max(one.load.free_blocks for one in view.instances) for view in views]
    assert frees == sorted(frees)
    assert frees[-1] > frees[0]
    for name in names:
        await a.beat(instance(name), leaving=True)


async def test_directory_and_heartbeat(
    replicas: tuple[LedgerProcess, LedgerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcommons.rpc.directory.BEAT_TIMEOUT_S", scaled(10.0))
    addresses = [replica.address for replica in replicas]
    ready = False

    def describe() -> pb.Instance:
        one = instance("prefill-1", service="prefill")
        one.load.ready = ready
        return one

    directory = Directory(addresses, "router-1")
    heartbeat = Heartbeat(addresses, describe)
    directory.start()
    heartbeat.start()
    try:
        await eventually(lambda: directory.find("prefill-1"), "seen", within_s=20)
        assert directory.connected
        assert directory.instances("prefill") == []
        assert [one.id for one in directory.instances("prefill", ready=False)] == ["prefill-1"]
        ready = True
        heartbeat.beat_now()
        assert [one.id for one in await directory.wait_for("prefill", timeout_s=scaled(20))] == ["prefill-1"]
        # A failed call: left out, until a heartbeat says something new.
        directory.suspect("prefill-1")
        assert directory.instances("prefill") == []
        back_s = await eventually(lambda: directory.instances("prefill"), "suspicion lapses", within_s=20)
        assert back_s > 1
        await heartbeat.stop()
        await eventually(lambda: directory.find("prefill-1") is None, "left", within_s=LEASE_S - 1)
    finally:
        await directory.stop()


def test_it_stays_small_and_never_imports_torch(replicas: tuple[LedgerProcess, LedgerProcess]) -> None:
    process = replicas[0].process
    assert process is not None
    assert process.poll() is None, replicas[0].log()
    status = Path(f"/proc/{process.pid}/status").read_text()
    resident_kb = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert resident_kb < 150 << 10
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
