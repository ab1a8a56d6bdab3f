"""The cheapest devices that keep objectives, by the laws of long contexts (Mnemosyne, section 7, "Finding the
right parallelism"). Decisions only: nothing is measured here, nothing runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.planning.laws import Prefill, Replica, attention_flop
from benchmarks.planning.serving import Load, Served, serve
from benchmarks.report import p99
from benchmarks.rooflines import Device, Model
from kvcommons.engine.chunk_budget import LEAST_TOKENS
from kvcommons.errors import InvalidInput

_FEW = 16  # stages, and holders, up to which every number is tried
_CONTEXT_MAX = 2**30  # tokens: beyond any that is asked for
_ITERATIONS = 10_000  # that are simulated for a plan, about: some seconds
_REQUESTS = range(100, 400)  # of which they are
_ROW_S = 0.1  # what a row of an iteration takes to simulate, in iterations
_ROUNDING = 1e-9
_MORE = 4  # replicas with which a plan is tried that its simulation is too slow for


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives(Load):
    """What has to be kept. What of a prompt is not computed comes from the session store. Without
    `requests_s` requests come one at a time."""

    ttft_s: float
    tbt_s: float
    requests_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("context", "new", "answer", "ttft_s", "tbt_s"):
            if getattr(self, name) <= 0:
                raise InvalidInput(f"{name} has to be above 0", param=name)
        if self.new > self.context:
            raise InvalidInput(
                f"new is {self.new} of a context of {self.context} tokens: it is a part of it", param="new"
            )
        if self.requests_s < 0:
            raise InvalidInput("requests_s cannot be below 0", param="requests_s")

    @property
    def generating(self) -> float:
        """Sequences that generate at once, each as slowly as is allowed (Little's law)."""
        return max(self.requests_s * self.answer * self.tbt_s, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What there is to choose from: `device` computes, `pool` holds KV and attends to it, `devices_max` of
    both together. A layer is divided over `tensor_max` devices at most (those of one host), the layers over
    `stages_max` stages."""

    device: Device
    pool: Device
    devices_max: int
    tensor_max: int
    stages_max: int

    def __post_init__(self) -> None:
        for name in ("devices_max", "tensor_max", "stages_max"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} has to be 1 at least", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilling:
    """`count` replicas that compute prompts. `ttft_s` is the mean of requests that come at random, and wait
    for others as in an M/D/1 queue: from there the search goes on in simulated time."""

    replica: Replica
    count: int
    prefill: Prefill
    ttft_s: float

    @property
    def price(self) -> float:
        return self.count * self.replica.price


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """`count` replicas that generate, with `rows` sequences each."""

    replica: Replica
    count: int
    rows: float
    tbt_s: float

    @property
    def price(self) -> float:
        return self.count * self.replica.price


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Prefill and decode, on devices of their own or, `colocated`, on the same replicas: then chunks are as
    large as the rows beside them allow."""

    model: Model
    objectives: Objectives
    prefilling: Prefilling
    decoding: Decoding
    colocated: bool
    served: Served | None = None  # where requests come at random: what some of them waited for

    @property
    def price(self) -> float:
        return self.decoding.price + (0.0 if self.colocated else self.prefilling.price)

    @property
    def devices(self) -> int:
        replicas = [(self.decoding.replica, self.decoding.count)]
        if not self.colocated:
            replicas.append((self.prefilling.replica, self.prefilling.count))
        return sum(count * (replica.devices + replica.pool_devices) for replica, count in replicas)

    def serve(self) -> Served:
        """Some requests at random, in simulated time."""
        wanted, prefilling, decoding = self.objectives, self.prefilling, self.decoding
        chunk = (prefilling.prefill.chunk_first + prefilling.prefill.chunk_last) / 2
        iterations = wanted.new / chunk + _ROW_S * wanted.answer
        return serve(
            prefilling.replica,
            prefilling.count,
            None if self.colocated else decoding.replica,
            decoding.count,
            wanted,
            iteration_s_max=_iteration_s_max(prefilling.replica, wanted),
            requests=min(max(int(_ITERATIONS / iterations), _REQUESTS.start), _REQUESTS.stop),
        )

    def more(self, *, prefill: bool, decode: bool) -> Plan:
        """With one replica more of either."""
        prefilling, decoding = self.prefilling, self.decoding
        if prefill or self.colocated:
            prefilling = replace(prefilling, count=prefilling.count + 1)
        if decode or self.colocated:
            decoding = _decoding_of(decoding.replica, self.objectives, decoding.count + 1)
        return replace(self, prefilling=prefilling, decoding=decoding)

    def limits(self) -> dict[str, int]:
        """The longest contexts that the same devices serve, in tokens, by each of the objectives and by
        memory. One of the three bounds the rest."""
        prefilling, decoding, wanted = self.prefilling, self.decoding, self.objectives
        history = wanted.context - wanted.new
        rows, iteration_s_max = 0.0, math.inf
        if self.colocated:
            rows, iteration_s_max = decoding.rows, _iteration_s_max(prefilling.replica, wanted)

        def first_in_time(context: int) -> bool:
            asked = replace(wanted, context=context, new=max(context - history, 1))
            found = _prefill(prefilling.replica, asked, rows=rows, iteration_s_max=iteration_s_max)
            return found is not None and _ttft_s(found, wanted, prefilling.count) <= wanted.ttft_s

        return {
            "time to first token": _longest(first_in_time),
            "time between tokens": _longest(
                lambda context: decoding.replica.token_s(decoding.rows, context) <= wanted.tbt_s
            ),
            "memory": math.floor(decoding.replica.kv_tokens / max(decoding.rows, 1)),
        }


class Planner:
    """Of one model and what may be bought. Shapes that are tried: powers of two for tensor parallelism, as
    far as they divide the query heads; every number of stages up to 16, then longer steps; pools in whole KV
    parallel instances."""

    def __init__(self, model: Model, market: Market) -> None:
        self._model = model
        self._market = market

    def plans(self, objectives: Objectives) -> list[Plan]:
        """With and without devices of their own for prefill, the cheaper first. Raises InvalidInput where
        neither keeps the objectives: the message says what is nearest."""
        prefilling, decoding = self._prefilling(objectives), self._decoding(objectives)
        found = []
        if prefilling and decoding:
            found.append(self._plan(objectives, prefilling, decoding, colocated=False))
        if together := self._colocated(objectives, self._with_pools):
            found.append(together)
        found = [plan for plan in found if plan.devices <= self._market.devices_max]
        if not found:
            raise InvalidInput(self._refusal(objectives, prefilling, decoding))
        kept = [one for plan in found if (one := self._kept(plan))]
        if not kept:
            raise InvalidInput(
                f"{found[0].devices} devices keep the objectives on average, and none that were tried with "
                "requests that come at random: allow more devices, or more time"
            )
        return sorted(kept, key=lambda plan: (plan.price, plan.colocated))

    def _kept(self, plan: Plan) -> Plan | None:
        """The plan as requests at random want it. Where that is more than it was, and prompts are computed
        beside tokens, one whose replicas have one stage may be cheaper: no iteration waits for another."""
        kept = self._in_time(plan)
        if not plan.colocated or plan.decoding.replica.stages == 1 or (kept and kept.price == plan.price):
            return kept
        alone = [replica for replica in self._with_pools if replica.stages == 1]
        found = self._colocated(plan.objectives, alone)
        other = None if found is None else self._in_time(found)
        return min(filter(None, (kept, other)), key=lambda one: one.price, default=None)

    def _in_time(self, plan: Plan) -> Plan | None:
        """With so many replicas that requests at random keep the objectives in simulated time, too: the time
        to the first token on average, that between tokens in 99 of 100."""
        wanted = plan.objectives
        if not wanted.requests_s:
            return plan
        for _ in range(_MORE):
            if plan.devices > self._market.devices_max:
                return None
            served = plan.serve()
            first_late = served.mean_first_s > wanted.ttft_s
            token_late = bool(served.between_s) and p99(served.between_s) > (1 + _ROUNDING) * wanted.tbt_s
            if not first_late and not token_late:
                return replace(plan, served=served)
            plan = plan.more(prefill=first_late, decode=token_late)
        return None

    def _plan(
        self, objectives: Objectives, prefilling: Prefilling, decoding: Decoding, *, colocated: bool
    ) -> Plan:
        return Plan(
            model=self._model,
            objectives=objectives,
            prefilling=prefilling,
            decoding=decoding,
            colocated=colocated,
        )

    def _prefilling(self, objectives: Objectives) -> Prefilling | None:
        """The cheapest; of those the quickest."""
        best: Prefilling | None = None
        for replica in self._with_pools:
            if best and replica.price > best.price:
                break
            if replica.kv_tokens >= objectives.context and not self._too_slow(replica, objectives):
                found = self._computing(replica, objectives)
                if found and (best is None or (found.price, found.ttft_s) < (best.price, best.ttft_s)):
                    best = found
        return best

    def _decoding(self, objectives: Objectives) -> Decoding | None:
        """The cheapest; of those the quickest."""
        best: Decoding | None = None
        for replica in self._with_pools:
            if best and replica.price > best.price:
                break
            found = self._generating(replica, objectives)
            if found and (best is None or (found.price, found.tbt_s) < (best.price, best.tbt_s)):
                best = found
        return best

    def _colocated(self, objectives: Objectives, replicas: Sequence[Replica]) -> Plan | None:
        """The cheapest of these, if any: each replica computes prompts beside its rows, in chunks with which
        an iteration keeps their objective."""
        best: Plan | None = None
        price_max = math.inf
        for replica in replicas:
            if replica.price >= price_max:
                break
            decoding = self._generating(replica, objectives)
            if decoding is None or self._too_slow(replica, objectives):
                continue
            # With more replicas than the rows need, each has fewer rows beside its chunks.
            limit_s = _iteration_s_max(replica, objectives)
            for count in range(decoding.count, self._most(replica) + 1):
                if count * replica.price >= price_max:
                    break
                decoding = _decoding_of(replica, objectives, count)
                prefill = _prefill(replica, objectives, rows=decoding.rows, iteration_s_max=limit_s)
                if prefilling := _prefilling_of(replica, objectives, count, prefill):
                    best = self._plan(objectives, prefilling, decoding, colocated=True)
                    price_max = best.price
                elif decoding.rows == 1.0 and (prefill is None or prefill.seconds > objectives.ttft_s):
                    break  # fewer there are not
        return best

    def _computing(self, replica: Replica, objectives: Objectives) -> Prefilling | None:
        """So many replicas that the first token keeps its objective in the queue too."""
        prefill = _prefill(replica, objectives)
        if prefill is None or prefill.seconds > objectives.ttft_s:
            return None
        counts = range(1, self._most(replica) + 1)
        found = (_prefilling_of(replica, objectives, count, prefill) for count in counts)
        return next(filter(None, found), None)

    def _generating(self, replica: Replica, objectives: Objectives) -> Decoding | None:
        """So many replicas that the rows of each keep the time between tokens, and have room."""
        if replica.token_s(1, objectives.context) > objectives.tbt_s:
            return None
        for count in range(1, self._most(replica) + 1):
            decoding = _decode(replica, objectives, count)
            if decoding is not None:
                return decoding
        return None

    def _most(self, replica: Replica) -> int:
        return self._market.devices_max // (replica.devices + replica.pool_devices)

    def _too_slow(self, replica: Replica, objectives: Objectives) -> bool:
        """Whether the prompt's operations alone, at the peak of all devices, take too long: most shapes are
        passed over so, without going through the prompt."""
        history = objectives.context - objectives.new
        attended = attention_flop(self._model, objectives.context) - attention_flop(self._model, history)
        flop = attended + 2 * self._model.parameters * objectives.new
        pool = replica.pool_devices * replica.pool.peak_flops if replica.pool else 0.0
        return flop / (replica.devices * replica.device.peak_flops + pool) > objectives.ttft_s

    @cached_property
    def _replicas(self) -> Sequence[Replica]:
        """Those that the weights fit, the cheapest first."""
        market = self._market
        shapes = [
            Replica(model=self._model, device=market.device, tensor=tensor, stages=stages)
            for tensor in _powers(market.tensor_max)
            if self._model.query_heads % tensor == 0
            for stages in _numbers(min(self._model.layers, market.stages_max, market.devices_max // tensor))
        ]
        return sorted((one for one in shapes if one.own_tokens), key=lambda one: one.price)

    @cached_property
    def _with_pools(self) -> Sequence[Replica]:
        """Each of them alone, and with KV parallel instances beside it; the cheapest first."""
        market = self._market
        shapes = [
            replace(replica, pool=market.pool, pool_devices=holders * replica.devices)
            for replica in self._replicas
            for holders in _numbers((market.devices_max - replica.devices) // replica.devices)
        ]
        return sorted([*self._replicas, *shapes], key=lambda one: one.price)

    def _refusal(
        self, objectives: Objectives, prefilling: Prefilling | None, decoding: Decoding | None
    ) -> str:
        market, capacity = self._market, max((one.kv_tokens for one in self._with_pools), default=0)
        named = f"{market.devices_max} {market.device.name}"
        if not capacity:
            return f"the weights of {self._model.name} do not fit {named}: allow more devices"
        if capacity < objectives.context:
            missing = (objectives.context - capacity) * self._model.kv_token_bytes
            return f"{objectives.context} tokens do not fit {named}: {missing / 1e9:.1f} GB are missing"
        if decoding is None:
            nearest = min(_decode_s(one, objectives, 1) for one in self._with_pools)
            return (
                f"{named} cannot keep {1e3 * objectives.tbt_s:.3g} ms between tokens: one replica comes to "
                f"{1e3 * nearest:.3g} ms at best"
            )
        if prefilling is None:
            alone = [_prefill(one, objectives) for one in self._with_pools]
            nearest = min((one.seconds for one in alone if one), default=math.inf)
            return (
                f"{named} cannot keep {objectives.ttft_s:.3g} s to the first token: one replica comes to "
                f"{nearest:.3g} s at best, alone"
            )
        wanted = self._plan(objectives, prefilling, decoding, colocated=False).devices
        return f"{named} are too few: the cheapest that keeps the objectives has {wanted} devices"


def _prefill(
    replica: Replica, objectives: Objectives, *, rows: float = 0.0, iteration_s_max: float = math.inf
) -> Prefill | None:
    return replica.prefill(
        objectives.new,
        history=objectives.context - objectives.new,
        iteration_s_max=iteration_s_max,
        rows=rows / replica.stages,
        row_context=objectives.context,
    )


def _prefilling_of(
    replica: Replica, objectives: Objectives, count: int, prefill: Prefill | None
) -> Prefilling | None:
    """None where the first token comes too late."""
    if prefill is None:
        return None
    ttft_s = _ttft_s(prefill, objectives, count)
    if ttft_s > objectives.ttft_s:
        return None
    return Prefilling(replica=replica, count=count, prefill=prefill, ttft_s=ttft_s)


def _iteration_s_max(replica: Replica, objectives: Objectives) -> float:
    """What an iteration with chunks may take, through all stages, beside rows that are to have their tokens
    in time. Where requests come at random, a row that has its token waits for the first of several stages,
    and in the last one behind the iteration before; in the paper's setting nobody does."""
    stages = replica.stages
    waits = objectives.requests_s > 0 and stages > 1
    return objectives.tbt_s * stages / (stages + 2) if waits else objectives.tbt_s


def _ttft_s(prefill: Prefill, objectives: Objectives, count: int) -> float:
    """The mean, of requests that come at random to `count` replicas; infinite where more come than they
    compute."""
    load = objectives.requests_s * prefill.busy_s / count
    if load >= 1:
        return math.inf
    return prefill.seconds + load * prefill.busy_s / (2 * (1 - load))


def _decode_s(replica: Replica, objectives: Objectives, count: int) -> float:
    return replica.token_s(objectives.generating / count, objectives.context)


def _decoding_of(replica: Replica, objectives: Objectives, count: int) -> Decoding:
    rows = max(objectives.generating / count, 1.0)
    return Decoding(replica=replica, count=count, rows=rows, tbt_s=_decode_s(replica, objectives, count))


def _decode(replica: Replica, objectives: Objectives, count: int) -> Decoding | None:
    """None where the rows have no room, or take too long."""
    found = _decoding_of(replica, objectives, count)
    if replica.kv_tokens < math.ceil(found.rows) * objectives.context or found.tbt_s > objectives.tbt_s:
        return None
    return found


def _longest(keeps: Callable[[int], bool]) -> int:
    """The largest number of tokens that keeps it: what more tokens break, fewer do not."""
    low, high = 0, LEAST_TOKENS
    while high < _CONTEXT_MAX and keeps(high):
        low, high = high, 2 * high
    while high - low > max(low // 256, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _powers(most: int) -> Iterator[int]:
    number = 1
    while number <= most:
        yield number
        number *= 2


def _numbers(most: int) -> Iterator[int]:
    """1, 2, … 16, and then in steps of an eighth."""
    number = 1
    while number <= most:
        yield number
        number += max(1, number // (_FEW // 2)) if number >= _FEW else 1
