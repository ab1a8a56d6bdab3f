"""A replica of the ledger in the simulated commons: the classes that serve, driven by messages."""

from __future__ import annotations

from typing import Any

from kvcommons.errors import KVCommonsError
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.candidates import Candidates
from services.ledger.debts import DebtLedger
from services.ledger.leadership import Campaign, Leadership
from services.ledger.saga import (
    AskDebtors,
    DebtorAnswer,
    Settlement,
    WriteSettlement,
    busy,
    settle,
    take_over,
)
from services.ledger.settlement_plan import MemoryState, Recall, plan
from tests.simulation.commons_world import Call, Proc, Sleep, Work, World

LEADER_LEASE_S = 6.0
REGISTRY_S = 6.0  # without a heartbeat an instance is gone
KEY = "leader"


class LedgerReplica(Proc):
    def __init__(self, world: World, name: str, *, threshold: int, round_blocks: int) -> None:
        super().__init__(world, name)
        self.threshold = threshold
        self.round_blocks = round_blocks
        self.index = Candidates(world.dice)
        self.book = DebtLedger()
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

    def candidates(self, request: pb.CandidatesRequest) -> list[str]:
        return [one.id for one in self.index.choose(request, self.clock())]

    def refusal(self, creditor: str) -> None:
        self.index.refused(creditor, self.clock())

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

    def tick(self) -> Work:
        """One round: elect, read, write debts, settle."""
        if self.ticking:
            return
        self.ticking = True
        yield from self._elect()
        (listing,) = yield Call([("etcd", "list", ("debts/",))])
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
            (revision,) = yield Call([("etcd", "swap", (key, swap.loans, swap.revision))])
            if revision:
                self.book.stored(swap.creditor, revision, swap.loans)
        if term is not None:
            yield from self._lead(term, living)
        self.ticking = False

    def _elect(self) -> Work:
        asked = self.clock()
        holder = f"{self.name} {asked}"
        match self.leadership.next(asked):
            case Campaign():
                self.holder = holder
                (term,) = yield Call([("etcd", "campaign", (KEY, holder, LEADER_LEASE_S))])
                if term is not None:
                    self.leadership.won(term, asked)
            case _:
                (kept,) = yield Call([("etcd", "keep_alive", (self.holder, LEADER_LEASE_S))])
                if kept:
                    self.leadership.renewed(asked)
                elif kept is False:
                    self.leadership.lost()

    def _lead(self, term: int, living: dict[str, pb.Instance]) -> Work:
        (listing,) = yield Call([("etcd", "list", ("settlements/",))])
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
                self.spawn(_tell(one))
                continue
            self._count += 1
            settlement = one.settlement(f"{term}-{self._count}", term, self.round_blocks)
            self.driven[settlement.id] = settlement
            self.spawn(self._drive(settle(settlement), settlement, 0, term))

    def _drive(self, steps: Any, settlement: Settlement, revision: int, term: int) -> Work:
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
                written = yield from self._write(settlement.id, effect.settlement, revision, term)
                if written is not None:
                    revision = written
                    self.driven[settlement.id] = effect.settlement or settlement
                value = written is not None
            elif isinstance(effect, AskDebtors):
                names = list(effect.requests)
                replies = yield Call([(name, "settle", (effect.requests[name],)) for name in names], 3.0)
                value = {
                    name: self._answer(settlement.id, name, reply)
                    for name, reply in zip(names, replies, strict=True)
                }
            else:
                yield Sleep(0.5)
                value = None
        for name in settlement.participants:
            self.rested_at[name] = self.clock()
        self.driven.pop(settlement.id, None)

    def _answer(self, settlement: str, name: str, reply: Any) -> DebtorAnswer:
        if isinstance(reply, DebtorAnswer):
            return reply
        if name not in self.living():  # for all that is known here it is dead
            self.world.excused.add((settlement, name))
            return DebtorAnswer(refused=True)
        return DebtorAnswer(refused=isinstance(reply, KVCommonsError))

    def _write(self, name: str, value: Settlement | None, revision: int, term: int) -> Work:
        """The new revision, also where the first answer was lost; None: somebody else has written, or this
        replica does not lead any more."""
        key = f"settlements/{name}"
        while self.leadership.term(self.clock()) == term:
            (written,) = yield Call([("etcd", "swap", (key, value, revision))])
            if written:
                self.world.written(value)
                return written
            (listing,) = yield Call([("etcd", "list", (key,))])
            if isinstance(listing, tuple):
                at, found = listing
                found_at, stored = found.get("", (0, None))
                if stored == value:
                    self.world.written(value)
                    return found_at or at
                if found_at != revision:
                    return None
            yield Sleep(0.2)
        return None


def _tell(recall: Recall) -> Work:
    yield Call([(recall.debtor, "call_back", (recall.creditor, recall.blocks))], 0.1)
