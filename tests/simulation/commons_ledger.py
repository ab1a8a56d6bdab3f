"""A replica of the ledger in the simulated commons: the classes that serve, driven by messages."""

from __future__ import annotations

import asyncio
from typing import Any

from kvcommons.errors import DeadlineExceeded, Unavailable
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.candidates import Candidates
from services.ledger.debtors import Debtors
from services.ledger.debts import DebtLedger
from services.ledger.leadership import Campaign, Leadership
from services.ledger.saga import AskDebtors, Settlement, WriteSettlement, busy, settle, take_over
from services.ledger.settlement_plan import MemoryState, Recall, plan
from tests.simulation.commons_world import Proc, World

LEADER_LEASE_S = 6.0
REGISTRY_S = 6.0  # without a heartbeat an instance is gone
PART_S = 15.0  # that a participant waits for its leader
KEY = "leader"


class LedgerReplica(Proc):
    def __init__(self, world: World, name: str, *, threshold: int, round_blocks: int) -> None:
        super().__init__(world, name)
        self.threshold = threshold
        self.round_blocks = round_blocks
        self.index = Candidates(world.dice)
        self.book = DebtLedger()
        self.debtors = Debtors(self.find, lease_ms=int(1000 * PART_S), connect=self.connect)
        self.leadership = Leadership(lease_s=LEADER_LEASE_S)
        self.beats: dict[str, tuple[float, pb.Instance]] = {}
        self.driven: dict[str, Settlement] = {}  # by this replica, as written last
        self.rested_at: dict[str, float] = {}  # when a settlement that an instance was in ended
        self.ticking = False
        self.planning = True
        self.settled = 0
        self._count = 0

    # ---- asked by instances

    def beat(self, instance: pb.Instance) -> None:
        self.beats[instance.id] = (self.clock(), instance)
        self.index.heartbeat(instance)
        self.book.heartbeat(instance.id, instance.load.loans)

    def answer(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        match method:
            case "Candidates":
                chosen = self.index.choose(arguments[0], self.clock())
                return pb.CandidatesReply(creditors=chosen)
            case "ReportRefusal":
                self.index.refused(arguments[0].creditor, self.clock())
                return pb.ReportRefusalReply()
        return super().answer(method, arguments, timeout_s)

    def hears(self, others: dict[str, pb.Instance]) -> None:
        """The registry, as etcd brings it from other replicas."""
        for name, instance in others.items():
            if name not in self.beats:
                self.beats[name] = (self.clock(), instance)

    # ---- its own work

    def living(self) -> dict[str, pb.Instance]:
        now = self.clock()
        self.beats = {name: one for name, one in self.beats.items() if now - one[0] < REGISTRY_S}
        return {name: instance for name, (_, instance) in self.beats.items()}

    def find(self, name: str) -> pb.Instance | None:
        return self.living().get(name)

    async def tick(self) -> None:
        """One round: elect, read, write debts, settle."""
        if self.ticking:
            return
        self.ticking = True
        await self._elect()
        listing = await self._etcd("list", "debts/")
        if isinstance(listing, tuple):
            self.book.listed(*listing)
        living = self.living()
        self.index.follow(living)
        due = self.book.writes()
        term = self.leadership.term(self.clock())
        if term is not None:
            due += self.book.write_offs(living, self.clock())
        for swap in due:
            key = f"debts/{swap.creditor}"
            revision = await self._etcd("swap", key, swap.loans, swap.revision)
            if revision:
                self.book.stored(swap.creditor, revision, swap.loans)
        if term is not None:
            await self._lead(term, living)
        self.ticking = False

    async def _etcd(self, method: str, *arguments: Any) -> Any:
        """What it answers; None where nothing is heard."""
        try:
            return await self.call("etcd", method, *arguments)
        except (Unavailable, DeadlineExceeded):
            return None

    async def _elect(self) -> None:
        asked = self.clock()
        holder = f"{self.name} {asked}"
        match self.leadership.next(asked):
            case Campaign():
                self.holder = holder
                term = await self._etcd("campaign", KEY, holder, LEADER_LEASE_S)
                if term is not None:
                    self.leadership.won(term, asked)
            case _:
                kept = await self._etcd("keep_alive", self.holder, LEADER_LEASE_S)
                if kept:
                    self.leadership.renewed(asked)
                elif kept is False:
                    self.leadership.lost()

    async def _lead(self, term: int, living: dict[str, pb.Instance]) -> None:
        listing = await self._etcd("list", "settlements/")
        if not isinstance(listing, tuple) or self.leadership.term(self.clock()) != term:
            return
        _, records = listing
        for name, (revision, record) in records.items():
            if name not in self.driven:  # another leader's, or one that this one could not write on
                self.driven[name] = record
                self.spawn(self._drive(take_over(record, term), record, revision, term))
        if not self.planning:
            return
        occupied = set(busy(record for _, record in records.values()) | busy(self.driven.values()))
        occupied |= {
            name
            for name, at in self.rested_at.items()
            if name in self.beats and self.beats[name][0] <= at + 0.1
        }
        rooms = {name: MemoryState.of(one.load) for name, one in living.items()}
        debts = self.book.debts(living)
        for one in plan(debts, rooms, threshold=self.threshold, busy=occupied):
            if isinstance(one, Recall):
                self.spawn(self.debtors.call_back(one.debtor, one.creditor, one.blocks))
                continue
            self._count += 1
            settlement = one.settlement(f"{term}-{self._count}", term, self.round_blocks)
            self.driven[settlement.id] = settlement
            self.spawn(self._drive(settle(settlement), settlement, 0, term))

    async def _drive(self, steps: Any, settlement: Settlement, revision: int, term: int) -> None:
        """Carries out what a saga yields."""
        value: Any = None
        while True:
            try:
                effect = steps.send(value)
            except StopIteration as stop:
                if stop.value is not None:
                    self.settled += sum(leg.settled_blocks for leg in stop.value.legs)
                break
            if isinstance(effect, WriteSettlement):
                written = await self._write(settlement.id, effect.settlement, revision, term)
                if written is not None:
                    revision = written
                    self.driven[settlement.id] = effect.settlement or settlement
                value = written is not None
            elif isinstance(effect, AskDebtors):
                living = self.living()
                for name in effect.requests.keys() - living.keys():  # for all that is known here it is dead
                    self.world.excuse(settlement.id, name)
                value = await self.debtors.ask(effect.requests)
            else:
                await asyncio.sleep(0.5)
                value = None
        for name in settlement.participants:
            self.rested_at[name] = self.clock()
        self.driven.pop(settlement.id, None)

    async def _write(self, name: str, value: Settlement | None, revision: int, term: int) -> int | None:
        """The new revision, also where the first answer was lost; None: somebody else has written, or this
        replica does not lead any more."""
        key = f"settlements/{name}"
        while self.leadership.term(self.clock()) == term:
            written = await self._etcd("swap", key, value, revision)
            if written:
                self.world.written(value)
                return written
            listing = await self._etcd("list", key)
            if isinstance(listing, tuple):
                at, found = listing
                found_at, stored = found.get("", (0, None))
                if stored == value:
                    self.world.written(value)
                    return found_at or at
                if found_at != revision:
                    return None
            await asyncio.sleep(0.2)
        return None
