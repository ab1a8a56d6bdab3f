"""One life of the sessions on a machine that fails, held against what was acknowledged."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcommons.errors import KVCommonsError, SessionNotFound, StoreUnavailable, TurnInProgress
from kvcommons.pb import kvstore_pb2 as pb
from services.kvstore.integrity import IntegrityTable
from services.kvstore.session import TurnBegin, TurnCommit, TurnRenewal
from services.kvstore.sessions import Sessions
from services.router.sessions.copies import RecordCopies, grown
from tests.simulation.machine import Killed, Machine, Rocks, require

NAMES = ("a", "b", "c")
STEPS = 80
LEASE_MS = 10_000

State = tuple[int, tuple[int, ...]] | None  # version, tokens; None: there is no such session


@dataclass
class Begun:
    """A turn that holds a lease, or held one."""

    name: str
    number: int  # also its one new token
    fencing: int
    record: pb.SessionRecord  # of the session before it
    expires_ms: int
    over: bool = False


@dataclass
class Truth:
    """What a session may be: one state, and more after calls without an answer."""

    states: list[State] = field(default_factory=lambda: [None])
    last: int = 0  # the turn committed last, if that is certain

    def see(self, state: State) -> None:
        require(state in self.states, f"a session is {state} and may only be one of {self.states}")
        self.states = [state]

    def maybe(self, state: State) -> None:
        self.states.append(state)


class SessionSchedule:
    """`run` lives it through; it raises Violation."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine = Machine(self.dice)
        self.rocks = Rocks(self.machine)
        self.truths = {name: Truth() for name in NAMES}
        self.turns: list[Begun] = []
        self.copies = RecordCopies()  # a router's
        self.fencing = 0
        self.number = 0
        self._open()

    def _open(self) -> None:
        while True:
            try:
                table = IntegrityTable(self.rocks)
                require(table.whole, "the integrity table misses something after a crash")
                self.sessions = Sessions(table, default_ttl_s=0, clock=self.machine)
                return
            except StoreUnavailable:
                self.machine.heal()

    def run(self) -> None:
        actions: list[Callable[[], None]] = [
            self._begin,
            self._commit,
            self._commit,
            self._abandon,
            self._renew,
            self._look,
            self._create,
            self._delete,
            self._fork,
            self._advance,
            self._faults,
            self._arm,
        ]
        for _ in range(STEPS):
            try:
                self.dice.choice(actions)()
            except Killed:
                self._restart()
            except StoreUnavailable:
                pass
        self.machine.heal()
        self._restart()
        for name in NAMES:
            self._observe(name)
        require(self.sessions.count == sum(f == "heads" for f, _ in self.rocks.current), "a wrong count")
        self._check_families()

    def _restart(self) -> None:
        self.machine.kill_in = None
        power = self.machine.strikes(0.5)
        self.rocks.crash(power=power)
        if power:  # renewals are not synced: what they added may be gone
            for turn in self.turns:
                turn.expires_ms = 0
        self._open()

    def _check_families(self) -> None:
        """Records, heads and uses of blocks name the same."""
        records = {
            key: pb.SessionRecord.FromString(v)
            for (f, key), v in self.rocks.current.items()
            if f == "records"
        }
        require(
            set(records) == {key for f, key in self.rocks.current if f == "heads"}, "a head without a record"
        )
        named = {block_id + key for key, record in records.items() for block_id in record.block_ids}
        require(
            named == {key for f, key in self.rocks.current if f == "uses"}, "uses are not what records name"
        )

    # ---- steps

    def _name(self) -> str:
        return self.dice.choice(NAMES)

    def _observe(self, name: str) -> pb.SessionRecord | None:
        try:
            record = self.sessions.get("t", name)
        except SessionNotFound:
            self.truths[name].see(None)
            return None
        self.truths[name].see((record.version, tuple(record.tokens)))
        require(len(set(record.tokens)) == len(record.tokens), "a turn was committed twice")
        return record

    def _look(self) -> None:
        self._observe(self._name())

    def _begin(self) -> None:
        name = self._name()
        self.number += 1
        now_ms = self.machine.now_ms()
        holders = [t for t in self.turns if t.name == name and not t.over and t.expires_ms > now_ms]
        known = self.copies.get("t", name)
        try:
            wanted = TurnBegin(
                turn_id=f"{self.number}", owner="o", lease_ms=LEASE_MS, known_turn_id=known.last_turn_id
            )
            begun = self.sessions.begin("t", name, wanted)
        except TurnInProgress:
            return
        except StoreUnavailable:
            return
        require(not holders, "two turns of one session at once")
        require(begun.lease.fencing > self.fencing, "a fencing number came twice")
        self.fencing = begun.lease.fencing
        record = begun.record
        if begun.after_known:
            record = grown(known, record, kept_blocks=len(known.block_ids))
        self.copies.put(record)
        if record.version:
            self.truths[name].see((record.version, tuple(record.tokens)))
        for turn in self.turns:
            turn.over = turn.over or turn.name == name
        self.turns.append(Begun(name, self.number, self.fencing, record, now_ms + LEASE_MS))

    def _commit(self) -> None:
        if not self.turns:
            return
        turn = self.dice.choice(self.turns[-6:])
        truth = self.truths[turn.name]
        before = list(truth.states)
        after: list[State] = []
        for state in before:
            version, tokens = state or (0, ())
            if version == turn.record.version:
                after.append((version + 1, (*tokens, turn.number)))
        blocks = [f"{turn.number} {number}".encode().ljust(32) for number in range(turn.number % 7)]
        kept = self.dice.randint(0, len(turn.record.block_ids))
        try:
            committed = self.sessions.commit(
                "t",
                turn.name,
                TurnCommit(
                    turn_id=f"{turn.number}",
                    fencing=turn.fencing,
                    expected_version=turn.record.version,
                    model=b"m",
                    model_name="m",
                    new_tokens=[turn.number],
                    new_messages=[],
                    kept_blocks=kept,
                    block_ids=blocks,
                ),
            )
        except (Killed, StoreUnavailable):
            truth.states += after
            truth.last = 0
            turn.expires_ms = 0  # its lease may be gone
            raise
        except KVCommonsError:
            require(truth.last != turn.number, "a commit that came again was refused")
            return
        if committed.new:
            require(not turn.over, "a turn was committed over the next one")
            require(after, "a turn was committed to a version that it did not begin at")
            truth.states = after
            added = pb.SessionRecord(
                version=committed.version,
                last_turn_id=f"{turn.number}",
                tokens=[turn.number],
                block_ids=blocks,
            )
            self.copies.put(grown(turn.record, added, kept_blocks=kept))
        else:
            truth.states = [s for s in before if s is not None and s[1] and s[1][-1] == turn.number]
            require(truth.states, "a turn that was never committed is called committed")
        turn.over = True
        truth.last = turn.number

    def _abandon(self) -> None:
        if self.turns:
            turn = self.dice.choice(self.turns[-3:])
            turn.expires_ms = 0
            self.sessions.abandon("t", turn.name, turn_id=f"{turn.number}", fencing=turn.fencing)

    def _renew(self) -> None:
        if self.turns:
            turn = self.dice.choice(self.turns[-3:])
            try:
                renewal = TurnRenewal(turn_id=f"{turn.number}", fencing=turn.fencing, lease_ms=LEASE_MS)
                self.sessions.renew("t", turn.name, renewal)
                require(not turn.over, "a lease that went to the next turn was renewed")
                turn.expires_ms = self.machine.now_ms() + LEASE_MS
            except KVCommonsError:
                return

    def _create(self) -> None:
        name = self._name()
        self._change(name, (0, ()), lambda: self.sessions.create("t", name, 0))

    def _delete(self) -> None:
        name = self._name()
        if not self.machine.strikes(0.3):
            return
        turns = [turn for turn in self.turns if turn.name == name]
        expires_ms = [turn.expires_ms for turn in turns]
        for turn in turns:
            turn.expires_ms = 0  # unless it is refused, their lease may be gone
        if self._change(name, None, lambda: self.sessions.delete("t", name)):
            for turn in turns:
                turn.over = True
        else:
            for turn, until_ms in zip(turns, expires_ms, strict=True):
                turn.expires_ms = until_ms

    def _fork(self) -> None:
        source, name = self._name(), self._name()
        record = self._observe(source)
        if record is not None:
            state = (record.version, tuple(record.tokens))
            self._change(name, state, lambda: self.sessions.fork("t", source, name))

    def _change(self, name: str, state: State, call: Callable[[], object]) -> bool:
        """Whether it was acknowledged."""
        try:
            call()
        except (Killed, StoreUnavailable):
            self.truths[name].maybe(state)
            self.truths[name].last = 0
            raise
        except KVCommonsError:
            return False
        self.truths[name].states = [state]
        self.truths[name].last = 0
        return True

    def _advance(self) -> None:
        self.machine.time_s += self.dice.choice((0.1, 3.0, 20.0, 4000.0))
        self.sessions.sweep()

    def _faults(self) -> None:
        self.machine.table_errors = self.dice.choice((0.0, 0.0, 0.2, 1.0))

    def _arm(self) -> None:
        self.machine.kill_in = self.dice.randint(0, 12)
