"""One life of a commons: instances that borrow and lend, two ledgers that settle, and what must hold."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from kvcommons.engine.sequence import LocalRun
from kvcommons.pb import ledger_pb2 as pb
from services.ledger.debts import WRITE_OFF_S
from services.ledger.saga import Settlement, Step
from tests.simulation.commons_engine import BLOCK_TOKENS, Running
from tests.simulation.commons_instance import LEASE_S, Instance
from tests.simulation.commons_ledger import PART_S, LedgerReplica
from tests.simulation.commons_world import WAKING_S, Etcd, Proc, World
from tests.simulation.machine import require

STEPS = 320
LEDGERS = ("ledger-a", "ledger-b")
REST_ROUNDS = 20  # of 3 s
# Most are laid where a settlement is half done.
AMBUSHES = (*Step, *(Step.SWITCH,) * 5, Step.COPY, *(Step.RELEASE,) * 3)


class Commons(World):
    """Takes down what settlements did."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(dice)
        self.rounds: dict[tuple[str, int], Settlement] = {}  # that were to be switched
        self.done: dict[tuple[str, int], set[str]] = {}  # debtors that did
        self.excused: set[tuple[str, str]] = set()
        self.ambush: tuple[Step, Callable[[Settlement], None]] | None = None

    def written(self, settlement: Settlement | None) -> None:
        if self.ambush is not None and settlement is not None and settlement.step is self.ambush[0]:
            _, strike = self.ambush
            self.ambush = None
            self.after(self.procs["etcd"], self.dice.choice((0.0, 0.03, 0.2)), lambda: strike(settlement))
        if settlement is not None and settlement.step is Step.SWITCH:
            self.rounds[settlement.id, settlement.round] = settlement

    def switched(self, settlement: str, number: int, debtor: str) -> None:
        self.done.setdefault((settlement, number), set()).add(debtor)

    def excuse(self, settlement: str, debtor: str) -> None:
        """It waited in vain for its leader and acts by itself, or is taken to be dead."""
        self.excused.add((settlement, debtor))


class CommonsSchedule:
    """`run` lives it through; it raises Violation."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.world = Commons(dice)
        self.calm = dice.random() < 0.2  # nothing fails
        self.etcd = Etcd(self.world)
        threshold, blocks = dice.choice((1, 1, 2)), dice.choice((1, 1, 2, 3))
        self.ledgers = [
            LedgerReplica(self.world, name, threshold=threshold, round_blocks=blocks) for name in LEDGERS
        ]
        self.instances: list[Instance] = []
        self.lives: list[Instance] = []
        self.number = 0
        self.resting = False
        self.silence = 0  # steps of a second for which nobody leads
        self.storm = 0  # steps for which many messages are lost or late
        for machine in "abcd"[: dice.choice((2, 3, 3, 4))]:
            self._start(machine, 1)

    def run(self) -> None:
        try:
            self._live()
            self._rest()
        finally:
            self.world.close()

    def _live(self) -> None:
        dice, world = self.dice, self.world
        if dice.random() < 0.85:
            self._owe_in_a_circle()
        for instance in self.instances:  # all is known to both ledgers, and one of them may lead already
            beat = instance.describe()
            for ledger in self.ledgers:
                ledger.beat(beat)
        if dice.random() < 0.85:
            world.start(self.ledgers[0], self.ledgers[0].tick)
            for _ in range(10):
                world.deliver()
        if not self.calm:
            world.loss = dice.choice((0.0, 0.0, 0.03, 0.1))
            world.twice = dice.choice((0.0, 0.03, 0.2))
            world.tardy = dice.choice(((), (), (), ("Freeze",), ("Thaw", "ReadBlocks"), ("Trim",)))
            if dice.random() < 0.75:  # in the midst of a settlement
                world.ambush = dice.choice(AMBUSHES), self._strike
        usual = world.loss, world.twice
        rough = 0.0 if self.calm else dice.choice((0.0, 0.01, 0.04))
        for _ in range(3 * STEPS if world.tardy else STEPS):
            draw = dice.random()
            world.loss, world.twice = (0.3, 0.3) if self.storm else usual
            self.storm = max(0, self.storm - 1)
            if self.silence:
                self.silence -= 1
                world.advance(1.0)
                self._deliver_all()
            elif draw < rough:
                self._trouble()
            elif draw < 0.6 and world.deliver():
                pass
            elif draw < 0.74:
                world.advance(0.02)
            elif draw < 0.77:
                if self.calm:
                    self._deliver_all()
                world.advance(0.3 if self.calm else dice.choice((0.3, 0.3, 1.0, 3.0)))
            else:
                self._act(draw)
            self._check()

    # ---- what happens

    def _start(self, machine: str, life: int) -> None:
        total = self.dice.choice((5, 7, 8, 11))
        lend = self.dice.choice((total, total - 1, total // 2))
        spare, ledgers = self.dice.choice((0, 1, 1, 2)), list(LEDGERS)
        self.dice.shuffle(ledgers)
        instance = Instance(self.world, machine, life, blocks=total, lend=lend, spare=spare, ledgers=ledgers)
        self.instances.append(instance)
        self.lives.append(instance)

    def _owe_in_a_circle(self) -> None:
        """Each has a sequence with blocks at the next one."""
        instances = self.instances
        local = [instance.allocator.allocate(1) for instance in instances]
        for at, debtor in enumerate(instances):
            creditor = instances[(at + 1) % len(instances)].describe()
            lent = min(self.dice.choice((1, 2, 3, 4, 4)), creditor.load.lendable_blocks)
            tokens = (1 + lent) * BLOCK_TOKENS - self.dice.choice((0, 0, 1))
            self.number += 1
            one = debtor.engine.sequence(self.number, tokens)
            one.sequence.append_run(LocalRun(first_block=0, blocks=local[at]))
            self.world.start(debtor, functools.partial(_owe, debtor, one, creditor, lent))
            while self.world.deliver():
                pass

    def _act(self, draw: float) -> None:
        dice = self.dice
        instance = dice.choice(self.instances)
        if draw > 0.94:
            ledger = dice.choice(self.ledgers)
            self.world.start(ledger, ledger.tick)
        elif draw > 0.91:
            self.world.happen(instance, lambda: self._beat(instance))
        elif draw > 0.89 or not instance.engine.running:
            self.number += 1
            grows, number, tokens = dice.random() < 0.3, self.number, dice.randint(1, 9)
            begin = instance.engine.begin_growing if grows else instance.engine.begin
            self.world.start(instance, lambda: begin(number, 2 * tokens if grows else tokens))
        else:
            one = dice.choice(list(instance.engine.running.values()))
            if draw < 0.785:
                self.world.happen(instance, lambda: instance.engine.end(one))
            elif draw < (0.83 if self.world.tardy else 0.80):
                creditor = dice.choice(list(instance.loans.debts()) or [instance.name])
                self._call_back(instance, creditor, dice.randint(1, 3))
            elif not one.busy:
                self._iterate(instance, one)

    def _call_back(self, instance: Instance, creditor: str, blocks: int) -> None:
        """A creditor needs its room."""
        settling = instance.participant
        self.world.start(instance, lambda: settling.to_the_end(settling.call_back(creditor, blocks)))

    def _iterate(self, instance: Instance, one: Running) -> None:
        self.world.start(instance, lambda: instance.engine.iterate(one))

    def _beat(self, instance: Instance) -> None:
        ledger = self.dice.choice(self.ledgers)
        beat = instance.describe()
        self.world.send(ledger, lambda: ledger.beat(beat), instance)

    def _strike(self, settlement: Settlement) -> None:
        """Its leader, or one of those that take part."""
        if self.resting:
            return
        kind = self.dice.random()
        if kind < (0.7 if settlement.step is Step.RELEASE else 0.25):
            self.storm = 60
            return
        if kind < 0.4:  # for longer than a participant waits
            self.etcd.paused = True
            self.silence = int(PART_S) + 5
            return
        leaders = [one for one in self.ledgers if settlement.id in one.driven]
        taking_part = [one for one in self.instances if one.name in settlement.participants]
        hit: list[Proc] = [*leaders] if self.dice.random() < 0.7 else [*taking_part]
        if hit and self.dice.random() < 0.6:
            self._kill(self.dice.choice(hit))
        elif hit:
            self.dice.choice(hit).paused = True
        if taking_part and self.dice.random() < 0.6:  # and what was on its way to another is lost
            self.world.lose(self.dice.choice(taking_part))

    def _kill(self, proc: Proc) -> None:
        """Another one is started in its place."""
        proc.alive = False
        if isinstance(proc, Instance):
            self.instances.remove(proc)
            self._start(proc.machine, proc.life + 1)
        elif isinstance(proc, LedgerReplica):
            self.ledgers.remove(proc)
            self.ledgers.append(
                LedgerReplica(self.world, proc.name, threshold=proc.threshold, round_blocks=proc.round_blocks)
            )

    def _trouble(self) -> None:
        dice, world = self.dice, self.world
        proc: Proc = dice.choice((*self.instances, *self.instances, *self.ledgers, self.etcd))
        what = dice.random()
        if what < 0.45:
            if proc.paused:
                world.resume(proc)
            else:
                proc.paused = True
        elif what < 0.8 and proc is not self.etcd:
            self._kill(proc)
        elif what < 0.9:
            pair = dice.sample([one.name for one in self.instances] + list(LEDGERS), 2)
            world.cut = frozenset() if world.cut else frozenset(pair)
        else:
            world.advance(dice.choice((5.0, 9.0, 12.0)))

    # ---- what must hold

    def _check(self) -> None:
        touched = self.world.touched
        led = False
        for proc in touched:
            if isinstance(proc, Instance):
                proc.check()
            else:
                led = True
        if led:
            leading = [one for one in self.ledgers if one.leadership.term(one.clock()) is not None]
            require(len(leading) < 2, "two ledgers lead at once")
        touched.clear()

    def _deliver_all(self) -> None:
        while self.world.deliver():
            self._check()

    def _pass(self, seconds: float) -> None:
        """In which messages arrive in time."""
        for _ in range(int(seconds)):
            self.world.advance(1.0)
            self._deliver_all()

    def _rest(self) -> None:
        """Everything works again, and no new work comes: within a bound all is in order."""
        world = self.world
        self.resting = True
        world.loss = world.twice = 0.0
        world.tardy = ()
        world.cut = frozenset()
        for proc in (*self.instances, *self.ledgers, self.etcd):
            world.resume(proc)
        world.advance(2 * WAKING_S)
        for ledger in self.ledgers:
            ledger.planning = False  # what is under way ends
        for _ in range(REST_ROUNDS):
            for instance in self.instances:  # each time: a growth that was under way may go unheard meanwhile
                world.happen(instance, instance.engine.end_uncertain)
            self._deliver_all()
            if self._disorder() is None:
                break
            for ledger in self.ledgers if self._unsettled() else ():
                world.start(ledger, ledger.tick)
            self._pass(3.0)
        disorder = self._disorder()
        require(disorder is None, disorder or "")
        if self.calm:
            frozen = any(segment.frozen for one in self.instances for segment in one.holder.segments)
            require(not frozen, "blocks that nobody moves stay frozen")
        world.history.rest([one.name for one in self.instances])
        self._check_rounds()
        if self.dice.random() < 0.4:
            self._check_books()
        if self.dice.random() < 0.3:
            self._check_leases()
        for instance in self.instances:
            self.world.happen(instance, functools.partial(self._end_all, instance))
        for _ in range(REST_ROUNDS):  # a late Prepare sets blocks aside, until its lease runs out
            self._deliver_all()
            if not any(instance.allocator.in_use for instance in self.instances):
                break
            world.advance(1.0)
        for instance in self.instances:
            instance.check()
            require(not instance.allocator.in_use, f"blocks of {instance.name} never came back")
        world.history.rest([one.name for one in self.instances], idle=True)
        if self.calm:
            require(not any(one.engine.recomputed for one in self.lives), "KV was lost though nothing failed")

    def _end_all(self, instance: Instance) -> None:
        for one in list(instance.engine.running.values()):
            require(not one.busy, "an iteration never ends")
            instance.engine.end(one)

    def _iterating(self) -> bool:
        return any(
            one.busy or one.growing for debtor in self.instances for one in debtor.engine.running.values()
        )

    def _unsettled(self) -> bool:
        return any(key.startswith("settlements/") for key in self.etcd.keys)

    def _disorder(self) -> str | None:
        """What is not yet as it is at rest."""
        for debtor in self.instances:
            owed = debtor.loans.debts()
            for creditor in self.lives:
                lent = creditor.holder.loans().get(debtor.name, 0) if creditor.alive else 0
                if owed.get(creditor.name, 0) != lent:
                    return f"{debtor.name} owes {creditor.name} {owed.get(creditor.name, 0)} blocks of {lent}"
            if debtor.settlements:
                return "a settlement never ends"
            if debtor.mover._moving:
                return f"a move of {debtor.name} never ends"
            loans = debtor.holder.loans()
            if sum(loans.values()) != sum(loans.get(one.name, 0) for one in self.instances):
                return f"{debtor.name} holds blocks of the dead"
        if self._iterating():
            return "an iteration never ends"
        return "a settlement's record stays" if self._unsettled() else None

    def _check_books(self) -> None:
        """After a heartbeat each and a while the ledger says what the creditors have said, and no more."""
        reported: dict[str, dict[str, int]] = {}
        for _ in range(2):
            self._pass(WRITE_OFF_S + 1.0)
            for instance in self.instances:
                beat = instance.describe()
                reported[instance.name] = dict(beat.load.loans)
                for ledger in self.ledgers:
                    ledger.beat(beat)
            for _ in range(2):  # to write, and to read what the other one has written
                for ledger in self.ledgers:
                    self.world.start(ledger, ledger.tick)
                self._deliver_all()
        for ledger in self.ledgers:
            for name, lent in reported.items():
                noted = ledger.book.loans(name)
                require(noted == lent, f"{ledger.name} notes {noted} where {name} has lent {lent}")

    def _check_leases(self) -> None:
        """Where nothing fails loans outlive their leases, and every sequence finds what it has written."""
        self._pass(LEASE_S)  # renewals that were lost before may have been the last in time
        recomputed = [one.engine.recomputed for one in self.instances]
        self._pass(LEASE_S + 5)
        for instance in self.instances:
            for one in instance.engine.running.values():
                if not one.sequence.full:
                    self._iterate(instance, one)
        for _ in range(REST_ROUNDS):
            self._pass(1.0)
            if not self._iterating():
                break
        require(
            recomputed == [one.engine.recomputed for one in self.instances],
            "KV was lost though nothing failed",
        )

    def _check_rounds(self) -> None:
        """A round is switched by all of its debtors or by none, but for those that died or waited in vain."""
        alive = {one.name for one in self.instances}
        for (name, number), debtors in self.world.done.items():
            settlement = self.world.rounds.get((name, number))
            if settlement is None:
                require(" to " in name, "blocks were switched that no leader had written down")
                continue
            for leg in settlement.legs:
                require(
                    leg.debtor in debtors
                    or leg.debtor not in alive
                    or (name, leg.debtor) in self.world.excused,
                    f"{leg.debtor} did not take part in round {number} of settlement {name}",
                )


async def _owe(debtor: Instance, one: Running, creditor: pb.Instance, blocks: int) -> None:
    one.busy = True
    if blocks:
        run = await debtor.loans._reserve(one.key, str(one.key), creditor, blocks, 1)
        assert run is not None, "it has said that it lends them"
        one.sequence.append_run(run)
    await debtor.engine.prefill(one)
