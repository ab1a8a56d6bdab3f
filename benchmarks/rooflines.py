"""What the parts of a token's computation take on given devices: rooflines of models and accelerators
(Lamina, sections 3 and 4; Mnemosyne, section 3), for planning and for simulation where the devices themselves
are not at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of a device's memory: the rest is for activations, and what the runtime and the collectives take.
USABLE = 0.9
RESERVED_BYTES = 2e9
NETWORK_BYTES_S = 24.2e9  # 200 Gbit/s, 96.8% of it used (section 6.3)
ROUND_TRIP_S = 33e-6  # with device-side polling (section 6.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of what data sheets promise. `parallel`: weights are read while rows are multiplied."""

    reading: float
    computing: float
    parallel: bool


# Reading: section 3.1 and figure 6 (more than 80%). Computing, and what an all-reduce of A100s gets: chosen
# so that table 3 comes out, as is that the parts are added: the MFU behind that table says that they hide
# each other little.
MEASURED = Efficiency(reading=0.8, computing=0.57, parallel=False)
IDEAL = Efficiency(reading=1.0, computing=1.0, parallel=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of one iteration: a chunk of `chunk` tokens that ends at `context`, and `rows` that generate, each
    after `row_context` tokens."""

    chunk: float = 0
    context: float = 0
    rows: float = 0
    row_context: float = 0

    @property
    def width(self) -> float:
        """Rows of all products."""
        return self.chunk + self.rows

    @property
    def chunk_pairs(self) -> float:
        """Of a token of the chunk and a token that it attends to."""
        return self.chunk * max(self.context - self.chunk / 2, 0)

    @property
    def row_tokens(self) -> float:
        """That rows which generate attend to."""
        return self.rows * self.row_context

    @property
    def tokens_read(self) -> float:
        return (self.context if self.chunk else 0) + self.row_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator as its data sheet and table 1 describe it. `flops` are of dense bfloat16 products;
    `link_bytes_s` is what an all-reduce gets between devices of one host, each way."""

    name: str
    price: float  # dollars
    memory_bytes: float
    read_bytes_s: float
    flops: float = 0.0
    link_bytes_s: float = 0.0

    @property
    def usable_bytes(self) -> float:
        return USABLE * self.memory_bytes

    @property
    def peak_flops(self) -> float:
        """That nothing it computes exceeds."""
        return self.flops

    @property
    def error(self) -> float:
        """The mean one of times by these rates, as far as any was measured."""
        return 0.0

    def linear_s(self, model: Model, rows: float, reached: Efficiency) -> float:
        """An iteration without attention, alone: weights are read, and rows multiplied with them."""
        read_s = model.weight_bytes / (self.read_bytes_s * reached.reading)
        compute_s = 2 * model.parameters * rows / (self.flops * reached.computing)
        return max(read_s, compute_s) if reached.parallel else read_s + compute_s

    def attention_s(self, model: Model, work: Work, reached: Efficiency) -> float:
        """An iteration's attention, alone."""
        read_s = model.kv_token_bytes * work.tokens_read / self.read_bytes_s / reached.reading
        if not self.flops:  # known for its memory only: it attends for single tokens
            return math.inf if work.chunk else read_s
        flop = 4 * (work.chunk_pairs + work.row_tokens) * model.hidden * model.layers
        compute_s = flop / self.flops / reached.computing
        return max(read_s, compute_s) if reached.parallel else read_s + compute_s

    def priced_as(self, other: Device) -> Device:
        """The same device at the other's price for memory of its size (section 6)."""
        return Device(
            name=f"{self.name} priced as {other.name}",
            price=self.memory_bytes * other.price / other.memory_bytes,
            memory_bytes=self.memory_bytes,
            read_bytes_s=self.read_bytes_s,
            flops=self.flops,
            link_bytes_s=self.link_bytes_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder. `parameters` are those that a token is multiplied with (all but the embedding of tokens);
    `hidden` is the width of the queries of all heads too, `kv_width` that of K, and of V, in one layer: less
    where heads share them."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_width: int
    head_dim: int = 128
    element_bytes: int = 2

    @property
    def query_heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.kv_width // self.head_dim

    @property
    def weight_bytes(self) -> float:
        return self.element_bytes * self.parameters

    @property
    def kv_token_bytes(self) -> int:
        """In all layers."""
        return 2 * self.element_bytes * self.kv_width * self.layers

    @property
    def sent_bytes(self) -> int:
        """Of one token in one layer, to the pool: q, k and v."""
        return self.element_bytes * (self.hidden + 2 * self.kv_width)

    @property
    def returned_bytes(self) -> int:
        """Of one token in one layer, from the pool: what attention gave."""
        return self.element_bytes * self.hidden

    @property
    def moved_bytes(self) -> int:
        """Of one token in all layers, both ways: 4edL where K and V are as wide as the model."""
        return (self.sent_bytes + self.returned_bytes) * self.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that hold a model together (tensor parallelism), or a pool's devices that attend together."""

    device: Device
    count: int
    efficiency: Efficiency = MEASURED

    @property
    def price(self) -> float:
        return self.count * self.device.price

    @property
    def usable_bytes(self) -> float:
        return self.count * self.device.usable_bytes

    def linear_s(self, model: Model, batch: float) -> float:
        """An iteration without attention: weights are read, rows multiplied with them, and, between several
        devices, two sums a layer made."""
        device, count = self.device, self.count
        both_s = device.linear_s(model, batch, self.efficiency) / count
        if count == 1:
            return both_s
        summed = 2 * model.layers * batch * model.hidden * model.element_bytes
        return both_s + summed * 2 * (count - 1) / count / device.link_bytes_s

    def mfu(self, model: Model, batch: float) -> float:
        """Share of the peak that an iteration without attention reaches (figure 3)."""
        least_s = 2 * model.parameters * batch / (self.count * self.device.flops)
        return least_s / self.linear_s(model, batch)

    def attention_s(self, model: Model, tokens: float) -> float:
        """An iteration's attention over so many tokens of KV, evenly divided."""
        return (
            model.kv_token_bytes * tokens / (self.count * self.device.read_bytes_s * self.efficiency.reading)
        )

    def kv_tokens(self, model: Model, *, weights: bool) -> int:
        """Tokens of KV that have room, beside the model's weights where it is here."""
        capacity = self.usable_bytes
        if weights:
            capacity -= model.weight_bytes + self.count * RESERVED_BYTES
        return max(math.floor(capacity / model.kv_token_bytes), 0)


A100_80G = Device(
    name="A100-80G",
    price=17500,
    memory_bytes=80e9,
    read_bytes_s=1935e9,
    flops=312e12,
    link_bytes_s=35e9,
)
# Not in table 1: its price is taken to be that of the other A100.
A100_40G = Device(
    name="A100-40G",
    price=17500,
    memory_bytes=42.5e9,
    read_bytes_s=1555e9,
    flops=312e12,
    link_bytes_s=35e9,
)
H100 = Device(
    name="H100",
    price=36500,
    memory_bytes=80e9,
    read_bytes_s=3350e9,
    flops=989e12,
    link_bytes_s=370e9,
)
RTX_3090 = Device(name="RTX 3090", price=1600, memory_bytes=24e9, read_bytes_s=936.2e9)
RX_7900_XTX = Device(name="RX 7900 XTX", price=1000, memory_bytes=24e9, read_bytes_s=960e9)
ARC_A770 = Device(name="Arc A770", price=350, memory_bytes=16e9, read_bytes_s=560e9)
# What the paper's evaluation has in place of cheap devices.
A100_40G_AS_3090 = A100_40G.priced_as(RTX_3090)

COMPUTING_DEVICES = (A100_40G, A100_80G, H100)
MEMORY_DEVICES = (RTX_3090, RX_7900_XTX, ARC_A770, A100_40G_AS_3090, *COMPUTING_DEVICES)

# Parameters without the embedding of tokens: those of Lamina's tables 2 and 4, and Mnemosyne's two models.
MODELS = (
    Model(name="llama-7b", parameters=6.61e9, layers=32, hidden=4096, kv_width=4096),
    Model(name="llama-13b", parameters=12.85e9, layers=40, hidden=5120, kv_width=5120),
    Model(name="llama-33b", parameters=32.3e9, layers=60, hidden=6656, kv_width=6656),
    Model(name="llama-65b", parameters=65.0e9, layers=80, hidden=8192, kv_width=8192),
    Model(name="llama3-70b", parameters=69.5e9, layers=80, hidden=8192, kv_width=1024),
    Model(name="llama3-8b", parameters=7.5e9, layers=32, hidden=4096, kv_width=1024),
)
