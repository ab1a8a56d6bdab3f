"""One life of several shards and their clients, held against what the clients were told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvcommons.errors import KVCommonsError, NotFound, WrongShard
from kvcommons.pb import kvstore_pb2 as pb
from kvcommons.shards import session_key
from services.kvstore.families import LEASES, RECORDS
from services.kvstore.session import TurnCommit
from services.kvstore.shard_sessions import ShardSessions
from tests.simulation.cluster import Cluster, Process
from tests.simulation.machine import require

TENANT = "t"
KEPT = ("kept-a", "kept-b", "kept-c")
DELETED = ("deleted-a", "deleted-b")
CLIENTS_EACH = 2
LIFE_S = 40.0
ANSWER_S = 4.0
TRIES = 8
LEASE_MS = 20_000
STALE = 0.3
HEALED_S = 40.0


@dataclass
class Truth:
    """What is certain of a session."""

    shown: tuple[int, ...] = ()  # no later read may have less; of sessions that nobody deletes
    asked: set[int] = field(default_factory=set)  # turns whose commit has been sent
    gone: set[int] = field(default_factory=set)  # those asked for before a delete that was acknowledged


class Client:
    """A router's calls for one session, one after the other, each tried again as routers do."""

    def __init__(self, schedule: ShardSchedule, name: str) -> None:
        self.schedule = schedule
        self.name = name
        self.key = session_key(TENANT, name)
        self.truth = schedule.truths[name]

    def next(self) -> None:
        cluster, dice = self.schedule.cluster, self.schedule.dice
        if cluster.time.now > self.schedule.ends:
            return
        what = dice.choice([self._turn, self._turn, self._turn, self._read])
        if self.name in DELETED and dice.random() < 0.2:
            what = self._delete
        cluster.time.after(dice.choice((0.0, 0.5, 3.0)), what)

    def _turn(self) -> None:
        number = self.schedule.number()
        checks = self._reading()

        def begun(found: tuple[pb.SessionRecord, Any]) -> None:
            record, lease = found
            checks(tuple(record.tokens), record.version)
            if self.schedule.dice.random() < 0.15:
                self.next()  # this router dies, or its client goes away
                return
            turn = TurnCommit(
                turn_id=f"{number}",
                fencing=lease.fencing,
                expected_version=record.version,
                model=b"m",
                model_name="m",
                new_tokens=[number],
                new_messages=[pb.Message(role="user", content=f"{number}")],
                block_ids=[bytes([number % 251]) * 32],
            )
            self.truth.asked.add(number)
            self._ask(
                lambda sessions: sessions.commit(TENANT, self.name, turn),
                lambda done: committed(tuple(record.tokens)),
                lambda error: self.next(),
            )

        def committed(before: tuple[int, ...]) -> None:
            if self.name in KEPT:
                tokens = (*before, number)
                shown = self.truth.shown
                same = tokens[: len(shown)] == shown or shown[: len(tokens)] == tokens
                require(same, f"turn {number} committed over {shown} at {before}")
                self.truth.shown = max(shown, tokens, key=len)
                self.schedule.commits += 1
            self.next()

        self._ask(
            lambda sessions: sessions.begin(
                TENANT, self.name, turn_id=f"{number}", owner="o", lease_ms=LEASE_MS
            ),
            begun,
            lambda error: self.next(),
        )

    def _read(self) -> None:
        self.read(self.next)

    def read(self, then: Callable[[], None]) -> None:
        checks = self._reading()

        def failed(error: KVCommonsError | None) -> None:
            if isinstance(error, NotFound):
                checks((), 0)
            then()

        def read(record: pb.SessionRecord) -> None:
            checks(tuple(record.tokens), record.version)
            then()

        self._ask(lambda sessions: sessions.get(TENANT, self.name), read, failed)

    def _delete(self) -> None:
        asked = set(self.truth.asked)

        def deleted(_: object) -> None:
            self.truth.gone |= asked
            self.schedule.deletes += 1
            self.next()

        # Not tried again: what came of it would not be known.
        self._ask(
            lambda sessions: sessions.delete(TENANT, self.name), deleted, lambda error: self.next(), tries=1
        )

    def _reading(self) -> Callable[[tuple[int, ...], int], None]:
        """Called with what is read; the read begins now."""
        shown, gone = self.truth.shown, set(self.truth.gone)

        def checks(tokens: tuple[int, ...], version: int) -> None:
            require(len(set(tokens)) == len(tokens), f"{self.name}: a turn twice in {tokens}")
            require(version == len(tokens), f"{self.name}: version {version} of {tokens}")
            require(not gone & set(tokens), f"{self.name}: deleted turns in {tokens}")
            if self.name in KEPT:
                require(tokens[: len(shown)] == shown, f"{self.name}: {tokens} after {shown} had been shown")
                now = self.truth.shown
                same = tokens[: len(now)] == now or now[: len(tokens)] == tokens
                require(same, f"{self.name}: {tokens} beside {now}")
                self.truth.shown = max(now, tokens, key=len)

        return checks

    def _ask(
        self,
        work: Callable[[ShardSessions], Any],
        done: Callable[[Any], None],
        failed: Callable[[KVCommonsError | None], None],
        *,
        tries: int = TRIES,
    ) -> None:
        """To the session's home as some ledger tells it, several times where no answer comes."""
        cluster = self.schedule.cluster
        over = False

        def attempt(left: int) -> None:
            nonlocal over
            tried = False

            def again() -> None:
                nonlocal tried, over
                if over or tried:
                    return
                tried = True
                if left > 1:
                    cluster.time.after(0.5, lambda: attempt(left - 1))
                else:
                    over = True
                    failed(None)

            def answer(value: Any, error: KVCommonsError | None) -> None:
                nonlocal over
                if over:
                    return
                if error is None:
                    over = True
                    done(value)
                elif error.http_status >= 500:
                    again()
                else:
                    over = True
                    failed(error)

            view = self.schedule.dice.choice(cluster.ledgers).view
            if cluster.views and self.schedule.dice.random() < STALE:  # a router that has heard nothing since
                view = self.schedule.dice.choice(cluster.views[-3:])
            shard = cluster.by_name.get(view.home(self.key)) if view is not None else None
            if shard is None or self.schedule.dice.random() < 0.03:
                shard = self.schedule.dice.choice(cluster.shards)
            cluster.send(lambda: self._serve(shard, work, answer))
            cluster.time.after(ANSWER_S, again)

        attempt(tries)

    def _serve(self, shard: Any, work: Callable[[ShardSessions], Any], answer: Any) -> None:
        process: Process | None = shard.process
        if process is None:
            return
        cluster = self.schedule.cluster
        if process.replica.view is None:  # a router asks nobody before there is a view
            answer(None, WrongShard("no view"))
            return

        def ended(value: Any, error: KVCommonsError | None) -> None:
            cluster.send(lambda: answer(value, error))

        def begin() -> None:
            steps = process.replica.operate(self.key, lambda: work(process.sessions))
            shard.drive(process, steps, ended)

        shard.on(process, begin)()


class ShardSchedule:
    """`run` lives it through; it raises Violation."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        folders = ("a", "b", "c")[: self.dice.choice((2, 2, 3))]
        self.cluster = Cluster(self.dice, folders)
        self.ends = self.cluster.time.now + LIFE_S
        self.truths = {name: Truth() for name in (*KEPT, *DELETED)}
        self.commits = 0
        self.deletes = 0
        self.disks_lost: set[str] = set()
        self._numbers = 0
        self._rough = self.dice.random()

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def run(self) -> None:
        cluster = self.cluster
        for name in (*KEPT, *DELETED):
            for _ in range(CLIENTS_EACH):
                cluster.time.after(self.dice.random() * 5, Client(self, name).next)
        cluster.time.after(self.dice.random() * 10, self._trouble)
        cluster.time.run(self.ends)
        self._heal()
        cluster.time.run(self.ends + HEALED_S)
        self._check()

    def _trouble(self) -> None:
        cluster, dice = self.cluster, self.dice
        if cluster.time.now > self.ends:
            return
        cluster.time.after(dice.random() * (2 + 30 * self._rough), self._trouble)
        shard = dice.choice(cluster.shards)
        what = dice.randrange(12)
        if what <= 1 and shard.process is not None:
            shard.crash()
            cluster.time.after(dice.choice((0.5, 3.0, 12.0, 25.0)), lambda: shard.process or shard.start())
        elif what <= 3 and not shard.paused and shard.process is not None:
            shard.paused = True
            cluster.time.after(dice.choice((0.5, 5.0, 9.0, 20.0)), shard.resume)
        elif what == 4 and self._spare(shard):
            self.disks_lost.add(shard.process.sessions.name if shard.process is not None else "")
            shard.lose_disk()
            cluster.time.after(dice.choice((0.5, 8.0)), lambda: shard.process or shard.start())
        elif what == 5:
            cluster.etcd.away = not cluster.etcd.away
        elif what == 6:
            cluster.loss = dice.choice((0.0, 0.0, 0.05, 0.3))
        elif what <= 8 and not shard.deaf:
            shard.deaf = True
            cluster.time.after(dice.choice((3.0, 9.0, 15.0)), lambda: setattr(shard, "deaf", False))
        elif what == 9:
            cluster.cut = {one.folder for one in dice.sample(cluster.shards, 2)} if not cluster.cut else set()
        elif what == 10:
            cluster.late = dice.choice((0.0, 0.0, 0.02, 0.1))
        else:
            dice.choice(cluster.ledgers).stuck_until = cluster.time.now + dice.choice((5.0, 30.0))

    def _spare(self, shard: Any) -> bool:
        """Whether the view says that all of this disk is on others, and these are up: a ledger takes some
        seconds to see that a shard is gone, and may meanwhile leave the view to it alone."""
        view = self.cluster.etcd.view
        if view is None or not view.settled or len(view.serving) < 2 or shard.process is None:
            return False
        if any(
            one.process is None or one.paused or one.deaf for one in self.cluster.shards if one is not shard
        ):
            return False
        return not self.disks_lost & set(view.serving)

    def _heal(self) -> None:
        cluster = self.cluster
        cluster.loss = cluster.late = 0.0
        cluster.cut = set()
        cluster.etcd.away = False
        for ledger in cluster.ledgers:
            ledger.stuck_until = 0.0
        for shard in cluster.shards:
            if shard.process is None:
                shard.start()
            shard.deaf = False
            shard.resume()

    def _check(self) -> None:
        cluster = self.cluster
        view = cluster.etcd.view
        require(view is not None, "there never was a view")
        assert view is not None
        names = {shard.process.sessions.name for shard in cluster.shards if shard.process is not None}
        require(set(view.serving) == names, f"not all serve in the end: {view} of {names}")
        require(view.settled and not view.joining, f"it never settles: {view}")
        answered: list[str] = []
        for name in (*KEPT, *DELETED):
            Client(self, name).read(lambda name=name: answered.append(name))  # type: ignore[misc]
        cluster.time.run(cluster.time.now + 30.0)
        require(len(answered) == len(self.truths), f"only {answered} can be read in the end")
        for name in (*KEPT, *DELETED):
            key = session_key(TENANT, name)
            copies = {
                (shard.rocks.current.get((RECORDS, key)), shard.rocks.current.get((LEASES, key)))
                for shard in cluster.shards
                if shard.process is not None and shard.process.sessions.name in view.holders(key)
            }
            require(len(copies) == 1, f"the copies of {name} differ")
