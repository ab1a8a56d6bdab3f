"""Ledger replicas and etcd are killed, paused and late; what is known stays known, and nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kvcommons.errors import KVCommonsError, Loading, Unavailable
from kvcommons.rpc.directory import Directory, Heartbeat
from services.ledger.etcd import Etcd
from services.ledger.mirror import Mirror
from services.ledger.registry import Registry
from tests.contract.ledger_process import ETCD_TIMEOUT_S, LEASE_S, Ledger, LedgerProcess, beaten, instance
from tests.etcd import RealEtcd
from tests.machine import scaled
from tests.waiting import eventually

WITHIN_S = 20.0  # what takes a moment on a quiet machine
LEASE_IS_OVER_S = scaled(float(LEASE_S)) + 1
PREFIX = b"/kvcommons/v1/instances/"


@pytest.fixture
def etcd() -> Iterator[RealEtcd]:
    etcd = RealEtcd()
    yield etcd
    etcd.close()


@pytest.fixture
def processes(etcd: RealEtcd) -> Iterator[list[LedgerProcess]]:
    """Two replicas, not started."""
    processes = [LedgerProcess(etcd.folder, name, etcd.endpoint) for name in ("a", "b")]
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
async def ledgers(processes: list[LedgerProcess]) -> AsyncIterator[list[Ledger]]:
    ledgers = [Ledger(process.address) for process in processes]
    yield ledgers
    for ledger in ledgers:
        await ledger.close()


async def start(etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger]) -> None:
    etcd.start()
    for process in processes:
        process.start()
    for ledger in ledgers:
        await eventually(ledger.ready, "ready", within_s=WITHIN_S)


class Fleet:
    """Instances that heartbeat, and a directory; notes whenever one of them is missing from its view."""

    def __init__(self, addresses: list[str], names: list[str]) -> None:
        self.names = names
        self.directory = Directory(addresses, "router-1")
        self.beats = [Heartbeat(addresses, lambda name=name: instance(name)) for name in names]
        self.missing: list[tuple[float, str]] = []
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        self.directory.start()
        for beat in self.beats:
            beat.start()
        await eventually(lambda: self._absent() == [], "all there", within_s=WITHIN_S)
        self._watch = asyncio.create_task(self._note())
        return self

    async def hears(self, ledger: Ledger, name: str) -> bool:
        """Whether the directory knows of it, which beats at this ledger."""
        await ledger.beat(instance(name))
        return self.directory.find(name) is not None

    async def __aexit__(self, *exc: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        for beat in self.beats:
            await beat.stop()
        await self.directory.stop()

    def _absent(self) -> list[str]:
        return [name for name in self.names if self.directory.find(name) is None]

    async def _note(self) -> None:
        began = time.monotonic()
        while True:
            self.missing += [(time.monotonic() - began, name) for name in self._absent()]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("dying", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_replica_dies_and_nobody_goes_missing(
    etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger], dying: int
) -> None:
    await start(etcd, processes, ledgers)
    addresses = [ledger.address for ledger in ledgers]
    async with Fleet(addresses, ["decode-1", "decode-2", "decode-3", "pool-1"]) as fleet:
        processes[dying].kill()
        await eventually(
            lambda: fleet.hears(ledgers[1 - dying], "prefill-1"),
            "the directory follows the other replica",
            within_s=WITHIN_S,
        )
        # Whoever was registered at the dead one only would be gone now.
        await asyncio.sleep(LEASE_IS_OVER_S)
        assert fleet.missing == []
        processes[dying].start()
        await eventually(ledgers[dying].ready, "back", within_s=WITHIN_S)


async def test_a_paused_replica_is_left_for_another(
    etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger]
) -> None:
    await start(etcd, processes, ledgers)
    async with Fleet([ledger.address for ledger in ledgers], ["decode-1", "decode-2"]) as fleet:
        processes[0].send(signal.SIGSTOP)
        # At most: the silence after which a watch is given up, and the time to open the next one.
        await eventually(lambda: fleet.hears(ledgers[1], "late"), "seen", within_s=WITHIN_S)
        assert fleet.missing == []
        processes[0].send(signal.SIGCONT)


async def test_etcd_dies_and_comes_back(
    etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger]
) -> None:
    await start(etcd, processes, ledgers)
    async with Fleet([ledger.address for ledger in ledgers], ["decode-1", "decode-2", "decode-3"]) as fleet:
        etcd.kill()
        for ledger in ledgers:
            await eventually(lambda ledger=ledger: _not_ready(ledger), "noticed", within_s=WITHIN_S)
        # While it is away new ones are told by the replica that hears them, and those it heard last are kept.
        await ledgers[0].beat(instance("decode-new"))
        await eventually(lambda: ledgers[0].has("decode-new"), "told", within_s=WITHIN_S)
        assert await ledgers[1].has("decode-1", "decode-2", "decode-3")
        # It fell silent: etcd is not needed to know that.
        await eventually(lambda: _is_gone(ledgers[0], "decode-new"), "forgotten", within_s=WITHIN_S)
        assert await ledgers[1].has("decode-1", "decode-2", "decode-3")
        etcd.start()
        for ledger in ledgers:
            await eventually(ledger.ready, "ready again", within_s=WITHIN_S)
        await eventually(
            lambda: beaten(*ledgers, instance("prefill-1")), "the replicas agree again", within_s=WITHIN_S
        )
        await asyncio.sleep(LEASE_IS_OVER_S)
        assert fleet.missing == []


async def _not_ready(ledger: Ledger) -> bool:
    return not await ledger.ready()


async def test_a_paused_etcd_holds_nobody_up(
    etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger]
) -> None:
    await start(etcd, processes, ledgers)
    a, b = ledgers
    async with Fleet([a.address, b.address], ["decode-1", "decode-2", "decode-3"]) as fleet:
        etcd.pause()
        calls_s: dict[str, list[float]] = {"heartbeat": [], "candidates": [], "view": [], "other view": []}
        until = time.monotonic() + LEASE_IS_OVER_S + 2
        while time.monotonic() < until:
            calls = (a.beat(instance("other")), a.candidates(), a.view(), b.view())
            for found_s, call in zip(calls_s.values(), calls, strict=True):
                began = time.monotonic()
                await call
                found_s.append(time.monotonic() - began)
            await asyncio.sleep(0.05)
        # A call that waits for etcd waits each time, until its timeout; a busy machine delays some.
        for name, found_s in calls_s.items():
            assert statistics.median(found_s) < scaled(ETCD_TIMEOUT_S), name
        assert not await a.ready()
        etcd.resume()
        for ledger in ledgers:
            await eventually(ledger.ready, "ready again", within_s=WITHIN_S)
        # It wakes to leases that have run out; the living are written again before anyone takes note.
        await asyncio.sleep(LEASE_IS_OVER_S)
        assert fleet.missing == []
        await eventually(
            lambda: beaten(a, b, instance("prefill-1")), "the replicas agree again", within_s=WITHIN_S
        )


async def test_it_starts_before_etcd(
    etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger]
) -> None:
    processes[0].start()
    ledger = ledgers[0]

    async def answers() -> bool:
        with contextlib.suppress(Unavailable):
            await ledger.beat(instance("decode-1"))
            return True
        return False

    await eventually(answers, "answers", within_s=WITHIN_S)
    assert not await ledger.ready()
    with pytest.raises(Loading):  # nothing that it knows would be worth replacing an older view
        await ledger.view()

    async def beats_and_has() -> bool:
        await ledger.beat(instance("decode-1"))
        return await ledger.has("decode-1")

    # After a lease it has heard everyone who is left to be heard.
    await eventually(beats_and_has, "tells what it heard", within_s=WITHIN_S)
    assert not await ledger.ready()
    etcd.start()
    await eventually(ledger.ready, "ready", within_s=WITHIN_S)
    processes[1].start()
    await eventually(lambda: beaten(*ledgers, instance("decode-1")), "its replica agrees", within_s=WITHIN_S)


async def test_a_directory_needs_no_ledger_to_start(
    etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger]
) -> None:
    addresses = [ledger.address for ledger in ledgers]
    directory, beat = Directory(addresses, "router-1"), Heartbeat(addresses, lambda: instance("decode-1"))
    directory.start()
    beat.start()
    try:
        with pytest.raises(Unavailable, match="no decode instance is ready"):
            await directory.wait_for("decode", timeout_s=0.2)
        await asyncio.sleep(1.5)
        await start(etcd, processes[:1], ledgers[:1])
        assert await directory.wait_for("decode", timeout_s=WITHIN_S)
        # All ledgers die, and etcd with them: what was known last stays.
        processes[0].kill()
        etcd.kill()
        await eventually(lambda: not directory.connected, "noticed", within_s=WITHIN_S)
        assert [one.id for one in directory.instances("decode")] == ["decode-1"]
        etcd.start()
        processes[0].start()
        await eventually(lambda: directory.connected, "connected again", within_s=WITHIN_S)
        # A ledger that serves before etcd does knows whom it has heard since.
        await eventually(lambda: directory.find("decode-1"), "known again", within_s=WITHIN_S)
    finally:
        async with asyncio.timeout(scaled(WITHIN_S)):
            await beat.stop()
            await directory.stop()


async def test_a_replica_that_drains_leaves_and_ends_its_watches(
    etcd: RealEtcd, processes: list[LedgerProcess], ledgers: list[Ledger]
) -> None:
    await start(etcd, processes, ledgers)
    await eventually(lambda: ledgers[1].has("ledger-a", "ledger-b"), "b knows a", within_s=WITHIN_S)
    views = ledgers[0].views(30)
    await anext(views)
    process = processes[0].process
    assert process is not None
    process.terminate()
    with contextlib.suppress(KVCommonsError):
        async for _ in views:
            pass
    await eventually(lambda: process.poll() is not None, "ended", within_s=WITHIN_S)
    assert process.returncode == 0, processes[0].log()
    # By then etcd has it no more, whatever the lease had left, or it says why; the others hear of that a
    # moment later. (b knows itself before etcd does, which may be later than this.)
    gone = "ledger-a" not in await registered(etcd)
    assert gone or "stays in the registry until its lease runs out" in processes[0].log()
    await eventually(lambda: _is_gone(ledgers[1], "ledger-a"), "b knows that a left", within_s=WITHIN_S)


async def _is_gone(ledger: Ledger, name: str) -> bool:
    return name not in await ledger.view()


async def registered(etcd: RealEtcd) -> set[str]:
    """The ids of the instances that etcd holds."""
    client = Etcd([etcd.endpoint], timeout_s=scaled(5.0))
    await client.reconnect()
    try:
        return {record.key.rpartition(b"/")[2].decode() for record in (await client.list(PREFIX)).records}
    finally:
        await client.close()


class LateEtcd(Etcd):
    """Holds each put back until it is let go: what a slow disk under etcd does."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__(endpoints, timeout_s=scaled(5.0))
        self.waiting = asyncio.Event()
        self.let_go = asyncio.Event()
        self.written = asyncio.Event()

    async def put(self, key: bytes, value: bytes, *, lease_id: int, lease_s: int, new: bool) -> int:
        self.waiting.set()
        await self.let_go.wait()
        revision = await super().put(key, value, lease_id=lease_id, lease_s=lease_s, new=new)
        self.written.set()
        return revision


async def test_a_write_under_way_does_not_bring_back_who_leaves(etcd: RealEtcd) -> None:
    """A put that reaches etcd after the lease was revoked would grant it anew."""
    etcd.start()
    client = LateEtcd([etcd.endpoint])
    registry = Registry(lease_s=30, heartbeat_s=10)
    mirror = Mirror(client, registry, prefix="/kvcommons/", lease_s=30, changed=lambda: None)
    running = asyncio.create_task(mirror.run())
    try:
        await eventually(lambda: mirror.connected, "listed", within_s=WITHIN_S)
        registry.heartbeat(instance("decode-1"), time.monotonic())
        mirror.wake()
        async with asyncio.timeout(scaled(20)):
            await client.waiting.wait()
        registry.left(instance("decode-1"), time.monotonic())
        leaving = asyncio.create_task(mirror.flush(scaled(20)))
        # A flush that overtakes the put has asked etcd while it listed, and etcd writes in the order in which
        # it was asked.
        await client.list(PREFIX)
        await client.swap(b"after", b"what was asked before", 0)
        client.let_go.set()
        assert await leaving
        async with asyncio.timeout(scaled(20)):
            await client.written.wait()
        assert await registered(etcd) == set()
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_reconnect_fails_the_calls_under_way(etcd: RealEtcd) -> None:
    """They end as failures, to be tried again. Cancelled, they would pass for done in a TaskGroup, and a
    replica's last words for written."""
    etcd.start()
    client = Etcd([etcd.endpoint], timeout_s=scaled(20))
    await client.reconnect()
    etcd.pause()
    try:
        calls = [
            asyncio.create_task(call)
            for call in (client.revoke(1), client.list(PREFIX), client.swap(b"key", b"value", 0))
        ]
        _, waiting = await asyncio.wait(calls, timeout=0.2)
        assert waiting == set(calls)
        await client.reconnect()
        for call in calls:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(call, scaled(5))
        ours = asyncio.create_task(client.list(PREFIX))
        await asyncio.wait({ours}, timeout=0.2)
        ours.cancel()
        await asyncio.wait({ours}, timeout=scaled(5))
        assert ours.cancelled()
    finally:
        etcd.resume()
        await client.close()


async def test_last_words_are_tried_again(etcd: RealEtcd) -> None:
    """etcd stumbles while a replica leaves: it is out of the registry all the same, well before its lease."""
    etcd.start()
    client = Etcd([etcd.endpoint], timeout_s=scaled(0.2))
    registry = Registry(lease_s=30, heartbeat_s=10)
    mirror = Mirror(client, registry, prefix="/kvcommons/", lease_s=30, changed=lambda: None)
    running = asyncio.create_task(mirror.run())
    try:
        registry.heartbeat(instance("decode-1"), time.monotonic())
        await eventually(lambda: registry.is_stored("decode-1"), "written", within_s=WITHIN_S)
        etcd.pause()
        registry.left(instance("decode-1"), time.monotonic())
        leaving = asyncio.create_task(mirror.flush(scaled(20)))
        await asyncio.wait({leaving}, timeout=scaled(0.6))  # longer than a call may take
        etcd.resume()
        assert await leaving
        assert await registered(etcd) == set()
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_an_etcd_that_is_full_is_named_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """Reading from it goes on, so that nothing else would say why no instance is seen any more."""
    full = RealEtcd(quota_bytes=1 << 20)
    full.start()
    client = Etcd([full.endpoint], timeout_s=scaled(5))
    try:
        async with asyncio.timeout(scaled(WITHIN_S)):
            while True:
                with contextlib.suppress(Unavailable):  # it takes connections before it answers
                    await client.reconnect()
                    await client.list(b"/k/")
                    break
                await asyncio.sleep(0.1)
        refused: list[str] = []
        for at in range(100):
            try:
                await client.put(b"/k/%d" % at, os.urandom(400_000), lease_id=at + 1, lease_s=60, new=True)
            except Unavailable as error:
                refused.append(error.message)
            if len(refused) == 3:
                break
            await asyncio.sleep(0.05)  # it looks at its size now and then
        assert len(refused) == 3
        assert [why for why in refused if "etcdctl alarm disarm" not in why] == []
        assert [line.levelname for line in caplog.records if "is full" in line.getMessage()] == ["ERROR"]
        assert (await client.list(b"/k/")).records
    finally:
        await client.close()
        full.close()
