"""Borrowing where answers are lost: nothing is lent twice, and nothing that was lent is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvcommons.blockstore.loader import BlockLoader
from kvcommons.blockstore.saver import BlockSaver
from kvcommons.errors import CapacityExhausted, DeadlineExceeded
from kvcommons.holder.holder import Holder
from kvcommons.holder.server import HolderService
from kvcommons.pb import holder_pb2, holder_pb2_grpc, ledger_pb2, ledger_pb2_grpc
from kvcommons.rpc.server import RpcServer
from kvcommons.telemetry.telemetry import Telemetry
from kvcommons.transport.deadline import Deadline
from services.decode.borrowing.creditors import Debtor
from services.decode.borrowing.ledger_client import LedgerClient
from services.decode.borrowing.loans import GROW_TRIES, Loans
from services.decode.borrowing.slowness import Slowness
from tests.contract.holder_cases import BLOCK_TOKENS, BLOCKS, FINGERPRINT, NoStores, embedded
from tests.machine import scaled
from tests.waiting import eventually

_Context = grpc.aio.ServicerContext[Any, Any]


class Unheard(HolderService):
    """Grows segments; its next `losses` answers to that are lost, and the next `deaf` trims on their way to
    it."""

    losses = 0
    deaf = 0

    async def Trim(self, request: holder_pb2.TrimRequest, context: _Context) -> holder_pb2.TrimReply:
        if self.deaf:
            self.deaf -= 1
            await asyncio.sleep(60)
        return await super().Trim(request, context)

    async def Reserve(self, request: holder_pb2.ReserveRequest, context: _Context) -> holder_pb2.ReserveReply:
        reply = await super().Reserve(request, context)
        if request.handle and self.losses:
            self.losses -= 1
            await asyncio.sleep(60)
        return reply


class OneCreditor(ledger_pb2_grpc.LedgerServicer):
    """Knows of one that lends."""

    def __init__(self, creditor: ledger_pb2.Instance) -> None:
        self._creditor = creditor

    async def Candidates(
        self, request: ledger_pb2.CandidatesRequest, context: _Context
    ) -> ledger_pb2.CandidatesReply:
        return ledger_pb2.CandidatesReply(creditors=[self._creditor])

    async def ReportRefusal(
        self, request: ledger_pb2.ReportRefusalRequest, context: _Context
    ) -> ledger_pb2.ReportRefusalReply:
        return ledger_pb2.ReportRefusalReply()


@asynccontextmanager
async def lending(folder: Path) -> AsyncIterator[tuple[Loans, Holder, Unheard]]:
    async with embedded(folder) as served:
        saver = BlockSaver("holder-1", hold_s=1)
        loader = BlockLoader([].append)
        service = Unheard()
        service.open(served.holder, loader, saver, NoStores())
        server = RpcServer(f"unix:{folder}/unheard", Telemetry.off("decode"))
        server.add(holder_pb2_grpc.add_HolderServicer_to_server, service)
        ledger = RpcServer(f"unix:{folder}/ledger", Telemetry.off("ledger"))
        load = ledger_pb2.Load(total_blocks=BLOCKS, lendable_blocks=BLOCKS)
        creditor = ledger_pb2.Instance(
            id="holder-1", control_address=server.address, data_address=served.data, load=load
        )
        ledger.add(ledger_pb2_grpc.add_LedgerServicer_to_server, OneCreditor(creditor))
        await server.start()
        await ledger.start()
        debtor = Debtor(instance_id="d", model=FINGERPRINT, block_tokens=BLOCK_TOKENS)
        ledgers = LedgerClient([ledger.address], debtor="d", host="here", model=FINGERPRINT)
        slowness = Slowness(layers=2, deadline_s=2.0, clock=time.monotonic)
        lenders = Loans(debtor, ledgers, lease_ms=10_000, lost=lambda key, error: None, slowness=slowness)
        try:
            yield lenders, served.holder, service
        finally:
            await lenders.close()
            await ledger.drain(1)
            await server.drain(1)
            await service.close()
            await asyncio.to_thread(loader.close)
            await asyncio.to_thread(saver.close, Deadline.after(1))


async def test_a_growth_that_was_not_heard_of_is_asked_for_again_and_made_once(socket_folder: Path) -> None:
    async with lending(socket_folder) as (lenders, holder, service):
        (tail,) = await lenders.borrow(1, "sequence", blocks=3, first_block=2)
        service.losses = 1
        run = await lenders.extend(1, "sequence", tail=tail, blocks=4, first_block=5)
        assert (run.ref, run.first_block, run.segment_block, run.count) == (tail.ref, 5, 3, 4)
        assert lenders.debts() == {"holder-1": 7}
        assert holder.loans() == {"d": 7}
        lenders.give_back([tail])
        await eventually(lambda: holder.allocator.in_use == 0)


async def test_blocks_that_came_unheard_are_the_next_ones(socket_folder: Path) -> None:
    """Nobody else can lend: the sequence does without, until it asks again."""
    async with lending(socket_folder) as (lenders, holder, service):
        (tail,) = await lenders.borrow(1, "sequence", blocks=3, first_block=0)
        rest = await lenders.borrow(2, "another", blocks=BLOCKS - 5, first_block=0)
        service.losses = 2 * GROW_TRIES
        with pytest.raises(CapacityExhausted):
            await lenders.extend(1, "sequence", tail=tail, blocks=2, first_block=3)
        assert holder.loans() == {"d": BLOCKS}
        run = await lenders.extend(1, "sequence", tail=tail, blocks=2, first_block=3)
        assert (run.segment_block, run.count) == (3, 2)
        assert (lenders.debts(), holder.loans()) == ({"holder-1": BLOCKS}, {"d": BLOCKS})
        lenders.give_back([tail, *rest])
        await eventually(lambda: holder.allocator.in_use == 0)


async def test_a_trim_without_an_answer_is_sent_again(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.decode.borrowing.loans.TRIM_S", 0.1)
    monkeypatch.setattr("services.decode.borrowing.loans.TRIM_PAUSE_S", 0.01)
    async with lending(socket_folder) as (lenders, holder, service):
        (run,) = await lenders.borrow(1, "sequence", blocks=5, first_block=0)
        frozen = await run.holder.freeze(run.ref, 2, timeout_s=scaled(5))
        monkeypatch.setattr("services.decode.borrowing.loans.CALL_S", 0.5)  # borrowing has to be answered
        service.deaf = 2
        with pytest.raises(DeadlineExceeded):
            await lenders.trim(run.holder, frozen, 2)
        assert (lenders.debts(), holder.loans()) == ({"holder-1": 3}, {"d": 5})
        await eventually(lambda: holder.loans() == {"d": 3})
        assert service.deaf == 0
        lenders.give_back([run])
        await eventually(lambda: holder.allocator.in_use == 0)
