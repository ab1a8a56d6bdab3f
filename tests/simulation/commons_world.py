"""Processes, messages, clocks and an etcd for the simulation of the commons.

Nothing happens by itself: a schedule draws which message arrives next, how far time goes and what fails. So
messages are late and out of order as a matter of course; on top of that they may be lost or come twice.
Processes run generators that yield `Call`, `Sleep` or `Wait`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcommons.errors import KVCommonsError
from tests.simulation.commons_history import History

Then = Callable[[Any], None]
Work = Generator[Any, Any, Any]

WAKING_S = 0.05  # that a process needs for what has piled up while it was paused


class Call:
    """Of methods of other processes, at once. Sent back: a list of what they returned, in order; an error is
    returned as such, and None is no answer."""

    __slots__ = ("calls", "timeout_s")

    def __init__(self, calls: Sequence[tuple[str, str, tuple[Any, ...]]], timeout_s: float = 2.0) -> None:
        """(process, method, arguments)"""
        self.calls = calls
        self.timeout_s = timeout_s


class Sleep:
    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Wait:
    """Until somebody calls what is appended to `waiters`."""

    __slots__ = ("waiters",)

    def __init__(self, waiters: list[Callable[[], None]]) -> None:
        self.waiters = waiters


class Proc:
    """A process: it may be dead, or paused, when nothing reaches it; its clock runs at its own rate."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.stalled: list[Callable[[], None]] = []
        self.rate = world.dice.choice((0.95, 1.0, 1.0, 1.05))
        self._offset = world.dice.choice((-1e6, 0.0, 3e4))
        world.procs[name] = self

    def clock(self) -> float:
        return self._offset + self.world.now * self.rate

    def serve(self, method: str, arguments: tuple[Any, ...], reply: Then) -> None:
        result: Any
        try:
            result = getattr(self, method)(*arguments)
        except KVCommonsError as error:
            result = error
        if isinstance(result, Generator):
            self.run(result, reply)
        else:
            reply(result)

    def spawn(self, work: Work) -> None:
        self.run(work, lambda _: None)

    def run(self, work: Work, then: Then, value: Any = None) -> None:
        """Goes on with `work`; `then` gets what it returns, or an error that it raises."""
        try:
            effect = work.send(value)
        except StopIteration as stop:
            then(stop.value)
            return
        except KVCommonsError as error:
            then(error)
            return
        world = self.world
        if isinstance(effect, Call):
            self._call(work, then, effect)
        elif isinstance(effect, Sleep):
            world.after(self, effect.seconds, lambda: self.run(work, then))
        else:
            effect.waiters.append(lambda: self.run(work, then))

    def _call(self, work: Work, then: Then, effect: Call) -> None:
        calls = effect.calls
        if not calls:
            self.run(work, then, [])
            return
        world = self.world
        replies: list[Any] = [None] * len(calls)
        waiting = set(range(len(calls)))

        def heard(number: int, reply: Any) -> None:
            if number in waiting:
                waiting.discard(number)
                replies[number] = reply
                if not waiting:
                    self.run(work, then, replies)

        def expired() -> None:
            if waiting:
                waiting.clear()
                self.run(work, then, replies)

        for number, (name, method, arguments) in enumerate(calls):
            world.request(self, name, method, arguments, number, heard)
        world.after(self, effect.timeout_s, expired)


class World:
    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.history = History()
        self.now = 1_000.0
        self.procs: dict[str, Proc] = {}
        self.pending: list[tuple[Proc, Callable[[], None]]] = []  # messages under way
        self.loss = 0.0
        self.twice = 0.0
        self.cut: frozenset[str] = frozenset()  # two that do not hear each other
        self.tardy: tuple[str, ...] = ()  # methods: every other request for them is late
        self.touched: set[Proc] = set()  # by the last step
        self._timers: list[tuple[float, int, Proc, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def request(
        self,
        source: Proc,
        name: str,
        method: str,
        arguments: tuple[Any, ...],
        number: int,
        heard: Callable[[int, Any], None],
    ) -> None:
        target = self.procs.get(name)
        if target is None:
            return

        def reply(result: Any) -> None:
            self.send(source, lambda: heard(number, result), target)

        # A call that lends or writes does not come twice by itself; one to grow is repeated by its debtor.
        once = method in ("reserve", "grow_segment") or (method == "read" and arguments[3] is not None)
        late = method in self.tardy and self.dice.random() < 0.5
        self.send(target, lambda: target.serve(method, arguments, reply), source, once=once, late=late)

    def send(
        self,
        target: Proc,
        event: Callable[[], None],
        source: Proc,
        *,
        once: bool = False,
        late: bool = False,
    ) -> None:
        if self.cut and self.cut == {target.name, source.name}:
            return
        draw = self.dice.random()
        if draw < self.loss or late:
            if late or draw < self.loss / 2:  # not lost, but later than anybody waits for it
                self.after(target, self.dice.choice((3.0, 4.0, 7.0) if late else (1.0, 3.0, 7.0)), event)
            return
        self.pending.append((target, event))
        if draw > 1.0 - self.twice and not once:
            self.after(target, self.dice.choice((0.01, 0.05, 0.3, 3.0)), event)

    def after(self, proc: Proc, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds / proc.rate, next(self._numbers), proc, event))

    def deliver(self) -> bool:
        """Any one message."""
        pending = self.pending
        if not pending:
            return False
        at = int(self.dice.random() * len(pending))
        pending[at], pending[-1] = pending[-1], pending[at]
        self.happen(*pending.pop())
        return True

    def happen(self, proc: Proc, event: Callable[[], None]) -> None:
        if proc.paused:
            proc.stalled.append(event)
        elif proc.alive:
            self.touched.add(proc)
            event()

    def advance(self, seconds: float) -> None:
        """Time goes on; what is due by then happens. Of one process in order; messages do not."""
        until = self.now + seconds
        timers = self._timers
        while timers and timers[0][0] <= until:
            self.now, _, proc, event = heapq.heappop(timers)
            self.happen(proc, event)
        self.now = until

    def next_timer(self) -> float | None:
        """Seconds to it."""
        return self._timers[0][0] - self.now if self._timers else None

    def resume(self, proc: Proc) -> None:
        """What reached it meanwhile, its own timers among it, happens in its next moments, in any order."""
        proc.paused = False
        woken, proc.stalled = proc.stalled, []
        for event in woken:
            self.after(proc, self.dice.random() * WAKING_S, event)

    def lose(self, proc: Proc) -> None:
        """What is on its way to a process. What has reached it, its own timers among it, is not."""
        self.pending = [one for one in self.pending if one[0] is not proc]


@dataclass(slots=True)
class Kept:
    value: Any
    revision: int
    created: int
    lease: str = ""


@dataclass
class EtcdLease:
    until: float
    keys: set[str] = field(default_factory=set)


class Etcd(Proc):
    """Keys that change by compare-and-swap, and leases. Its state outlives its process."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "etcd")
        self.rate = 1.0
        self.revision = 10
        self.keys: dict[str, Kept] = {}
        self.leases: dict[str, EtcdLease] = {}

    def campaign(self, key: str, holder: str, lease_s: float) -> int | None:
        """Creates `key` if it is not there; the revision."""
        self._expire()
        if key in self.keys:
            return None
        self.leases[holder] = EtcdLease(self.clock() + lease_s, {key})
        self.revision += 1
        self.keys[key] = Kept(holder, self.revision, self.revision, holder)
        return self.revision

    def keep_alive(self, holder: str, lease_s: float) -> bool:
        self._expire()
        lease = self.leases.get(holder)
        if lease is not None:
            lease.until = self.clock() + lease_s
        return lease is not None

    def swap(self, key: str, value: Any, revision: int) -> int | None:
        """None as the value: the key goes."""
        kept = self.keys.get(key)
        if (kept.revision if kept is not None else 0) != revision:
            return None
        self.revision += 1
        if value is None:
            self.keys.pop(key, None)
        else:
            self.keys[key] = Kept(value, self.revision, kept.created if kept else self.revision)
        return self.revision

    def list(self, prefix: str) -> tuple[int, Mapping[str, tuple[int, Any]]]:
        self._expire()
        return self.revision, {
            key.removeprefix(prefix): (kept.revision, kept.value)
            for key, kept in self.keys.items()
            if key.startswith(prefix)
        }

    def _expire(self) -> None:
        for holder in [name for name, lease in self.leases.items() if lease.until <= self.clock()]:
            for key in self.leases.pop(holder).keys:
                if key in self.keys and self.keys[key].lease == holder:
                    del self.keys[key]
                    self.revision += 1
