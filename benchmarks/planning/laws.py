"""What contexts of any length take on many devices (Mnemosyne, sections 3 and 4), in the paper's notation: n
tokens, l layers, h_q query and h_kv KV heads of d numbers, chunks of c tokens, p stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from benchmarks.rooflines import RESERVED_BYTES, ROUND_TRIP_S, Device, Efficiency, Group, Model, Work
from kvcommons.engine.chunk_budget import LEAST_TOKENS, ChunkBudget
from kvcommons.engine.iteration_costs import IterationWork

# Reading: the best of figure 21; computing: the middle of what figure 20 shows, 50 to 75% (section 6.5).
# Weights and KV are read while rows are multiplied.
MNEMOSYNE = Efficiency(reading=0.92, computing=0.625, parallel=True)
INFINIBAND_BYTES_S = 50e9  # between two devices of different hosts, each way (section 6.1)
CHUNK_MAX = 4096  # tokens, of figures 7 and 8
_PARTIAL_BYTES = 4  # of a number that a holder returns: partials are float32
_SEGMENTS = 64  # of a prompt, for each of which a chunk is chosen once


def attention_flop(model: Model, tokens: float, *, causal: bool = True) -> float:
    """Equation (1), 4 n² d h_q l: half of it where a token attends to none behind it."""
    return 4 * tokens**2 * model.hidden * model.layers * (0.5 if causal else 1.0)


def kv_bytes(model: Model, tokens: float) -> float:
    """Equations (2) and (3), 4 n d h_kv l: what KV of a sequence takes, and what each of its tokens reads."""
    return model.kv_token_bytes * tokens


def intensity(model: Model, chunk: int) -> float:
    """Operations of a chunk's attention for each byte of KV that it reads, equation (7): c h_q / h_kv, for
    bfloat16, however long the context is."""
    return 4 * chunk * model.hidden * model.layers / model.kv_token_bytes


def saturating_chunk(model: Model, device: Device) -> int:
    """The least chunk whose attention arithmetic bounds, and reading does not (section 4.1)."""
    return math.ceil(device.flops / device.read_bytes_s / intensity(model, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage for one iteration, one after the other."""

    linear_s: float
    attention_s: float
    network_s: float

    @property
    def seconds(self) -> float:
        return self.linear_s + self.attention_s + self.network_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Of one prompt. `busy_s` is how long it keeps the first stage, and the next prompt waiting; chunks
    shrink from `chunk_first` to `chunk_last`."""

    seconds: float
    busy_s: float
    chunk_first: int
    chunk_last: int


@dataclass(frozen=True)
class Replica:
    """A model over `stages` groups of `tensor` devices, with `pool_devices` that hold KV, and attend to it,
    beside them: tensor, sequence pipeline and KV parallelism (section 4.5). A KV parallel instance of the
    paper's is `tensor * stages` pool devices of the same kind."""

    model: Model
    device: Device
    tensor: int = 1
    stages: int = 1
    pool: Device | None = None
    pool_devices: int = 0
    efficiency: Efficiency = MNEMOSYNE
    network_bytes_s: float = INFINIBAND_BYTES_S
    round_trip_s: float = ROUND_TRIP_S

    @property
    def devices(self) -> int:
        """Those with weights."""
        return self.tensor * self.stages

    @property
    def price(self) -> float:
        return self.devices * self.device.price + (self.pool_devices * self.pool.price if self.pool else 0.0)

    @property
    def describe(self) -> str:
        """SPP x TP, and the devices beside them that hold KV."""
        named = f"SPP {self.stages} x TP {self.tensor} {self.device.name}"
        return f"{named} + {self.pool_devices} {self.pool.name}" if self.pool and self.pool_devices else named

    @cached_property
    def share(self) -> float:
        """Of all layers, those of the longest stage: 30 layers over 4 stages are 8, 8, 7 and 7."""
        return math.ceil(self.model.layers / self.stages) / self.model.layers

    @cached_property
    def own_tokens(self) -> int:
        """Of KV that have room beside the weights: where the longest stage is full, the replica is."""
        capacity = (
            self.tensor * (self.device.usable_bytes - RESERVED_BYTES) - self.model.weight_bytes * self.share
        )
        return max(math.floor(capacity / (self.model.kv_token_bytes * self.share)), 0)

    @cached_property
    def kv_tokens(self) -> int:
        """Of KV that have room, the pool's with it; 0 where the weights have none."""
        if not self.own_tokens or not self.pool:
            return self.own_tokens
        return self.own_tokens + math.floor(
            self.pool_devices * self.pool.usable_bytes / self.model.kv_token_bytes
        )

    def stage(self, work: Work) -> StageTime:
        """Of the longest stage."""
        computing = Group(device=self.device, count=self.tensor, efficiency=self.efficiency)
        return StageTime(
            linear_s=self.share * computing.linear_s(self.model, work.width),
            attention_s=self.share * self._attention_s(work),
            network_s=self._network_s(work),
        )

    def iteration_s(self, work: Work) -> float:
        """Through all stages."""
        return self.stages * self.stage(work).seconds

    def prefill(
        self,
        tokens: int,
        *,
        history: int = 0,
        iteration_s_max: float = math.inf,
        chunk_max: int = CHUNK_MAX,
        rows: float = 0,
        row_context: float = 0,
    ) -> Prefill | None:
        """Of a prompt's `tokens` after `history` that is there, equation (8): a chunk enters the first stage
        as soon as the one before left it, so that the last one has all stages but the first still before it.
        In each part of the prompt chunks are what the engine chooses where it begins, so that an iteration,
        all stages of it, takes no more than `iteration_s_max` (section 4.2). None where its smallest takes
        more."""
        beside = Beside(replica=self, rows=rows, row_context=row_context)
        last = range(history, history + tokens)[-LEAST_TOKENS:]
        if beside.seconds(IterationWork.of_chunk(last)) > iteration_s_max:
            return None
        busy_s, done, chunks = 0.0, 0, list[int]()
        length = max(-(-tokens // _SEGMENTS), min(tokens, chunk_max))
        while done < tokens:
            part = min(length, tokens - done)
            chunk = beside.budget(iteration_s_max, chunk_max).fit(history + done, part)
            middle = beside.work(chunk, history + done + (part + chunk) / 2)
            busy_s += part / chunk * self.stage(middle).seconds
            chunks.append(chunk)
            done += part
        last_tokens = beside.budget(iteration_s_max, chunk_max).fit(history + tokens - chunk, chunk)
        last_s = self.stage(beside.work(last_tokens, history + tokens)).seconds
        return Prefill(
            seconds=busy_s + (self.stages - 1) * last_s,
            busy_s=busy_s,
            chunk_first=chunks[0],
            chunk_last=last_tokens,
        )

    def token_s(self, rows: float, context: float) -> float:
        """Between two tokens of `rows` sequences that generate, equation (9). With several stages as many
        batches are under way."""
        each = max(rows / self.stages, 1)
        return self.iteration_s(Work(rows=each, row_context=context))

    def _attention_s(self, work: Work) -> float:
        """Of all layers, on one stage's devices and its part of the pool: KV is divided so that both end at
        once, or by what has room (equations (9) and (10))."""
        alone_s = self.device.attention_s(self.model, work, self.efficiency) / self.tensor
        if not self.pool or not self.pool_devices:
            return alone_s
        pool_s = self.pool.attention_s(self.model, work, self.efficiency) * self.stages / self.pool_devices
        held = work.tokens_read
        # A pool that does not compute takes for ever, and is left out where all has room without it.
        own = min(1 / (1 + alone_s / pool_s), self.own_tokens / held) if held and alone_s else 1.0
        return alone_s if own == 1.0 else max(own * alone_s, (1 - own) * pool_s)

    def _network_s(self, work: Work) -> float:
        """Activations to the next stage; of each layer queries to the holders and their partials back: both
        independent of the context."""
        rate = self.tensor * self.network_bytes_s
        row_bytes = self.model.hidden * self.model.element_bytes
        seconds = 0.0
        if self.stages > 1:
            seconds += self.round_trip_s / 2 + work.width * row_bytes / rate
        if self.pool_devices:
            holders = self.pool_devices / self.devices
            answered = self.model.hidden * _PARTIAL_BYTES
            layer_s = self.round_trip_s + holders * work.width * (row_bytes + answered) / rate
            seconds += self.share * self.model.layers * layer_s
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Chunks of a replica beside `rows` of one stage that generate, each after `row_context` tokens: what an
    engine that serves so many learns of its iterations, by the laws."""

    replica: Replica
    rows: float = 0
    row_context: float = 0

    @property
    def error(self) -> float:
        return self.replica.device.error

    def knows(self, work: IterationWork) -> bool:
        """The engine of this replica has learnt."""
        return True

    def seconds(self, work: IterationWork) -> float:
        """Of an iteration with these chunks, through all stages. Several are as one that has as many tokens
        and pairs."""
        return self.replica.iteration_s(self.work(work.rows, work.pairs / work.rows + (work.rows - 1) / 2))

    def work(self, chunk: float, context: float) -> Work:
        return Work(chunk=chunk, context=context, rows=self.rows, row_context=self.row_context)

    def budget(self, iteration_s_max: float, chunk_max: int) -> ChunkBudget:
        """The engine's, of the next iteration."""
        return ChunkBudget(self, IterationWork(), objective_s=iteration_s_max, chunk_tokens=chunk_max)
