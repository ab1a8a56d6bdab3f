"""Processes, messages, clocks and an etcd for the simulation of the commons.

Nothing happens by itself: a schedule draws which message arrives next, how far time goes and what fails. So
messages are late and out of order as a matter of course; on top of that they may be lost or come twice.
A process runs coroutines on an event loop of its own, which gets on with its work when something reaches it.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcommons.errors import DeadlineExceeded, KVCommonsError, Unavailable
from tests.simulation.commons_history import History
from tests.simulation.commons_loop import SimulatedLoop
from tests.simulation.machine import Violation

Then = Callable[[Any], None]
Work = Coroutine[Any, Any, Any]

WAKING_S = 0.05  # that a process needs for what has piled up while it was paused
ONCE = frozenset(("Reserve", "Attend"))
REFUSED_S = 0.01  # until it is known that nobody listens any more


class Context:
    """Of a gRPC call, as far as servicers ask for it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def time_remaining(self) -> float:
        return self._timeout_s


class Channel:
    """Of gRPC, to another process: stubs of the services' own make their calls through it."""

    def __init__(self, proc: Proc, address: str) -> None:
        self._proc = proc
        self._address = address

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Work]:
        method = path.rpartition("/")[2]
        return lambda request, timeout: self._proc.call(self._address, method, request, timeout_s=timeout)

    def unary_stream(self, path: str, **_: Any) -> None:
        """No debtor opens streams."""

    async def close(self, grace: float | None) -> None: ...


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
        self.loop = SimulatedLoop(
            clock=self.clock, after=functools.partial(world.after, self), call=self.call, failed=world.fail
        )
        world.started.append(self)
        world.procs[name] = self

    def clock(self) -> float:
        return self._offset + self.world.now * self.rate

    def spawn(self, work: Work) -> None:
        self.loop.create_task(work)

    def connect(self, address: str) -> Any:
        """A gRPC channel."""
        return Channel(self, address)

    async def call(self, name: str, method: str, *arguments: Any, timeout_s: float = 2.0) -> Any:
        """Of a method of another process: returns what it returned, raises what it raised, or Unavailable or
        DeadlineExceeded where nothing was heard."""
        heard = self.loop.create_future()

        def reply(result: Any) -> None:
            if heard.done():
                return
            if isinstance(result, BaseException):
                heard.set_exception(result)
            else:
                heard.set_result(result)

        def expire() -> None:
            hang_up()
            error = self.world.dice.choice((Unavailable, DeadlineExceeded))
            reply(error(f"{name} does not answer"))

        hang_up = self.world.request(self, name, method, arguments, timeout_s, reply)
        timer = self.loop.call_later(timeout_s, expire)
        try:
            return await heard
        finally:
            timer.cancel()

    def answer(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """What a call of a method returns, or a coroutine that does."""
        return getattr(self, method)(*arguments)

    def serve(
        self, method: str, arguments: tuple[Any, ...], timeout_s: float, reply: Then
    ) -> asyncio.Task[Any] | None:
        try:
            result = self.answer(method, arguments, timeout_s)
        except KVCommonsError as error:
            result = error
        if not isinstance(result, Coroutine):
            reply(result)
            return None

        def served(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                error = task.exception()
                reply(task.result() if error is None else error)

        task = self.loop.create_task(result)
        task.add_done_callback(served)
        return task


@dataclass(slots=True)
class Due:
    """What is to happen at a time."""

    proc: Proc
    event: Callable[[], None]
    cancelled: bool = False


class World:
    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.history = History()
        self.now = 1_000.0
        self.procs: dict[str, Proc] = {}
        self.started: list[Proc] = []  # ever
        # Messages under way: to whom, and whether to another process.
        self.pending: list[tuple[Proc, Callable[[], None], bool]] = []
        self.over = False
        self.loss = 0.0
        self.twice = 0.0
        self.cut: frozenset[str] = frozenset()  # two that do not hear each other
        self.tardy: tuple[str, ...] = ()  # methods: every other request for them is late
        self.touched: set[Proc] = set()  # by the last step
        self._timers: list[tuple[float, int, Due]] = []
        self._numbers = itertools.count()
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Something happened that must never happen: raised by the step under way."""
        self._failure = self._failure or error

    def tell(self, name: str, event: str, **facts: Any) -> None:
        """Whoever told of it may not see the violation: it is raised by the step as well."""
        if self.over:
            return
        try:
            self.history.take(name, event, **facts)
        except Violation as violation:
            self.fail(violation)
            raise

    def close(self) -> None:
        """Nothing that is still under way happens."""
        self.over = True
        for proc in self.started:
            proc.loop.close()

    def request(
        self,
        source: Proc,
        name: str,
        method: str,
        arguments: tuple[Any, ...],
        timeout_s: float,
        heard: Then,
    ) -> Callable[[], None]:
        """What is returned hangs up: it tells the process that nobody waits any more."""
        target = self.procs.get(name)
        if target is None or self.over:
            return lambda: None
        if not target.alive and self.dice.random() < 0.5:  # else a packet to its machine is lost
            error = Unavailable(f"nobody listens at {name}")
            self.after(source, REFUSED_S, lambda: heard(error))
            return lambda: None
        serving: list[asyncio.Task[Any]] = []

        def reply(result: Any) -> None:
            self.send(source, lambda: heard(result), target)

        def arrive() -> None:
            task = target.serve(method, arguments, timeout_s, reply)
            if task is not None:
                serving.append(task)

        def leave() -> None:
            for task in serving:
                task.cancel()

        # A call that lends or writes does not come twice by itself; one to grow is repeated by its debtor.
        once = method in ONCE
        late = method in self.tardy and self.dice.random() < 0.5
        self.send(target, arrive, source, once=once, late=late)
        return lambda: self.send(target, leave, source, once=True)

    def post(self, proc: Proc, event: Callable[[], None]) -> None:
        """From one thread of a process to another: it comes some time, whatever is lost."""
        self.pending.append((proc, event, False))

    def send(
        self,
        target: Proc,
        event: Callable[[], None],
        source: Proc,
        *,
        once: bool = False,
        late: bool = False,
    ) -> None:
        if self.over or (self.cut and self.cut == {target.name, source.name}):
            return
        draw = self.dice.random()
        if draw < self.loss or late:
            if late or draw < self.loss / 2:  # not lost, but later than anybody waits for it
                self.after(target, self.dice.choice((3.0, 4.0, 7.0) if late else (1.0, 3.0, 7.0)), event)
            return
        self.pending.append((target, event, True))
        if draw > 1.0 - self.twice and not once:
            self.after(target, self.dice.choice((0.01, 0.05, 0.3, 3.0)), event)

    def after(self, proc: Proc, seconds: float, event: Callable[[], None]) -> Due:
        due = Due(proc, event)
        heapq.heappush(self._timers, (self.now + seconds / proc.rate, next(self._numbers), due))
        return due

    def deliver(self) -> bool:
        """Any one message."""
        pending = self.pending
        if not pending:
            return False
        at = int(self.dice.random() * len(pending))
        pending[at], pending[-1] = pending[-1], pending[at]
        proc, event, _ = pending.pop()
        self.happen(proc, event)
        return True

    def happen(self, proc: Proc, event: Callable[[], None]) -> None:
        if proc.paused:
            proc.stalled.append(event)
        elif proc.alive:
            self.touched.add(proc)
            proc.loop.run(event)
            if self._failure is not None:
                raise self._failure

    def start(self, proc: Proc, work: Callable[[], Work]) -> None:
        """Some work of a process's own, unless it is dead by then."""
        self.happen(proc, lambda: proc.spawn(work()))

    def advance(self, seconds: float) -> None:
        """Time goes on; what is due by then happens. Of one process in order; messages do not."""
        until = self.now + seconds
        timers = self._timers
        while timers and timers[0][0] <= until:
            self.now, _, due = heapq.heappop(timers)
            if not due.cancelled:
                self.happen(due.proc, due.event)
        self.now = until

    def resume(self, proc: Proc) -> None:
        """What reached it meanwhile, its own timers among it, happens in its next moments, in any order."""
        proc.paused = False
        woken, proc.stalled = proc.stalled, []
        for event in woken:
            self.after(proc, self.dice.random() * WAKING_S, event)

    def lose(self, proc: Proc) -> None:
        """What is on its way to a process. What has reached it, its own timers among it, is not."""
        self.pending = [one for one in self.pending if one[0] is not proc or not one[2]]


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
