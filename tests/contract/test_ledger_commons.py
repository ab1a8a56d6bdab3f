"""Debts and settlements of real ledgers on a real etcd.

The debtors are stand-ins that write down what they are asked and can be told to be silent: a real one is a
decode instance with a model, sequences and neighbours, which tests/system starts. What is under test here is
the leader, its death included.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvcommons.errors import KVCommonsError, Unavailable
from kvcommons.pb import holder_pb2, holder_pb2_grpc
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.etcd import Etcd
from services.ledger.settlement_records import decode
from tests.contract.ledger_process import LEASE_S, Ledger, LedgerProcess, instance
from tests.etcd import RealEtcd
from tests.machine import scaled
from tests.waiting import eventually

PATIENCE_S = 40


@dataclass
class StandIn(holder_pb2_grpc.DebtorServicer):
    """`silent`: calls that it lets wait for ever."""

    name: str
    creditor: str
    address: str
    owes: int
    lent: dict[str, int] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    calls: list[tuple[str, int, int]] = field(default_factory=list)  # method, term, round

    async def _take(self, method: str, request: Any) -> None:
        self.calls.append((method, request.term, getattr(request, "round", 0)))
        if method in self.silent:
            await asyncio.sleep(3600)

    async def Prepare(self, request: holder_pb2.PrepareRequest, context: Any) -> holder_pb2.PrepareReply:
        await self._take("Prepare", request)
        return holder_pb2.PrepareReply(blocks=request.blocks)

    async def FreezeDebt(
        self, request: holder_pb2.FreezeDebtRequest, context: Any
    ) -> holder_pb2.FreezeDebtReply:
        await self._take("FreezeDebt", request)
        assert request.creditor == self.creditor
        return holder_pb2.FreezeDebtReply(blocks=request.blocks)

    async def CopyHome(self, request: holder_pb2.RoundRequest, context: Any) -> holder_pb2.RoundReply:
        await self._take("CopyHome", request)
        return holder_pb2.RoundReply(blocks=8)

    async def SwitchHome(self, request: holder_pb2.RoundRequest, context: Any) -> holder_pb2.RoundReply:
        await self._take("SwitchHome", request)
        return holder_pb2.RoundReply(blocks=8)

    async def ReleaseDebt(self, request: holder_pb2.RoundRequest, context: Any) -> holder_pb2.RoundReply:
        await self._take("ReleaseDebt", request)
        self.owes = 0
        self.lent = {}
        return holder_pb2.RoundReply(blocks=8)

    async def End(self, request: holder_pb2.EndRequest, context: Any) -> holder_pb2.EndReply:
        await self._take("End", request)
        return holder_pb2.EndReply()

    def describe(self) -> pb.Instance:
        one = instance(self.name, free=0, lendable=0)
        one.control_address = self.address
        if self.owes:
            one.load.debts[self.creditor] = self.owes
        one.load.loans.update(self.lent)
        return one

    def methods(self) -> list[str]:
        return [method for method, _, _ in self.calls]


@dataclass
class Stack:
    etcd: Etcd
    replicas: list[LedgerProcess]
    ledgers: list[Ledger]
    debtors: list[StandIn] = field(default_factory=list)

    async def leader(self) -> LedgerProcess | None:
        with contextlib.suppress(Unavailable):
            records = (await self.etcd.list(b"/kvcommons/v1/leader")).records
            if records:
                name = pb.Leader.FromString(records[0].value or b"").instance
                return next(one for one in self.replicas if one.address.endswith(name[-2:].strip("-")))
        return None

    async def debts(self) -> dict[str, dict[str, int]]:
        prefix = b"/kvcommons/v1/debts/"
        records = (await self.etcd.list(prefix)).records
        return {
            record.key.removeprefix(prefix).decode(): dict(pb.Loans.FromString(record.value or b"").blocks)
            for record in records
        }

    async def settlements(self) -> list[Any]:
        records = (await self.etcd.list(b"/kvcommons/v1/settlements/")).records
        return [decode(record.value or b"") for record in records]

    async def beat_always(self) -> None:
        while True:
            for ledger in self.ledgers:
                for one in self.debtors:
                    with contextlib.suppress(KVCommonsError):
                        await ledger.beat(one.describe(), timeout_s=scaled(10))
            await asyncio.sleep(0.3)


@pytest.fixture(scope="module")
def real_etcd() -> Iterator[RealEtcd]:
    etcd = RealEtcd()
    etcd.start()
    yield etcd
    etcd.close()


@pytest.fixture
async def stack(real_etcd: RealEtcd, tmp_path: Path) -> AsyncIterator[Stack]:
    replicas = [LedgerProcess(real_etcd.folder, name, real_etcd.endpoint) for name in ("c", "d")]
    etcd = Etcd([real_etcd.endpoint], timeout_s=scaled(10.0))
    await etcd.reconnect()
    for replica in replicas:
        replica.start()
    ledgers = [Ledger(replica.address) for replica in replicas]
    for ledger in ledgers:
        await eventually(ledger.ready, "ready", within_s=PATIENCE_S)
    yield Stack(etcd, replicas, ledgers)
    for ledger in ledgers:
        await ledger.close()
    for replica in replicas:
        replica.close()
    for prefix in (b"/kvcommons/v1/settlements/", b"/kvcommons/v1/debts/", b"/kvcommons/v1/leader"):
        for record in (await etcd.list(prefix)).records:
            await etcd.delete(record.key, record.revision)
    await etcd.close()


@pytest.fixture
async def circle(stack: Stack, real_etcd: RealEtcd) -> AsyncIterator[tuple[Stack, list[StandIn]]]:
    """Two that owe each other ten blocks."""
    servers = []
    for name, other in (("decode-x", "decode-y"), ("decode-y", "decode-x")):
        one = StandIn(name, other, f"unix:{real_etcd.folder}/{name}", owes=10, lent={other: 10})
        (real_etcd.folder / name).unlink(missing_ok=True)
        server = grpc.aio.server()
        holder_pb2_grpc.add_DebtorServicer_to_server(one, server)
        server.add_insecure_port(one.address)
        await server.start()
        servers.append(server)
        stack.debtors.append(one)
    beating = asyncio.create_task(stack.beat_always())
    yield stack, stack.debtors
    beating.cancel()
    await asyncio.wait({beating})
    for server in servers:
        await server.stop(None)


async def test_debts_are_what_creditors_say_and_are_written_off_with_them(stack: Stack) -> None:
    one = instance("pool-1", service="attention_pool")
    one.load.loans.update({"decode-1": 4, "decode-2": 1})

    async def said(by: Ledger, debts: dict[str, int]) -> bool:
        await by.beat(one)  # again and again: one that grows old before it is written is never written
        return await _equal(stack, {"pool-1": debts})

    first, other = stack.ledgers
    await eventually(lambda: said(first, {"decode-1": 4, "decode-2": 1}), "written", within_s=10)
    del one.load.loans["decode-1"]
    await eventually(lambda: said(other, {"decode-2": 1}), "swapped", within_s=10)
    # It beats no more.
    gone_s = await eventually(lambda: _equal(stack, {}), "written off", within_s=LEASE_S + PATIENCE_S)
    assert gone_s > LEASE_S / 4


def once(methods: Iterable[str]) -> list[str]:
    """Who answers late is asked again."""
    return [method for method, _ in itertools.groupby(methods)]


async def _equal(stack: Stack, debts: dict[str, dict[str, int]]) -> bool:
    return await stack.debts() == debts


async def test_a_circle_is_settled_by_the_one_leader(circle: tuple[Stack, list[StandIn]]) -> None:
    stack, debtors = circle
    await eventually(lambda: all("End" in one.methods() for one in debtors), "settled", within_s=PATIENCE_S)
    step = ["FreezeDebt", "CopyHome", "SwitchHome", "ReleaseDebt"]
    for one in debtors:
        assert once(one.methods()) == ["Prepare", *step, *step, "End"]
        assert sorted({number for method, _, number in one.calls if method == "CopyHome"}) == [1, 2]
        assert len({term for _, term, _ in one.calls}) == 1
    await eventually(lambda: _settled(stack), "no record", within_s=10)
    reported = [report for ledger in stack.ledgers for report in await ledger.settlements()]
    assert len(reported) == 1, "the one that leads tells of it, for a while after its end, too"
    assert reported[0].ended
    assert reported[0].begun_ms >= reported[0].ended_ms
    assert reported[0].settlement.step == pb.Settlement.Step.END
    assert {leg.debtor: (leg.left_blocks, leg.settled_blocks) for leg in reported[0].settlement.legs} == {
        "decode-x": (0, 10),
        "decode-y": (0, 10),
    }
    # Nothing is owed any more, so nothing more is asked.
    await eventually(lambda: _equal(stack, {"decode-x": {}, "decode-y": {}}), "agrees", within_s=10)


async def _settled(stack: Stack) -> bool:
    return not await stack.settlements()


@pytest.mark.parametrize(
    ("silent", "asked_after"),
    [("CopyHome", ["End"]), ("SwitchHome", ["SwitchHome", "ReleaseDebt", "End"])],
)
async def test_a_new_leader_undoes_before_the_switch_and_finishes_after_it(
    circle: tuple[Stack, list[StandIn]], silent: str, asked_after: list[str]
) -> None:
    stack, debtors = circle
    debtors[1].silent = frozenset({silent})
    await eventually(lambda: silent in debtors[1].methods(), "under way", within_s=PATIENCE_S)
    leader = await stack.leader()
    assert leader is not None
    by_leader = stack.ledgers[stack.replicas.index(leader)]
    (report,) = await by_leader.settlements()
    steps = {"CopyHome": pb.Settlement.Step.COPY, "SwitchHome": pb.Settlement.Step.SWITCH}
    assert (report.ended, report.settlement.step, report.settlement.round) == (False, steps[silent], 1)
    before = debtors[0].calls[-1][1]
    leader.kill()
    debtors[1].silent = frozenset()
    await eventually(
        lambda: all("End" in one.methods() for one in debtors), "ended", within_s=LEASE_S + PATIENCE_S
    )
    for one in debtors:
        of_the_next = once(method for method, term, _ in one.calls if term > before)
        assert of_the_next[: len(asked_after)] == asked_after
    assert await stack.leader() is not leader
