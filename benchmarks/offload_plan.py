"""`kvcommons bench offload-plan`: which attention devices, which network and which batch a model wants when
its attention is offloaded (Lamina, sections 4.1, 4.2 and 5.1), and what that brings for its price. Computed
from data sheets; nothing runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plot import stacked_bars
from benchmarks.report import Report
from benchmarks.rooflines import (
    COMPUTING_DEVICES,
    MEMORY_DEVICES,
    MODELS,
    NETWORK_BYTES_S,
    ROUND_TRIP_S,
    Device,
    Group,
    Model,
)
from benchmarks.slice_schedule import attend_s_wanted
from kvcommons.errors import InvalidInput
from kvcommons.model.spec import ModelSpec
from services.decode.staggering.pipelines import Fixed, Rotational, Scheme, Timing, period_s

MINI_BATCHES = 4  # that a device's share of a batch is sent in (figure 10)
_GROUP_MAX = 8  # devices of one host
_BATCHES = (32, 64, 128, 256, 512, 1024)


def model_of(name: str) -> Model:
    """One of the table's, or that of a model's folder. Raises InvalidInput."""
    for model in MODELS:
        if model.name == name:
            return model
    if not Path(name).is_dir():
        raise InvalidInput(f"{name} is neither a folder nor one of {', '.join(one.name for one in MODELS)}")
    return model_of_spec(Path(name).name, ModelSpec.read(Path(name)))


def model_of_spec(name: str, spec: ModelSpec) -> Model:
    kv_width, query_width = spec.kv_heads * spec.head_dim, spec.query_heads * spec.head_dim
    of_layer = spec.hidden * (2 * query_width + 2 * kv_width + 3 * spec.mlp)
    return Model(
        name=name,
        parameters=spec.layers * of_layer + spec.vocab_size * spec.hidden,
        layers=spec.layers,
        hidden=query_width,  # what is sent and returned is as wide
        kv_width=kv_width,
        head_dim=spec.head_dim,
    )


def minimum_bandwidth(model: Model, computing: Group, batch: int) -> float:
    """Bytes a second between the two kinds of devices, both ways together, with which moving takes no longer
    than computing (section 4.2): 4edBL over the time of an iteration without attention, which is
    2NB / (MFU(B) * peak)."""
    return model.moved_bytes * batch / computing.linear_s(model, batch)


def attention_devices(model: Model, scheme: Scheme, slice_s: float, tokens: float, device: Device) -> int:
    """So many that attention of a batch of `tokens` takes t_m / (n - 1) at most (section 5.1.1), and that the
    KV of all batches has room. `slice_s` is of all layers."""
    one = Group(device=device, count=1)
    for_time = one.attention_s(model, tokens) / attend_s_wanted(scheme, slice_s)
    for_memory = scheme.batches * tokens * model.kv_token_bytes / one.usable_bytes
    return max(math.ceil(max(for_time, for_memory)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`computing` holds the model; there are as many of it as the scheme has replicas. The pool's network is
    as fast as that of one replica, whose devices have a connection each."""

    model: Model
    computing: Group
    pool: Group
    scheme: Scheme
    network_bytes_s: float = NETWORK_BYTES_S  # of one computing device, each way
    round_trip_s: float = ROUND_TRIP_S
    mini_batches: int = MINI_BATCHES
    contexts_come_home: bool = False  # after each slice, as decode has it; else they go round a ring

    @property
    def price(self) -> float:
        return self.scheme.replicas * self.computing.price + self.pool.price

    @property
    def connection_bytes_s(self) -> float:
        """Each way, between a replica and the pool."""
        return self.computing.count * self.network_bytes_s

    def sequences(self, context: int) -> int:
        """That have room in the pool, in all batches."""
        return self.pool.kv_tokens(self.model, weights=False) // context

    def moving_s(self, batch: float) -> tuple[float, float]:
        """To the pool and back, of one layer."""
        model, rate = self.model, self.connection_bytes_s
        return batch * model.sent_bytes / rate, batch * model.returned_bytes / rate

    def timing(self, batch: float, context: float) -> Timing:
        """A layer of one batch. Its mini-batches are sent, attended and returned at the same time, so that
        the longest of the three hides the others but for the first and the last mini-batch."""
        slice_s = self.computing.linear_s(self.model, batch) / self.model.layers
        attend_s = self.pool.attention_s(self.model, batch * context) / self.model.layers
        parts = (*self.moving_s(batch), attend_s)
        stage_s = (sum(parts) + (self.mini_batches - 1) * max(parts)) / self.mini_batches
        return Timing(slice_s=slice_s, attend_s=attend_s, network_s=stage_s - attend_s + self.round_trip_s)

    def token_s(self, batch: float, context: float) -> float:
        """Seconds in which each sequence of each batch gets a token: a period a layer, or what the batches'
        messages take on a replica's connection, where that is longer."""
        moving_s = self.scheme.batches / self.scheme.replicas * max(self.moving_s(batch))
        return self.model.layers * max(period_s(self.scheme, self.timing(batch, context)), moving_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`batch` is of each of the scheme's batches. Times are of a whole iteration."""

    deployment: Deployment
    batch: int
    context: int

    @property
    def tokens_s(self) -> float:
        """Of all batches together."""
        return self.deployment.scheme.batches * self.batch / self.token_s

    @property
    def token_s(self) -> float:
        return self.deployment.token_s(self.batch, self.context)

    @property
    def tokens_s_per_dollar(self) -> float:
        return self.tokens_s / self.deployment.price

    def row(self) -> dict[str, str | int | float]:
        deployment = self.deployment
        timing, layers = deployment.timing(self.batch, self.context), deployment.model.layers
        return {
            "sequences": deployment.scheme.batches * self.batch,
            "attention devices": deployment.pool.count,
            "GB/s needed": minimum_bandwidth(deployment.model, deployment.computing, self.batch) / 1e9,
            "slices ms": timing.slice_s * layers * 1e3,
            "attention ms": timing.attend_s * layers * 1e3,
            "network not hidden ms": timing.network_s * layers * 1e3,
            "ms a token": self.token_s * 1e3,
            "tokens/s": self.tokens_s,
            "tokens/s for $1000": 1e3 * self.tokens_s_per_dollar,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Homogeneous:
    """Attention beside the model on the same devices, as many sequences as have room."""

    model: Model
    computing: Group
    context: int

    @property
    def batch(self) -> int:
        return self.computing.kv_tokens(self.model, weights=True) // self.context

    @property
    def tokens_s(self) -> float:
        return self.batch / self.token_s if self.batch else 0.0

    @property
    def token_s(self) -> float:
        computing, batch = self.computing, self.batch
        return computing.linear_s(self.model, batch) + computing.attention_s(self.model, batch * self.context)

    @property
    def tokens_s_per_dollar(self) -> float:
        return self.tokens_s / self.computing.price

    @classmethod
    def best(cls, model: Model, device: Device, context: int) -> Homogeneous:
        """Of all sizes of one host, that which makes most for its price. Raises InvalidInput where not even
        one sequence has room."""
        found = max(
            (
                cls(model=model, computing=Group(device=device, count=count), context=context)
                for count in range(1, _GROUP_MAX + 1)
            ),
            key=lambda one: one.tokens_s_per_dollar,
        )
        if not found.batch:
            raise InvalidInput(f"{model.name} with {context} tokens of context fits no host of {device.name}")
        return found


def plan_of(
    model: Model, computing: Group, device: Device, scheme: Scheme, *, batch: int, context: int
) -> Plan:
    """With as many attention devices as this batch wants."""
    slice_s = computing.linear_s(model, batch)
    count = attention_devices(model, scheme, slice_s, batch * context, device)
    deployment = Deployment(
        model=model, computing=computing, pool=Group(device=device, count=count), scheme=scheme
    )
    return Plan(deployment=deployment, batch=batch, context=context)


def compare(
    model: Model, computing: Group, device: Device, scheme: Scheme, *, sizes: Sequence[int], context: int
) -> Report:
    """A row for each number of sequences, in all batches."""
    if computing.usable_bytes < model.weight_bytes:
        raise InvalidInput(
            f"{model.name} does not fit {computing.count} {computing.device.name}: give more --devices"
        )
    plans = [
        plan_of(model, computing, device, scheme, batch=max(size // scheme.batches, 1), context=context)
        for size in sizes
    ]
    best = max(plans, key=lambda plan: plan.tokens_s_per_dollar)
    alone = Homogeneous.best(model, computing.device, context)
    rows = [
        plan.row() | {"over homogeneous": plan.tokens_s_per_dollar / alone.tokens_s_per_dollar}
        for plan in plans
    ]
    return Report(
        title=f"{model.name}, context {context}: {scheme.replicas} x {computing.count} "
        f"{computing.device.name}, attention on {device.name}, {scheme.batches} batches ({scheme.name})",
        ratios={
            "throughput per cost over homogeneous, best": best.tokens_s_per_dollar
            / alone.tokens_s_per_dollar,
            f"homogeneous: sequences of {alone.computing.count} {computing.device.name}": alone.batch,
            "homogeneous: tokens/s": alone.tokens_s,
            "homogeneous: ms a token": 1e3 * alone.token_s,
        },
        rows=rows,
    )


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "offload-plan", help="devices, network and batch for attention on a pool, from data sheets"
    )
    parser.add_argument("--model", default="llama-13b", metavar="NAME_OR_DIR", help="llama-13b, or your own")
    parser.add_argument(
        "--computing", choices=[one.name for one in COMPUTING_DEVICES], default="A100-80G", metavar="DEVICE"
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="of one replica of the model")
    parser.add_argument(
        "--attention", choices=[one.name for one in MEMORY_DEVICES], default="RTX 3090", metavar="DEVICE"
    )
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of each sequence")
    parser.add_argument("--batches", type=int, default=2, metavar="N", help="over N - 1 replicas; 1: one")
    parser.add_argument("--fixed", action="store_true", help="N batches over N replicas")
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=_BATCHES, metavar="N", help="in all batches"
    )
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    model = model_of(options.model)
    computing = next(one for one in COMPUTING_DEVICES if one.name == options.computing)
    device = next(one for one in MEMORY_DEVICES if one.name == options.attention)
    one = options.fixed or options.batches == 1
    scheme: Scheme = Fixed(options.batches) if one else Rotational(options.batches)
    return compare(
        model,
        Group(device=computing, count=options.devices),
        device,
        scheme,
        sizes=options.sequences,
        context=options.context,
    )


def _draw(path: Path, report: Report) -> None:
    parts = ("slices ms", "attention ms", "network not hidden ms")
    axis = "milliseconds of one batch, before batches overlap"
    stacked_bars(path, report.title, report.rows, parts, "sequences", axis, " ms")
