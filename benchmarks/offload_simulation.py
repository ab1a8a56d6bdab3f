"""Attention offloading on simulated devices: decode's own classes decide which batch computes where and when,
and which sequences are in it; rooflines say how long slices, attention and messages take. A virtual clock.

A batch's attention is divided by requests over the pool's devices, each sequence on the one that had least
KV, and sent in mini-batches (figures 9 and 10 of the Lamina paper). Devices, connections and replicas serve
what comes in order.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.offload_plan import Deployment
from benchmarks.slice_schedule import SliceSchedule, SliceStart
from services.decode.staggering.pipelines import Division, Staggering, Timing

_WARM_ITERATIONS = 4  # of each batch, until they are staggered
_LEARNING_ITERATIONS = 24  # until what has to be tried was tried


class Batching(Enum):
    ONE = "one batch a replica"
    STAGGERED = "the scheme's batches"
    AUTO = "whichever is faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many sequences at all times: one that ends is followed by another. Their contexts are spread evenly
    over `context` * (1 +- `spread`), answers over 1 ... `answer_tokens` (0: none ends)."""

    sequences: int
    context: int
    spread: float = 0.0
    answer_tokens: int = 0


@dataclass(slots=True)
class _Sequence:
    tokens: int
    left: int
    device: int


@dataclass(slots=True)
class _Server:
    """Serves in order. Asked in the order of time."""

    free_s: float = 0.0
    busy_s: float = 0.0

    def take(self, at_s: float, seconds: float) -> float:
        """When what was asked for at `at_s` is done."""
        self.free_s = max(self.free_s, at_s) + seconds
        self.busy_s += seconds
        return self.free_s


@dataclass(slots=True)
class _Flight:
    """An iteration of a batch. `shares` are (device, rows, tokens)."""

    batch: int
    members: list[int]
    tokens: int
    shares: list[tuple[int, int, int]]
    began_s: float
    layer: int = 0
    missing: int = 0  # answers, and the batch's context
    asked_s: float = 0.0
    left_s: float = 0.0  # the replica
    slices_s: float = 0.0
    waiting_s: float = 0.0  # for a replica
    attending_s: float = 0.0  # of the device that has most of it
    stages_s: float = 0.0  # from the end of a slice to the last answer


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of the measured time. `rows` are of each iteration of a batch, the parts of all of them together:
    slices, what was waited for a replica, attention of the device that had most of it, and `stages_s` from
    the end of slices to the last answer: attention, messages and what was waited for devices."""

    seconds: float = 0.0
    tokens: int = 0
    rows: list[int] = field(default_factory=list)
    slices_s: float = 0.0
    replica_waits_s: float = 0.0
    attention_s: float = 0.0
    stages_s: float = 0.0
    replicas_busy: float = 0.0
    pool_busy: float = 0.0
    batches: int = 0  # at the end

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def token_s(self) -> float:
        """A mean iteration."""
        return (self.slices_s + self.replica_waits_s + self.stages_s) / len(self.rows)


class OffloadSimulation:
    """Use once."""

    def __init__(
        self, deployment: Deployment, load: Load, batching: Batching = Batching.STAGGERED, seed: int = 1
    ) -> None:
        self._deployment, self._load, self._batching = deployment, load, batching
        scheme, model = deployment.scheme, deployment.model
        self._dice = random.Random(seed)
        self._slices, self._division = SliceSchedule(scheme), Division()
        self._staggering = Staggering(scheme)
        self._division.spread(scheme.batches if batching is Batching.STAGGERED else scheme.replicas)
        self._layer_kv_s = deployment.pool.count * deployment.pool.attention_s(model, 1) / model.layers
        self._out = [_Server() for _ in range(scheme.replicas)]
        self._in = [_Server() for _ in range(scheme.replicas)]
        self._device_in = [_Server() for _ in range(deployment.pool.count)]
        self._device_out = [_Server() for _ in range(deployment.pool.count)]
        self._devices = [_Server() for _ in range(deployment.pool.count)]
        self._held = [0] * deployment.pool.count  # tokens of KV
        self._sequences: dict[int, _Sequence] = {}
        self._arrived = 0
        self._flights: dict[int, _Flight] = {}
        self._ended = [0] * scheme.batches
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._replicas_busy_s = 0.0
        self._measured = Outcome()
        self.now_s = 0.0

    def run(self, iterations: int) -> Outcome:
        """So many of the first batch, after it is warm."""
        for _ in range(self._load.sequences):
            self._arrive()
        self._wake()
        warm = _LEARNING_ITERATIONS if self._batching is Batching.AUTO else _WARM_ITERATIONS
        self._until(warm)
        self._measured, since_s = Outcome(), self.now_s
        pool_s, replicas_s = self._pool_s(), self._replicas_busy_s
        self._until(warm + iterations)
        measured, measured.seconds = self._measured, self.now_s - since_s
        replicas = self._deployment.scheme.replicas
        measured.replicas_busy = (self._replicas_busy_s - replicas_s) / measured.seconds / replicas
        measured.pool_busy = (self._pool_s() - pool_s) / measured.seconds
        measured.batches = self._division.batches
        return measured

    def _until(self, iterations: int) -> None:
        """The first batch never rests."""
        while self._ended[0] < iterations:
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()

    def _pool_s(self) -> float:
        """Seconds that a device was busy, on average."""
        return sum(device.busy_s for device in self._devices) / len(self._devices)

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._events, (time_s, self._planned, happen))

    # Sequences and batches.

    def _arrive(self) -> None:
        load, dice = self._load, self._dice
        tokens = round(load.context * dice.uniform(1 - load.spread, 1 + load.spread))
        left = dice.randint(1, load.answer_tokens) if load.answer_tokens else -1
        device = min(range(len(self._held)), key=self._held.__getitem__)
        self._held[device] += tokens
        self._sequences[self._arrived] = _Sequence(tokens=tokens, left=left, device=device)
        self._arrived += 1

    def _end(self, key: int) -> None:
        sequence = self._sequences.pop(key)
        self._held[sequence.device] -= sequence.tokens
        self._division.leave(key)

    def _wake(self) -> None:
        """Batches that rest begin, where they have been given sequences."""
        for batch in range(self._deployment.scheme.batches):
            if batch not in self._flights:
                self._begin(batch)

    def _begin(self, batch: int) -> None:
        able = {key: sequence.tokens for key, sequence in self._sequences.items()}
        devices = {key: sequence.device for key, sequence in self._sequences.items()}
        members = self._division.compose(batch, able, devices)
        if not members:
            return
        by_device: dict[int, tuple[int, int]] = {}
        for key in members:
            sequence = self._sequences[key]
            rows, tokens = by_device.get(sequence.device, (0, 0))
            by_device[sequence.device] = rows + 1, tokens + sequence.tokens
        self._flights[batch] = _Flight(
            batch=batch,
            members=members,
            tokens=sum(tokens for _, tokens in by_device.values()),
            shares=[(device, *share) for device, share in sorted(by_device.items())],
            began_s=self.now_s,
        )
        self._ask(self._flights[batch])

    # A layer: a slice on a replica, attention on the pool.

    def _ask(self, flight: _Flight) -> None:
        flight.asked_s = self.now_s
        self._start(self._slices.ask(flight.batch))

    def _start(self, start: SliceStart | None) -> None:
        if start is None:
            return
        flight, deployment = self._flights[start.batch], self._deployment
        flight.waiting_s += self.now_s - flight.asked_s
        seconds = (
            deployment.computing.linear_s(deployment.model, len(flight.members)) / deployment.model.layers
        )
        flight.slices_s += seconds
        self._replicas_busy_s += seconds
        self._at(self.now_s + seconds, lambda: self._sliced(flight, start.replica))

    def _sliced(self, flight: _Flight, replica: int) -> None:
        flight.left_s = self.now_s
        self._start(self._slices.ended(flight.batch))
        if not self._deployment.contexts_come_home:
            self._to_pool(flight, replica, self._slices.replica(flight.batch))
            return
        model, home = self._deployment.model, self._home(flight)
        size = model.sent_bytes + model.returned_bytes  # q, k, v, and what is as wide as attention's result
        self._move(flight, replica, home, size, lambda: self._to_pool(flight, home, home))

    def _home(self, flight: _Flight) -> int:
        """Where its sequences are."""
        return self._deployment.scheme.replica_of(flight.batch, 0)

    def _move(self, flight: _Flight, start: int, end: int, size: int, come: Callable[[], None]) -> None:
        """`size` bytes of each row between replicas."""
        if start == end:
            come()
            return
        deployment = self._deployment
        seconds = len(flight.members) * size / deployment.connection_bytes_s
        sent_s = self._out[start].take(self.now_s, seconds)
        taken_s = self._in[end].take(sent_s - seconds, seconds)
        self._at(max(sent_s, taken_s) + deployment.round_trip_s / 2, come)

    def _to_pool(self, flight: _Flight, replica: int, next_replica: int) -> None:
        """From one replica, the answers to the other."""
        deployment = self._deployment
        minis = deployment.mini_batches
        flight.missing = len(flight.shares) * minis
        flight.attending_s += max(tokens for _, _, tokens in flight.shares) * self._layer_kv_s
        for _ in range(minis):
            for device, rows, tokens in flight.shares:
                self._send(flight, replica, next_replica, device, rows / minis, tokens / minis)
        if next_replica != replica:  # its context goes along, behind what the pool needs
            flight.missing += 1
            size = len(flight.members) * deployment.model.returned_bytes
            sent_s = self._out[replica].take(self.now_s, size / deployment.connection_bytes_s)
            self._at(sent_s + deployment.round_trip_s / 2, lambda: self._answered(flight))

    def _send(
        self, flight: _Flight, replica: int, next_replica: int, device: int, rows: float, tokens: float
    ) -> None:
        """A mini-batch, to a device. The slower of both ends is waited for."""
        deployment = self._deployment
        size = rows * deployment.model.sent_bytes
        sent_s = self._out[replica].take(self.now_s, size / deployment.connection_bytes_s)
        begun_s = sent_s - size / deployment.connection_bytes_s
        taken_s = self._device_in[device].take(begun_s, size / deployment.network_bytes_s)
        come_s = max(sent_s, taken_s) + deployment.round_trip_s / 2
        self._at(come_s, lambda: self._attend(flight, next_replica, device, rows, tokens))

    def _attend(self, flight: _Flight, next_replica: int, device: int, rows: float, tokens: float) -> None:
        done_s = self._devices[device].take(self.now_s, tokens * self._layer_kv_s)
        self._at(done_s, lambda: self._answer(flight, next_replica, device, rows))

    def _answer(self, flight: _Flight, next_replica: int, device: int, rows: float) -> None:
        """To the replica of the next slice."""
        deployment = self._deployment
        size = rows * deployment.model.returned_bytes
        sent_s = self._device_out[device].take(self.now_s, size / deployment.network_bytes_s)
        begun_s = sent_s - size / deployment.network_bytes_s
        taken_s = self._in[next_replica].take(begun_s, size / deployment.connection_bytes_s)
        self._at(max(sent_s, taken_s) + deployment.round_trip_s / 2, lambda: self._answered(flight))

    def _answered(self, flight: _Flight) -> None:
        flight.missing -= 1
        if flight.missing:
            return
        if not self._deployment.contexts_come_home:
            self._attended(flight)
            return
        next_replica, size = self._slices.replica(flight.batch), 2 * self._deployment.model.returned_bytes
        self._move(flight, self._home(flight), next_replica, size, lambda: self._attended(flight))

    def _attended(self, flight: _Flight) -> None:
        """Whoever computes its next slice has what it takes."""
        flight.stages_s += self.now_s - flight.left_s
        flight.layer += 1
        if flight.layer < self._deployment.model.layers:
            self._ask(flight)
        else:
            self._iterated(flight)

    def _iterated(self, flight: _Flight) -> None:
        """Tokens; sequences end and others come; the batch, and any that rests, is composed anew."""
        self._observe(flight)
        del self._flights[flight.batch]
        self._ended[flight.batch] += 1
        for key in flight.members:
            sequence = self._sequences[key]
            sequence.tokens += 1
            sequence.left -= 1
            self._held[sequence.device] += 1
            if sequence.left == 0:
                self._end(key)
                self._arrive()
        self._begin(flight.batch)
        self._wake()

    def _observe(self, flight: _Flight) -> None:
        layers, scheme = self._deployment.model.layers, self._deployment.scheme
        everything = sum(sequence.tokens for sequence in self._sequences.values())
        measured = self._measured
        measured.tokens += len(flight.members)
        measured.slices_s += flight.slices_s
        measured.attention_s += flight.attending_s
        measured.stages_s += flight.stages_s
        measured.replica_waits_s += flight.waiting_s
        measured.rows.append(len(flight.members))
        if self._batching is not Batching.AUTO:
            return
        seconds = self.now_s - flight.began_s
        if self._staggering.on and len(self._flights) == scheme.batches:
            self._staggering.took_staggered(len(self._sequences), everything, seconds / layers)
        elif not self._staggering.on and len(self._flights) <= scheme.replicas:
            timing = Timing(
                slice_s=flight.slices_s / layers,
                attend_s=flight.attending_s / layers,
                network_s=(flight.stages_s - flight.attending_s) / layers,
            )
            self._staggering.took_alone(len(flight.members), flight.tokens, timing)
        self._division.spread(self._staggering.decide(len(self._sequences), everything))
