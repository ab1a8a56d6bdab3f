"""What an instance does in a settlement: the Debtor service of holder.proto, step by step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from kvcommons.errors import CapacityExhausted
from kvcommons.holder.segments import SegmentRef
from services.ledger.saga import DebtorAnswer, DebtorRequest, Step
from tests.simulation.commons_instance import BLOCK_TOKENS, Instance, Run, Sequence
from tests.simulation.commons_world import Call, Sleep, Wait, Work
from tests.simulation.machine import require

PART_S = 15.0  # that a participant waits for its leader
REFUSED = DebtorAnswer(refused=True)
GONE = DebtorAnswer(blocks=0)
STAGES = {Step.FREEZE: 1, Step.COPY: 2, Step.SWITCH: 3, Step.RELEASE: 4}


@dataclass(slots=True, eq=False)
class Move:
    """Leading blocks of a run, on their way home."""

    sequence: Sequence
    run: Run
    count: int
    ref: SegmentRef  # of the generation that was frozen
    homes: list[int] = field(default_factory=list)
    switched: bool = False
    trimmed: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """In one settlement. `stage`: the last step of the round that was taken; 0: none yet, 4: its end."""

    settlement: str
    term: int
    until: float
    round: int = 0
    stage: int = 0
    creditor: str = ""
    moves: list[Move] = field(default_factory=list)
    working: bool = False
    answers: dict[tuple[Step, int], int] = field(default_factory=dict)


class Debtor(Instance):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts: dict[str, Part] = {}
        self.generations = itertools.count(1)

    # ---- asked by the leader

    def settle(self, request: DebtorRequest) -> Work:
        part = self.parts.get(request.settlement)
        if part is not None and request.term < part.term:
            return REFUSED
        if request.step is Step.PREPARE:
            if part is None:
                part = Part(request.settlement, request.term, 0.0)
                self.parts[request.settlement] = part
            blocks = self._pledge(part, request.blocks)
            self._renew_part(part, request)
            return DebtorAnswer(blocks=blocks)
        if part is None:
            return GONE if request.step is Step.END else REFUSED
        self._renew_part(part, request)
        known = part.answers.get((request.step, request.round))
        if known is not None:
            return DebtorAnswer(blocks=known)
        if part.working:
            return None  # it is at it: ask again
        part.working = True
        if request.step is Step.END:
            yield from self._close(part)
            return GONE
        blocks = yield from self._step(part, request)
        part.working = False
        if blocks is None:  # a trim that is not heard of yet is told again
            return REFUSED if request.step is not Step.RELEASE else None
        part.answers[request.step, request.round] = blocks
        return DebtorAnswer(blocks=blocks)

    def call_back(self, creditor: str, blocks: int) -> Work:
        """A creditor needs its room: the same steps, with nobody else in it."""
        name = f"{self.name} to {creditor}"
        if name in self.parts:
            return
        part = self.parts[name] = Part(name, 0, self.clock() + PART_S, working=True)
        self._pledge(part, blocks)
        request = DebtorRequest(
            step=Step.FREEZE, settlement=name, term=0, round=1, creditor=creditor, blocks=blocks
        )
        for step in STAGES:
            if (yield from self._step(part, replace(request, step=step))) is None:
                break
        yield from self._close(part)

    def _pledge(self, part: Part, blocks: int) -> int:
        return self.table.pledges.pledge(part.settlement, blocks, lease_s=PART_S, now_s=self.clock())

    def _renew_part(self, part: Part, request: DebtorRequest) -> None:
        part.term = request.term
        part.until = self.clock() + PART_S
        self._pledge(part, 0)

    # ---- the steps; None: refused

    def _step(self, part: Part, request: DebtorRequest) -> Work:
        if request.step is Step.FREEZE:
            if part.stage not in (0, 4) or request.round != part.round + 1:
                return None
            return (yield from self._freeze(part, request))
        if request.round != part.round or part.stage != STAGES[request.step] - 1:
            return None
        match request.step:
            case Step.COPY:
                return (yield from self._copy(part))
            case Step.SWITCH:
                return (yield from self._switch(part))
            case _:
                return (yield from self._trim(part))

    def _freeze(self, part: Part, request: DebtorRequest) -> Work:
        part.round, part.stage, part.creditor = request.round, 1, request.creditor
        part.moves = []
        left = min(request.blocks, self.table.pledges.pledged(part.settlement))
        chosen = []
        for sequence in self.sequences.values():
            for run in sequence.runs:
                if run.blocks is None and run.creditor == request.creditor and not run.moving and left:
                    sealed = min(run.count, sequence.written // BLOCK_TOKENS - run.first, left)
                    if sealed > 0:
                        run.moving = True
                        left -= sealed
                        chosen.append((sequence, run, sealed))
        frozen = [replace(run.ref, generation=next(self.generations)) for _, run, _ in chosen]
        replies = yield Call(
            [
                (run.creditor, "freeze", (self.name, run.ref, ref.generation, run.offset + count))
                for (_, run, count), ref in zip(chosen, frozen, strict=True)
            ]
        )
        for (sequence, run, count), ref, heard in zip(chosen, frozen, replies, strict=True):
            if heard is True:
                part.moves.append(Move(sequence, run, count, ref))
            else:
                run.moving = False
        return sum(move.count for move in part.moves)

    def _copy(self, part: Part) -> Work:
        moves = [move for move in part.moves if not move.sequence.over]
        replies = yield Call(
            [(part.creditor, "read", (move.ref, move.run.offset, move.count, None)) for move in moves]
        )
        for move, contents in zip(moves, replies, strict=True):
            if move.sequence.over:
                continue
            if not isinstance(contents, list):
                return None
            try:
                move.homes = self.table.pledges.draw(part.settlement, move.count)
            except CapacityExhausted:
                return None
            for block, content in zip(move.homes, contents, strict=True):
                self.contents[block] = content
            self.tell("copy", **_named(move.ref), home=move.homes)
        part.stage = 2
        return sum(move.count for move in part.moves)

    def _switch(self, part: Part) -> Work:
        part.stage = 3  # no way back
        for move in part.moves:
            while move.sequence.busy:
                yield Wait(move.sequence.border)
            if move.sequence.over or not move.homes:
                self._keep(move)
                continue
            runs, run = move.sequence.runs, move.run
            self.tell("switch", **_named(move.ref), count=move.count)
            place = runs.index(run)
            runs.insert(place, Run(run.first, move.count, move.homes))
            move.homes, move.switched = [], True
            run.first += move.count
            run.offset += move.count
            run.count -= move.count
            run.ref = move.ref
            if not run.count:
                runs.remove(run)
        self.world.switched(part.settlement, part.round, self)
        return sum(move.count for move in part.moves)

    def _trim(self, part: Part) -> Work:
        moves = [move for move in part.moves if move.switched and not move.trimmed]
        replies = yield Call(
            [(part.creditor, "trim", (self.name, move.ref, part.settlement)) for move in moves]
        )
        for move, trimmed in zip(moves, replies, strict=True):
            # Without an answer it is told again, until the creditor or the lease is gone.
            if trimmed is None and (part.creditor, move.ref) in self.leases:
                continue
            move.trimmed = True
            move.run.moving = False
            if not move.run.count:
                self.give_back([(part.creditor, move.ref)])
        if any(move.switched and not move.trimmed for move in part.moves):
            return None
        for move in part.moves:
            if move.switched and (part.creditor, move.ref) in self.leases:
                self._require_trimmed(part.creditor, move)
        part.stage = 4
        return sum(move.count for move in part.moves)

    def _require_trimmed(self, creditor: str, move: Move) -> None:
        """Whatever it was told, the creditor keeps nothing that was switched from."""
        holder = self.world.procs[creditor]
        assert isinstance(holder, Instance)
        for segment in holder.table.segments if holder.alive else ():
            require(
                (segment.handle, holder.table.epoch) != (move.ref.handle, move.ref.epoch)
                or segment.trimmed >= move.run.offset,
                f"{creditor} keeps blocks that {self.name} has moved home",
            )

    # ---- the end

    def _close(self, part: Part) -> Work:
        """Undoes a round before its switch, finishes one after it."""
        if part.stage in (1, 2):
            for move in part.moves:
                self._keep(move)
                self.spawn(self._thaw(move.run, move.ref))
        if part.stage == 3:
            while (yield from self._trim(part)) is None:
                yield Sleep(1.0)
        self.table.pledges.redeem(part.settlement)
        self.parts.pop(part.settlement, None)

    def _keep(self, move: Move) -> None:
        """What was copied is not wanted."""
        homes, move.homes = move.homes, []
        self.allocator.release(homes)

    def _thaw(self, run: Run, ref: SegmentRef) -> Work:
        """Until it is heard, or there is nothing left to thaw."""
        while True:
            (thawed,) = yield Call([(run.creditor, "thaw", (self.name, ref))])
            if thawed is not None or (run.creditor, ref) not in self.leases:
                break
        run.moving = False

    def _sweep(self) -> None:
        super()._sweep()
        for part in list(self.parts.values()):
            if not part.working and part.until <= self.clock():
                part.working = True
                self.world.excuse(part.settlement, self)
                self.spawn(self._close(part))

    def owned(self) -> list[int]:
        return super().owned() + [
            block for part in self.parts.values() for move in part.moves for block in move.homes
        ]

    def check(self) -> None:
        super().check()
        require(
            self.table.pledges._pledges.keys() <= self.parts.keys(),
            f"{self.name} keeps blocks aside for a settlement that has ended",
        )
        for sequence in self.sequences.values():
            following = 0
            for run in sequence.runs:
                require(run.first == following, f"{self.name}: a sequence has a gap, or a block twice")
                following += run.count


def _named(ref: SegmentRef) -> dict[str, int]:
    return {"handle": ref.handle, "epoch": ref.epoch, "generation": ref.generation}
