"""Several shards, two ledgers and an etcd on one virtual clock: messages are lost, late and out of order,
shards crash, pause and lose their disks, and every ledger knows yesterday's view."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvcommons.errors import KVCommonsError
from kvcommons.pb import shards_pb2 as pb
from kvcommons.shards import ShardView
from services.kvstore.replica import Call, Replica, SessionWork, Sleep
from services.kvstore.shard_sessions import ShardSessions
from services.ledger.shard_views import Report, ShardViews, known_view, report_of
from tests.simulation.machine import Machine, Rocks

CALL_S = 2.0
BEAT_S = 1.0
LEASE_S = 5.0
DELAYS_S = (0.001, 0.001, 0.01, 0.3)
LOCAL_DELAYS_S = (0.0, 0.001, 0.001, 0.05)
Done = Callable[[Any, KVCommonsError | None], None]


class Time:
    """Events in their order."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until


@dataclass(slots=True)
class Etcd:
    """One register that changes by compare-and-swap."""

    view: ShardView | None = None
    away: bool = False

    def swap(self, before: ShardView | None, after: ShardView) -> bool:
        if self.away or self.view != before:
            return False
        self.view = after
        return True


@dataclass(slots=True)
class Process:
    """One life of a shard."""

    sessions: ShardSessions
    replica: Replica
    alive: bool = True
    tasks: int = 0


class Shard:
    """A machine with a disk. It may be down (no process) or paused (a process that does nothing)."""

    def __init__(self, cluster: Cluster, folder: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.skew_s = cluster.dice.choice((0.0, 0.0, -30.0, 45.0))
        self.machine = Machine(cluster.dice)
        self.rocks = Rocks(self.machine)
        self.paused = False
        self.deaf = False  # cut off from the ledgers, and from nobody else
        self._woken: list[Callable[[], None]] = []
        self.process: Process | None = None
        self.start()

    def now_ms(self) -> int:
        return int((self.cluster.time.now + self.skew_s) * 1000)

    def monotonic_s(self) -> float:
        return self.cluster.time.now

    def start(self) -> None:
        sessions = ShardSessions(
            self.rocks,
            folder=self.folder,
            default_ttl_s=0,
            clock=self,
            draw=lambda: f"{self.cluster.dice.getrandbits(32):08x}",
        )
        self.process = Process(sessions, Replica(sessions))
        self.cluster.by_name[sessions.name] = self
        process = self.process
        self._loop(process, process.replica.synchronise, 0.5)
        self._loop(process, process.replica.settle, 1.0)
        self._beat(process)

    def crash(self) -> None:
        if self.process is not None:
            self.process.alive = False
            self.process = None
            self.paused = False
            self._woken.clear()
            self.rocks.crash(power=self.cluster.dice.random() < 0.5)

    def lose_disk(self) -> None:
        self.crash()
        self.rocks = Rocks(self.machine)

    def resume(self) -> None:
        self.paused = False
        woken, self._woken = self._woken, []
        for event in woken:
            self.cluster.time.after(self.cluster.delay(), event)

    def on(self, process: Process, event: Callable[[], None]) -> Callable[[], None]:
        """The event, once this process lives and is not paused; never if it has died."""

        def happen() -> None:
            if not process.alive:
                return
            if self.paused:
                self._woken.append(happen)
            else:
                event()

        return happen

    def drive(self, process: Process, steps: Generator[Any, Any, Any], done: Done) -> None:
        process.tasks += 1

        def ended(result: Any, error: KVCommonsError | None) -> None:
            process.tasks -= 1
            done(result, error)

        def advance(value: Any, error: KVCommonsError | None) -> None:
            try:
                step = steps.throw(error) if error is not None else steps.send(value)
            except StopIteration as stop:
                ended(stop.value, None)
                return
            except KVCommonsError as raised:
                ended(None, raised)
                return
            match step:
                case SessionWork(work=work):
                    self._local(process, work, advance)
                case Call(requests=requests):
                    self._call(process, requests, advance)
                case Sleep(seconds=seconds):
                    self.cluster.time.after(seconds, self.on(process, lambda: advance(None, None)))

        advance(None, None)

    def _local(self, process: Process, work: Callable[[], Any], advance: Done) -> None:
        """On a thread: it happens some time later, and is heard of some time after that."""

        def happen() -> None:
            value, error = None, None
            try:
                value = work()
            except KVCommonsError as raised:
                error = raised
            back = self.on(process, lambda: advance(value, error))
            self.cluster.time.after(self.cluster.delay(local=True), back)

        self.cluster.time.after(self.cluster.delay(local=True), self.on(process, happen))

    def _call(self, process: Process, requests: Any, advance: Done) -> None:
        replies: list[Any] = [None] * len(requests)
        open_calls = set(range(len(requests)))

        def heard(number: int, reply: Any) -> None:
            if number in open_calls:
                open_calls.discard(number)
                replies[number] = reply
                if not open_calls:
                    advance(replies, None)

        for number, (name, request) in enumerate(requests):
            answered = lambda reply, number=number: heard(number, reply)  # noqa: E731
            answer = lambda reply, answered=answered: self.cluster.send(  # noqa: E731
                self.on(process, lambda: answered(reply))
            )
            peer = self.cluster.by_name.get(name)
            if peer is not None and {self.folder, peer.folder} != self.cluster.cut:
                copy = type(request).FromString(request.SerializeToString())
                self.cluster.send(
                    lambda peer=peer, copy=copy, answer=answer, name=name: peer.asked(name, copy, answer)
                )
            self.cluster.time.after(CALL_S, self.on(process, lambda number=number: heard(number, None)))
        if not requests:
            advance([], None)

    def asked(self, name: str, request: Any, answer: Callable[[Any], None]) -> None:
        """A request has come to this machine's socket."""
        process = self.process
        if process is None or process.sessions.name != name:
            return

        def begin() -> None:
            replica = process.replica
            steps = (
                replica.receive(request)
                if isinstance(request, pb.ReplicateRequest)
                else replica.compared(request)
            )
            self.drive(process, steps, lambda reply, error: answer(reply) if error is None else None)

        self.on(process, begin)()

    def adopt(self, view: ShardView) -> None:
        process = self.process
        if process is not None:
            steps = process.replica.adopt
            self.on(process, lambda: self.drive(process, steps(view), lambda *_: None))()

    def _loop(self, process: Process, steps: Callable[[], Generator[Any, Any, Any]], pause_s: float) -> None:
        def again(*_: object) -> None:
            self.cluster.time.after(pause_s, self.on(process, lambda: self.drive(process, steps(), again)))

        again()

    def _beat(self, process: Process) -> None:
        shard = process.sessions.shard()
        for ledger in self.cluster.ledgers if not self.deaf else ():
            self.cluster.send(partial(ledger.heard, self.folder, shard, self.cluster.time.now))
        self.cluster.time.after(BEAT_S, self.on(process, lambda: self._beat(process)))


class Ledger:
    """A replica: it knows what it heard, and what etcd held some time ago."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.seen: ShardView | None = None
        self._heard: dict[str, tuple[float, Report]] = {}
        self._views = ShardViews(grace_s=1.0, draw=lambda: "stack")
        self.stuck_until = 0.0
        self._told: ShardView | None = None
        self._round()

    def heard(self, folder: str, shard: pb.Shard, sent: float) -> None:
        if folder not in self._heard or self._heard[folder][0] < sent:
            self._heard[folder] = (sent, report_of(shard))

    @property
    def view(self) -> ShardView | None:
        """What it tells."""
        return known_view(self.seen, self._present())

    def _present(self) -> dict[str, Report]:
        now = self.cluster.time.now
        return {report.name: report for at, report in self._heard.values() if now - at < LEASE_S}

    def _round(self) -> None:
        cluster = self.cluster
        cluster.time.after(cluster.dice.choice((0.2, 0.5, 1.0)), self._round)
        if cluster.time.now < self.stuck_until:
            return
        etcd = cluster.etcd
        if not etcd.away:
            if cluster.dice.random() < 0.7:
                self.seen = etcd.view
            following = self._views.next(self.seen, self._present(), cluster.time.now)
            if following is not None and etcd.swap(self.seen, following):
                self.seen = following
                cluster.views.append(following)
        view = self.view
        if view is not None and (view != self._told or cluster.dice.random() < 0.2):
            self._told = view
            for shard in cluster.shards:
                if not shard.deaf:
                    cluster.send(partial(shard.adopt, view))


@dataclass
class Cluster:
    dice: random.Random
    folders: tuple[str, ...]
    loss: float = 0.0
    late: float = 0.0  # how often a message is very late
    cut: set[str] = field(default_factory=set)  # two shards that do not hear each other
    time: Time = field(default_factory=Time)
    etcd: Etcd = field(default_factory=Etcd)
    views: list[ShardView] = field(default_factory=list)
    by_name: dict[str, Shard] = field(default_factory=dict)
    ledgers: list[Ledger] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledgers = [Ledger(self), Ledger(self)]
        for folder in self.folders:
            self.shards.append(Shard(self, folder))

    def delay(self, *, local: bool = False) -> float:
        if local:
            return LOCAL_DELAYS_S[int(self.dice.random() * 4)]
        if self.dice.random() < self.late:
            return self.dice.choice((1.0, 4.0, 20.0))
        return DELAYS_S[int(self.dice.random() * 4)]

    def send(self, event: Callable[[], None]) -> None:
        if self.dice.random() >= self.loss:
            self.time.after(self.delay(), event)
