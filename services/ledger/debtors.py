"""Asks instances to take the steps of a settlement: the service Debtor of holder.proto."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import grpc.aio

from kvcommons.errors import DeadlineExceeded, KVCommonsError, Loading, Unavailable
from kvcommons.pb import holder_pb2 as pb
from kvcommons.pb import holder_pb2_grpc as rpc
from kvcommons.pb import ledger_pb2
from kvcommons.rpc.channel import open_channel
from services.ledger.saga import DebtorAnswer, DebtorRequest, Step

if TYPE_CHECKING:
    from kvcommons.pb.holder_pb2_grpc import DebtorAsyncStub  # known to type checkers only

log = logging.getLogger(__name__)

CALL_S = 3.0
COPY_S = 20.0  # a round's blocks, all layers


class Debtors:
    """`find` gives an instance of the registry by its id."""

    def __init__(
        self,
        find: Callable[[str], ledger_pb2.Instance | None],
        *,
        lease_ms: int,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        """`lease_ms`: how long a participant waits for its leader before it undoes or finishes a round."""
        self._find = find
        self._lease_ms = lease_ms
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)

    async def forget_all_but(self, addresses: set[str]) -> None:
        """Closes the channels to the others."""
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close(None)

    async def ask(self, requests: Mapping[str, DebtorRequest]) -> dict[str, DebtorAnswer]:
        """All at once; by debtor."""
        answers = await asyncio.gather(*(self._ask(name, request) for name, request in requests.items()))
        return dict(zip(requests, answers, strict=True))

    async def call_back(self, debtor: str, creditor: str, blocks: int) -> None:
        """A creditor needs its room."""
        stub = self._stub(debtor)
        if stub is None:
            return
        try:
            reply = await stub.CallBack(pb.CallBackRequest(creditor=creditor, blocks=blocks), timeout=COPY_S)
        except KVCommonsError as error:
            log.info("blocks were not called back: %s", error.message, extra={"peer": debtor})
            return
        log.info(
            "called blocks back",
            extra={"peer": debtor, "home_blocks": reply.home_blocks, "moved_blocks": reply.moved_blocks},
        )

    async def _ask(self, debtor: str, request: DebtorRequest) -> DebtorAnswer:
        stub = self._stub(debtor)
        if stub is None:
            return DebtorAnswer(refused=True)  # its leases and ours have run out
        try:
            return DebtorAnswer(blocks=await self._take(stub, request))
        except (Unavailable, DeadlineExceeded, Loading) as error:
            log.info("a debtor does not answer: %s", error.message, extra={"peer": debtor})
            return DebtorAnswer()
        except KVCommonsError as error:
            log.info(
                "a debtor refuses to go on: %s",
                error.message,
                extra={"peer": debtor, "settlement": request.settlement, "step": request.step.name},
            )
            return DebtorAnswer(refused=True)

    async def _take(self, stub: DebtorAsyncStub, request: DebtorRequest) -> int:
        """The blocks that took the step, those included whose sequence has ended."""
        name, term, lease_ms = request.settlement, request.term, self._lease_ms
        round_request = pb.RoundRequest(settlement=name, term=term, lease_ms=lease_ms, round=request.round)
        match request.step:
            case Step.PREPARE:
                prepare = pb.PrepareRequest(
                    settlement=name, term=term, lease_ms=lease_ms, blocks=request.blocks
                )
                return (await stub.Prepare(prepare, timeout=CALL_S)).blocks
            case Step.FREEZE:
                freeze = pb.FreezeDebtRequest(
                    settlement=name,
                    term=term,
                    lease_ms=lease_ms,
                    round=request.round,
                    creditor=request.creditor,
                    blocks=request.blocks,
                )
                return (await stub.FreezeDebt(freeze, timeout=CALL_S)).blocks
            case Step.COPY:
                reply = await stub.CopyHome(round_request, timeout=COPY_S)
            case Step.SWITCH:
                reply = await stub.SwitchHome(round_request, timeout=CALL_S)
            case Step.RELEASE:
                reply = await stub.ReleaseDebt(round_request, timeout=CALL_S)
            case Step.END:
                await stub.End(pb.EndRequest(settlement=name, term=term), timeout=CALL_S)
                return 0
        return reply.blocks + reply.ended_blocks

    def _stub(self, debtor: str) -> DebtorAsyncStub | None:
        instance = self._find(debtor)
        if instance is None:
            return None
        address = instance.control_address
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return rpc.DebtorStub(self._channels[address])
