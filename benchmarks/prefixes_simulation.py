"""Many prefixes, little room: what does the order of the queue bring? A discrete-event simulation.

The workload of Jha and Wang, section VII (text analysis): so many unique prefixes, requests that each take
one of them with a body of their own, streamed into a queue that is kept full; room for some prefixes on the
device, for more in DRAM and on disk. The router's own queue, its policies and the kvstore's own hints run on
a virtual clock; the tiers are least recently used ones that hold what the tiers above hold, as ours do. What
a request takes follows from measured rates, the cheaper of loading and computing. Deterministic.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.report import Report, Row, p50, p99
from services.kvstore.expected import ExpectedUse
from services.kvstore.hints import Hints
from services.router.admission.queue import Prefix, QueuedRequest, RequestQueue
from services.router.admission.scheduling import ABSENT, DEVICE, DISK, DRAM, OVERTAKES_MAX, scheduling

_MODEL = b"model"
_HINT_TTL_S = 5.0
TIERS = {"device": DEVICE, "DRAM": DRAM, "disk": DISK, "computed": ABSENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured on two cores with a random model of 246M parameters, which has 16 KiB of KV a token: prefill
    of 2,048 tokens, the data plane over Unix sockets, slab files read with O_DIRECT."""

    compute_tokens_s: float = 838.0
    dram_bytes_s: float = 3e9
    disk_bytes_s: float = 1e9
    token_bytes: int = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`device`, `dram` and `disk` have room for so many prefixes. `skew`: exponent of Zipf's law over them,
    0 for all alike."""

    prefixes: int = 128
    device: int = 8
    dram: int = 32
    disk: int = 128
    requests: int = 4096
    waiting: int = 512  # so long the queue is kept
    prefix_tokens: int = 2048
    new_tokens: int = 64
    skew: float = 0.0
    look_ahead: int = 64  # next requests hinted; 0: none
    overtakes_max: int = OVERTAKES_MAX
    seed: int = 0
    rates: Rates = Rates()


@dataclass(slots=True, kw_only=True)
class Outcome:
    policy: str
    took_s: float
    waits_s: list[float]
    places: list[int]  # other requests that started between a request's arrival and its start
    overtaken: list[int]
    served: dict[str, int]  # requests by the tier their prefix came from
    starts_s: list[float]
    full_requests: int  # so many had started when the last one came

    @property
    def requests_per_s(self) -> float:
        return len(self.waits_s) / self.took_s

    @property
    def full_requests_per_s(self) -> float:
        """While the queue was full, without the first quarter, which begins with empty tiers."""
        first, last = self.full_requests // 4, self.full_requests - 1
        return (last - first) / (self.starts_s[last] - self.starts_s[first])


class _Tier:
    """The prefixes of a tier, the least recently used one first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, prefix: int) -> bool:
        return prefix in self._prefixes

    def use(self, prefix: int, spared: frozenset[int] = frozenset(), *, sparing: bool = False) -> bool:
        """Puts a prefix in front. The last one that is not spared goes for it; with `sparing`, none that is,
        and False says that there was no room."""
        if prefix in self._prefixes:
            self._prefixes.move_to_end(prefix)
            return True
        if len(self._prefixes) >= self._capacity:
            victims = (one for one in self._prefixes if one not in spared)
            victim = next(victims, None if sparing else next(iter(self._prefixes), None))
            if victim is None:
                return False
            del self._prefixes[victim]
        self._prefixes[prefix] = None
        return True


class Simulation:
    """One trial under one policy. One request runs at a time: prefill is what is scarce."""

    def __init__(self, trial: Trial, policy: str) -> None:
        self._trial = trial
        self._policy = policy
        self._queue = RequestQueue(
            max_running=1,
            max_waiting=trial.waiting,
            policy=scheduling(policy, overtakes_max=trial.overtakes_max),
        )
        self._tiers = [(DEVICE, _Tier(trial.device)), (DRAM, _Tier(trial.dram)), (DISK, _Tier(trial.disk))]
        self._size = trial.prefix_tokens * trial.rates.token_bytes
        self._hints = Hints(
            lambda _: self._size, dram_bytes=self._size * trial.dram, disk_bytes=self._size * trial.disk
        )
        self._waiting: dict[int, list[QueuedRequest]] = {prefix: [] for prefix in range(trial.prefixes)}
        self._disk_free_s = 0.0
        self._fetching: tuple[float, int] | None = None  # when it has come, and what

    def run(self) -> Outcome:
        trial = self._trial
        rng = random.Random(trial.seed)
        weights = [(rank + 1) ** -trial.skew for rank in range(trial.prefixes)]
        arrivals = rng.choices(range(trial.prefixes), weights, k=trial.requests)
        came: dict[QueuedRequest, tuple[int, int]] = {}  # its prefix, and how many requests had started
        outcome = Outcome(
            policy=self._policy,
            took_s=0.0,
            waits_s=[],
            places=[],
            overtaken=[],
            served=dict.fromkeys(TIERS, 0),
            starts_s=[],
            full_requests=0,
        )
        now_s, sent = 0.0, 0
        running: QueuedRequest | None = None
        while running is not None or sent < trial.requests:
            while sent < trial.requests and self._queue.waiting < trial.waiting:
                request = self._submit(arrivals[sent], now_s)
                came[request] = (arrivals[sent], len(outcome.waits_s))
                sent += 1
                running = running or request  # the first one starts at once
                outcome.full_requests = len(outcome.waits_s)
            assert running is not None
            prefix, started_before = came.pop(running)
            outcome.starts_s.append(now_s)
            outcome.waits_s.append(now_s - running.queued_s)
            outcome.places.append(len(outcome.waits_s) - 1 - started_before)
            outcome.overtaken.append(running.overtaken)
            end_s = now_s + self._serve(running, prefix, now_s, outcome)
            self._fetch(now_s, end_s)
            now_s = end_s
            self._queue.leave(running, now_s)
            started, _ = self._queue.advance(now_s)
            running = started[0] if started else None
        outcome.took_s = now_s
        return outcome

    def _submit(self, prefix: int, now_s: float) -> QueuedRequest:
        request = self._queue.submit(cost=1, now_s=now_s, deadline_s=float("inf"))
        self._queue.set_prefix(request, Prefix(model=_MODEL, block_ids=(prefix.to_bytes(4, "little"),)))
        request.distance = self._distance(prefix)
        request.on_device = int(request.distance == DEVICE)
        if request.started_s is None:
            self._waiting[prefix].append(request)
        return request

    def _serve(self, request: QueuedRequest, prefix: int, now_s: float, outcome: Outcome) -> float:
        """How long the request runs; its prefix is in all tiers afterwards."""
        if request in self._waiting[prefix]:
            self._waiting[prefix].remove(request)
        rates, trial = self._trial.rates, self._trial
        compute_s = trial.prefix_tokens / rates.compute_tokens_s
        load_s = {
            DEVICE: 0.0,
            DRAM: self._size / rates.dram_bytes_s,
            DISK: self._size / rates.disk_bytes_s + max(0.0, self._disk_free_s - now_s),
        }
        distance = self._distance(prefix)
        found_s = load_s.get(distance, compute_s)
        if found_s >= compute_s:
            distance, found_s = ABSENT, compute_s
        if distance == DISK:
            self._disk_free_s = now_s + found_s
        outcome.served[next(name for name, of in TIERS.items() if of == distance)] += 1
        spared = self._spared()
        for tier, prefixes in self._tiers:
            prefixes.use(prefix, spared if tier == DRAM else frozenset())
        self._measure()
        return found_s + trial.new_tokens / rates.compute_tokens_s

    def _fetch(self, now_s: float, end_s: float) -> None:
        """What the kvstore does while a request runs: the next hinted prefixes come from disk to DRAM."""
        if not self._trial.look_ahead:
            return
        uses = [
            ExpectedUse(model=request.prefix.model, block_ids=request.prefix.block_ids, at_s=now_s + in_s)
            for request, in_s in self._queue.look_ahead(self._trial.look_ahead, now_s)
        ]
        self._hints.put("router", uses, now_s=now_s, ttl_s=_HINT_TTL_S)
        dram, disk = self._tiers[1][1], self._tiers[2][1]
        took_s = self._size / self._trial.rates.disk_bytes_s
        spared = self._spared()
        while True:
            if self._fetching is not None:
                if self._fetching[0] > end_s:
                    break
                dram.use(self._fetching[1], spared, sparing=True)
                self._fetching = None
            wanted = next((one for one in self._order() if one not in dram and one in disk), None)
            start_s = max(now_s, self._disk_free_s)
            if wanted is None or start_s >= end_s:
                break
            self._disk_free_s = start_s + took_s
            self._fetching = (self._disk_free_s, wanted)
        self._measure()

    def _order(self) -> Sequence[int]:
        window = self._hints.window().get(_MODEL, {})
        return [int.from_bytes(block_id, "little") for block_id in window]

    def _spared(self) -> frozenset[int]:
        return frozenset(self._order())

    def _distance(self, prefix: int) -> float:
        return next((tier for tier, prefixes in self._tiers if prefix in prefixes), ABSENT)

    def _measure(self) -> None:
        for prefix, requests in self._waiting.items():
            if not requests or requests[0].distance == (distance := self._distance(prefix)):
                continue
            for request in requests:
                request.distance, request.on_device = distance, int(distance == DEVICE)


def compare(
    trials: Sequence[Trial], policies: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> Report:
    """Trials that differ in their seeds. Ratios are of throughput, over first come first served: medians; and
    the least and greatest of our own policy over FPF."""
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in ("fcfs", *policies)}
    for trial in trials:
        for policy, done in outcomes.items():
            progress(f"seed {trial.seed}: {policy}")
            done.append(Simulation(trial, policy).run())
    ratios = {policy: _over(outcomes[policy], outcomes["fcfs"], median) for policy in policies}
    if "fpf" in policies and "bounded_fpf" in policies:
        ours = outcomes["bounded_fpf"]
        ratios["bounded_fpf / fpf, least"] = _over(ours, outcomes["fpf"], min)
        ratios["bounded_fpf / fpf, greatest"] = _over(ours, outcomes["fpf"], max)
        full = [
            one.full_requests_per_s / fpf.full_requests_per_s
            for one, fpf in zip(ours, outcomes["fpf"], strict=True)
        ]
        ratios["bounded_fpf / fpf, least while the queue is full"] = min(full)
    trial = trials[0]
    law = f"Zipf's law with {trial.skew:g}" if trial.skew else "all alike"
    return Report(
        title=(
            f"{trial.prefixes} prefixes of {trial.prefix_tokens} tokens, {law}, room for "
            f"{trial.device}/{trial.dram}/{trial.disk} (simulated)"
        ),
        ratios=ratios,
        rows=[_row(done) for done in outcomes.values()],
    )


def _over(ours: Sequence[Outcome], theirs: Sequence[Outcome], of: Callable[[list[float]], float]) -> float:
    return of([one.requests_per_s / other.requests_per_s for one, other in zip(ours, theirs, strict=True)])


def _row(outcomes: Sequence[Outcome]) -> Row:
    """Shares and waits are of all seeds' requests together."""
    waits_s = [wait_s for outcome in outcomes for wait_s in outcome.waits_s]
    served = {tier: sum(outcome.served[tier] for outcome in outcomes) for tier in TIERS}
    return {
        "policy": outcomes[0].policy,
        "requests/s": median(outcome.requests_per_s for outcome in outcomes),
        "requests/s, queue full": median(outcome.full_requests_per_s for outcome in outcomes),
        **{f"from {tier} %": 100 * count / len(waits_s) for tier, count in served.items()},
        "wait p50 s": p50(waits_s),
        "wait p99 s": p99(waits_s),
        "longest wait s": max(waits_s),
        "longest wait, requests": max(max(outcome.places) for outcome in outcomes),
        "most overtaken by": max(max(outcome.overtaken) for outcome in outcomes),
    }
