"""Requests at random on planned devices, in simulated time: what the laws of a queue say of them on average
is held against what the engine's own scheduler, and its own choice of chunks, make of each.

Iterations take what the laws of the devices say (`laws.py`). Several are in the stages of a replica at once,
one behind another: the next one enters as soon as the one before leaves the first stage."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.planning.laws import CHUNK_MAX, Beside, Replica
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.scheduler import Scheduler

_MANY = 1 << 30  # prompts in a queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Each request's prompt is `context` tokens, of which the last `new` are computed. It is answered with
    `answer` tokens. `requests_s` of them come a second, at random."""

    context: int
    new: int
    answer: int
    requests_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What requests waited for, in seconds."""

    first_s: list[float] = field(default_factory=list)  # until the first token
    between_s: list[float] = field(default_factory=list)  # for each further one

    @property
    def mean_first_s(self) -> float:
        return sum(self.first_s) / len(self.first_s)


class _Clock:
    """Calls back in the order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_s, next(self._numbers), work))

    def run(self) -> None:
        while self._due:
            self.now_s, _, work = heapq.heappop(self._due)
            work()


class _Instance:
    """A replica with its scheduler. `generates`: it computes its prompts beside its rows, and keeps them."""

    def __init__(
        self,
        replica: Replica,
        clock: _Clock,
        load: Load,
        *,
        iteration_s_max: float,
        first: Callable[[int], None],
        token: Callable[[int], bool],
        generates: bool,
    ) -> None:
        """`first` is called with each request that has its first token, and `token` with each that has
        another one: whether more are to come."""
        room = max(replica.kv_tokens // load.context, 1)  # sequences
        self.scheduler = Scheduler(max_batch=room, max_queue=_MANY, max_prompts=room)
        self._replica, self._clock, self._load = replica, clock, load
        self._iteration_s_max = iteration_s_max
        self._first, self._token, self._generates = first, token, generates
        self._room = room
        self._inside: set[int] = set()  # rows in an iteration under way
        self._since_s: dict[int, float] = {}  # when each row had its last token here
        self._computed: dict[int, int] = {}  # positions, by prompt
        self._entering = False
        self._free_s = [0.0] * replica.stages  # from when on each stage has nothing to do

    @property
    def busy(self) -> int:
        """Requests that it has."""
        mine = self.scheduler
        return mine.running + mine.queued + mine.computing + mine.waiting

    def submit(self, key: int) -> None:
        self.scheduler.submit(key, tokens=self._load.new, deadline_s=math.inf)
        self._wake()

    def start(self, key: int) -> None:
        """Its prompt was computed elsewhere."""
        self.scheduler.start(key)
        self._wake()

    def _wake(self) -> None:
        if not self._entering:
            self._entering = True
            self._clock.at(self._clock.now_s, self._enter)

    def _enter(self) -> None:
        """The next iteration enters the first stage, if there is anything for it."""
        self._entering = False
        for key in self.scheduler.admissible():
            if self.busy - self.scheduler.waiting >= self._room:
                break
            self.scheduler.admit(key, tokens_left=self._load.new)
            self._computed[key] = self._load.context - self._load.new
        rows = self._rows()
        beside = Beside(replica=self._replica, rows=len(rows), row_context=self._load.context)
        limit_s = self._iteration_s_max if self.scheduler.any_running else math.inf
        budget, work, done = beside.budget(limit_s, CHUNK_MAX), IterationWork(), list[int]()

        def is_short(key: int) -> bool:
            first = self._computed[key]
            return budget.is_short(first, self._load.context - first)

        for key, tokens in self.scheduler.spans(lambda key: True, CHUNK_MAX, is_short):
            first = self._computed[key]
            if count := budget.fit(first, tokens):
                chunk = IterationWork.of_chunk(range(first, first + count))
                budget.add(chunk)
                work = work.beside(chunk)
                self._computed[key] += count
                left = self._load.context - self._computed[key]
                self.scheduler.progress(key, tokens_left=left)
                done += [] if left else [key]
        if not work.rows and not rows:
            return
        seconds = beside.seconds(work) if work.rows else self._replica.iteration_s(beside.work(0, 0))
        self._inside.update(rows)
        at_s = self._clock.now_s
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s, free_s) + seconds / self._replica.stages
        self._clock.at(at_s, lambda: self._left(rows, done))
        self._entering = True
        self._clock.at(self._free_s[0], self._enter)

    def _rows(self) -> list[int]:
        """Of the next iteration: of several stages each has a part of all rows. Those go first that wait for
        longest."""
        plan = self.scheduler.plan(needy=frozenset(), free_blocks=_MANY, freed_by={}, may_borrow=False)
        share = -(-len(plan.batch) // self._replica.stages)
        ready = [key for key in plan.batch if key not in self._inside]
        return sorted(ready, key=lambda key: self._since_s.get(key, 0.0))[:share]

    def _left(self, rows: Sequence[int], done: Sequence[int]) -> None:
        """An iteration has left the last stage."""
        self._inside.difference_update(rows)
        for key in rows:
            self._since_s[key] = self._clock.now_s
            if not self._token(key):
                self.scheduler.remove(key)
                del self._since_s[key]
        for key in done:
            del self._computed[key]
            if self._generates:
                self.scheduler.start(key)
            else:
                self.scheduler.remove(key)
            self._first(key)
        self._wake()


def serve(
    prefill: Replica,
    prefills: int,
    decode: Replica | None,
    decodes: int,
    load: Load,
    *,
    iteration_s_max: float,
    requests: int,
    seed: int = 1,
) -> Served:
    """So many replicas of each kind, of which the one takes a request that has least; None: prefills generate
    what they computed, in iterations that take `iteration_s_max` at most."""
    clock, served, dice = _Clock(), Served(), random.Random(seed)
    arrived: dict[int, float] = {}
    told: dict[int, tuple[float, int]] = {}  # when the last token came, and how many are to come

    def first(key: int) -> None:
        served.first_s.append(clock.now_s - arrived[key])
        told[key] = clock.now_s, load.answer - 1
        if decode is not None and load.answer > 1:
            _idlest(generating).start(key)

    def token(key: int) -> bool:
        last_s, left = told[key]
        served.between_s.append(clock.now_s - last_s)
        told[key] = clock.now_s, left - 1
        return left > 1

    def made(replica: Replica, count: int, *, generates: bool) -> list[_Instance]:
        options = {"iteration_s_max": iteration_s_max, "first": first, "token": token, "generates": generates}
        return [_Instance(replica, clock, load, **options) for _ in range(count)]  # type: ignore[arg-type]

    def arrive(key: int) -> None:
        arrived[key] = clock.now_s
        _idlest(computing).submit(key)

    computing = made(prefill, prefills, generates=decode is None and load.answer > 1)
    generating = made(decode, decodes, generates=True) if decode is not None else computing
    at_s = 0.0
    for key in range(requests):
        at_s += dice.expovariate(load.requests_s)
        clock.at(at_s, lambda key=key: arrive(key))  # type: ignore[misc]
    clock.run()
    return served


def _idlest(instances: Sequence[_Instance]) -> _Instance:
    return min(instances, key=lambda one: one.busy)
