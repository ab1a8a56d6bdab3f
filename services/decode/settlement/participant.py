"""This instance as a participant of settlements: its debts are settled or called back (DGFM: Infinite-LLM,
section 4.5).

The ledger's leader drives a settlement in rounds; see the service Debtor in holder.proto. A leader that
stops calling leaves nothing half done: when the lease runs out, a round that was not switched yet is undone,
and one that was is finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import grpc.aio

from kvcommons.engine.sequence import LocalRun
from kvcommons.errors import Conflict, InvalidInput, Loading, NotFound
from kvcommons.holder.holder import Holder
from kvcommons.holder.pledges import check_lease
from kvcommons.pb import holder_pb2 as pb
from kvcommons.pb import holder_pb2_grpc
from services.decode.borrowing.loans import Loans
from services.decode.moving.mover import Move, Mover

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, kw_only=True)
class _RoundMove:
    """One sequence's blocks in a round."""

    move: Move
    home: list[int] = field(
        default_factory=list
    )  # physical blocks here, once they are allocated for the copy
    ended: bool = False  # its sequence has ended: settled without a move
    released: bool = False


class _RoundState(IntEnum):
    """How far a round has come; each state includes those before it."""

    FROZEN = 0  # the blocks at the creditor do not change any more
    COPIED = 1  # they are here as well
    SWITCHED = 2  # the sequences read them here
    RELEASED = 3  # the creditor has them no more, or the round was undone


@dataclass(slots=True, kw_only=True)
class _Round:
    number: int
    parts: list[_RoundMove]
    state: _RoundState = _RoundState.FROZEN
    pause_us: int = 0

    def reply(self) -> pb.RoundReply:
        ended = sum(part.move.blocks for part in self.parts if part.ended)
        return pb.RoundReply(
            blocks=sum(part.move.blocks for part in self.parts) - ended,
            ended_blocks=ended,
            pause_us=self.pause_us,
        )


@dataclass(slots=True, kw_only=True)
class _Settlement:
    name: str
    term: int
    round: _Round | None = None
    timer: asyncio.TimerHandle | None = None
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class SettlementParticipant:
    """The instance's part in settlements. Belongs to the event loop."""

    def __init__(self, holder: Holder, mover: Mover, loans: Loans) -> None:
        self._holder = holder
        self._mover = mover
        self.to_the_end = mover.to_the_end  # what a call began goes on when its caller is gone
        self._loans = loans
        self._settlements: dict[str, _Settlement] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Nothing is undone: sequences and leases end with the process."""
        for settlement in self._settlements.values():
            if settlement.timer is not None:
                settlement.timer.cancel()
        for task in list(self._tasks):
            task.cancel()

    async def prepare(self, name: str, term: int, blocks: int, lease_s: float) -> int:
        """Pledges up to `blocks` for the settlement, and returns how many."""
        if not name:
            raise InvalidInput("a settlement has a name", param="settlement")
        _check_lease(lease_s)  # before it is known: one without a lease would stay for good
        known = self._settlements.get(name)
        if known is None:
            known = self._settlements[name] = _Settlement(name=name, term=term)
        self._renew_lease(known, term, lease_s)
        return self._holder.pledges.pledge(name, blocks, lease_s=_longer(lease_s))

    async def freeze_debt(
        self, name: str, term: int, lease_s: float, number: int, creditor: str, blocks: int
    ) -> int:
        """Chooses and freezes blocks at the creditor: as many as are agreed for this round."""
        settlement = self._find(name, term, lease_s)
        async with settlement.busy:
            last = settlement.round
            if last is not None and last.number == number:
                return sum(part.move.blocks for part in last.parts)
            if last is not None and last.state < _RoundState.RELEASED:
                raise Conflict(f"round {last.number} of settlement {name} is not released yet")
            settlement.round = _Round(number=number, parts=[])
            holder = self._loans.creditor(creditor)
            if holder is None:
                return 0
            left = min(blocks, self._holder.pledges.pledged(name))
            for one in await self._mover.movable(holder):
                if not left:
                    break
                move = await self._mover.freeze(one, min(one.blocks, left))
                if move is not None:
                    settlement.round.parts.append(_RoundMove(move=move))
                    left -= move.blocks
            return sum(part.move.blocks for part in settlement.round.parts)

    async def copy_home(self, name: str, term: int, lease_s: float, number: int) -> pb.RoundReply:
        async def copy(settlement: _Settlement, round_: _Round) -> None:
            for part in round_.parts:
                if part.home or part.ended:
                    continue
                drawn = self._holder.pledges.draw(name, part.move.blocks)
                copied = False
                try:
                    copied = await self._mover.copy_home(part.move, drawn)
                    part.ended = not copied
                finally:
                    if copied:
                        part.home = drawn
                    else:
                        self._holder.pledges.refill(name, drawn)
            round_.state = _RoundState.COPIED

        return await self._step(name, term, lease_s, number, copy, _RoundState.COPIED)

    async def switch_home(self, name: str, term: int, lease_s: float, number: int) -> pb.RoundReply:
        async def switch(settlement: _Settlement, round_: _Round) -> None:
            if round_.state < _RoundState.COPIED:
                raise Conflict(f"round {number} of settlement {name} is not copied yet")
            for part in round_.parts:
                if part.ended or part.move.switched:
                    continue
                run = LocalRun(first_block=part.move.of.first_block, blocks=list(part.home))
                paused_s = await self._mover.switch(part.move, run)
                if paused_s is None:
                    part.ended = True
                    self._holder.pledges.refill(name, part.home)
                else:
                    round_.pause_us = max(round_.pause_us, int(paused_s * 1e6))
            round_.state = _RoundState.SWITCHED

        return await self._step(name, term, lease_s, number, switch, _RoundState.SWITCHED)

    async def release_debt(self, name: str, term: int, lease_s: float, number: int) -> pb.RoundReply:
        async def release(settlement: _Settlement, round_: _Round) -> None:
            if round_.state < _RoundState.SWITCHED:
                raise Conflict(f"round {number} of settlement {name} is not switched yet")
            await self._finish(settlement)

        return await self._step(name, term, lease_s, number, release, _RoundState.RELEASED)

    async def end(self, name: str, term: int) -> None:
        """Undoes or finishes the round under way, and frees what is set aside."""
        settlement = self._settlements.get(name)
        if settlement is None:
            return
        _check_term(settlement, term)
        async with settlement.busy:
            await self._end(settlement)

    async def call_back(self, creditor: str, blocks: int) -> tuple[int, int]:
        """Blocks at the creditor move home, as far as there is room, then to other holders; how many
        each."""
        holder = self._loans.creditor(creditor)
        if holder is None:
            return 0, 0
        home = await self._mover.bring_home(blocks, holder=holder)
        away = await self._mover.send_away(blocks - home, holder) if home < blocks else 0
        return home, away

    async def _step(
        self,
        name: str,
        term: int,
        lease_s: float,
        number: int,
        work: Callable[[_Settlement, _Round], Awaitable[None]],
        until: _RoundState,
    ) -> pb.RoundReply:
        settlement = self._find(name, term, lease_s)
        async with settlement.busy:
            round_ = settlement.round
            if round_ is None or round_.number != number:
                raise Conflict(f"settlement {name} has no round {number} here: begin it with FreezeDebt")
            if round_.state < until:
                await work(settlement, round_)
            return round_.reply()

    async def _finish(self, settlement: _Settlement) -> None:
        round_ = settlement.round
        if round_ is None or round_.state == _RoundState.RELEASED:
            return
        for part in round_.parts:
            if part.move.switched and not part.released:
                await self._mover.release(part.move, settlement.name)
            elif part.ended and not part.released:
                await self._mover.thaw(part.move)
            part.released = True
        round_.state = _RoundState.RELEASED

    async def _end(self, settlement: _Settlement) -> None:
        round_ = settlement.round
        if round_ is not None and round_.state < _RoundState.RELEASED:
            for part in round_.parts:
                if part.move.switched or part.ended:
                    continue
                self._holder.pledges.refill(settlement.name, part.home)
                part.ended = True
            await self._finish(settlement)
        if settlement.timer is not None:
            settlement.timer.cancel()
        self._settlements.pop(settlement.name, None)
        self._holder.pledges.redeem(settlement.name)

    def _find(self, name: str, term: int, lease_s: float) -> _Settlement:
        settlement = self._settlements.get(name)
        if settlement is None:
            raise NotFound(f"settlement {name} is not known here (any more): begin it with Prepare")
        self._renew_lease(settlement, term, lease_s)
        self._holder.pledges.pledge(name, 0, lease_s=_longer(lease_s))
        return settlement

    def _renew_lease(self, settlement: _Settlement, term: int, lease_s: float) -> None:
        _check_term(settlement, term)
        _check_lease(lease_s)
        settlement.term = term
        if settlement.timer is not None:
            settlement.timer.cancel()
        loop = asyncio.get_running_loop()
        settlement.timer = loop.call_later(lease_s, self._run_out, settlement)

    def _run_out(self, settlement: _Settlement) -> None:
        log.warning("a settlement's leader is not heard of any more", extra={"settlement": settlement.name})
        task = asyncio.get_running_loop().create_task(self._end_late(settlement))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_late(self, settlement: _Settlement) -> None:
        async with settlement.busy:
            if self._settlements.get(settlement.name) is settlement:
                await self._end(settlement)


class DebtorService(holder_pb2_grpc.DebtorServicer):
    """The gRPC face. Answers Loading until it is opened."""

    def __init__(self) -> None:
        self._participant: SettlementParticipant | None = None

    def open(self, participant: SettlementParticipant) -> None:
        self._participant = participant

    async def Prepare(self, request: pb.PrepareRequest, context: _Context) -> pb.PrepareReply:
        participant = self._ready()
        blocks = await participant.to_the_end(
            participant.prepare(request.settlement, request.term, request.blocks, request.lease_ms / 1000)
        )
        return pb.PrepareReply(blocks=blocks)

    async def FreezeDebt(self, request: pb.FreezeDebtRequest, context: _Context) -> pb.FreezeDebtReply:
        participant = self._ready()
        blocks = await participant.to_the_end(
            participant.freeze_debt(
                request.settlement,
                request.term,
                request.lease_ms / 1000,
                request.round,
                request.creditor,
                request.blocks,
            )
        )
        return pb.FreezeDebtReply(blocks=blocks)

    async def CopyHome(self, request: pb.RoundRequest, context: _Context) -> pb.RoundReply:
        participant = self._ready()
        return await participant.to_the_end(participant.copy_home(*_round(request)))

    async def SwitchHome(self, request: pb.RoundRequest, context: _Context) -> pb.RoundReply:
        participant = self._ready()
        return await participant.to_the_end(participant.switch_home(*_round(request)))

    async def ReleaseDebt(self, request: pb.RoundRequest, context: _Context) -> pb.RoundReply:
        participant = self._ready()
        return await participant.to_the_end(participant.release_debt(*_round(request)))

    async def End(self, request: pb.EndRequest, context: _Context) -> pb.EndReply:
        participant = self._ready()
        await participant.to_the_end(participant.end(request.settlement, request.term))
        return pb.EndReply()

    async def CallBack(self, request: pb.CallBackRequest, context: _Context) -> pb.CallBackReply:
        participant = self._ready()
        home, moved = await participant.to_the_end(participant.call_back(request.creditor, request.blocks))
        return pb.CallBackReply(home_blocks=home, moved_blocks=moved)

    def _ready(self) -> SettlementParticipant:
        if self._participant is None:
            raise Loading("this decode instance is still loading its model", retry_after_ms=500)
        return self._participant


def _round(request: pb.RoundRequest) -> tuple[str, int, float, int]:
    return request.settlement, request.term, request.lease_ms / 1000, request.round


def _check_term(settlement: _Settlement, term: int) -> None:
    if term < settlement.term:
        raise Conflict(f"settlement {settlement.name} has a leader of term {settlement.term}, not {term}")


def _check_lease(lease_s: float) -> None:
    """The settlement's, and what is set aside for longer. Raises InvalidInput."""
    check_lease(lease_s)
    check_lease(_longer(lease_s))


def _longer(lease_s: float) -> float:
    """What is set aside outlasts the settlement here, which frees it."""
    return 2 * lease_s + 1
