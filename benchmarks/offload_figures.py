"""`kvcommons bench offload-simulated`: the figures of the Lamina paper on simulated devices of its kind, with
decode's own schedulers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.offload_plan import Deployment, Homogeneous, attention_devices
from benchmarks.offload_simulation import Batching, Load, OffloadSimulation, Outcome
from benchmarks.plot import panels, stacked_bars
from benchmarks.report import Report, Row
from benchmarks.rooflines import A100_40G, A100_40G_AS_3090, MODELS, Group
from services.decode.staggering.pipelines import Fixed, Rotational

# Section 6: A100-40G as both kinds of devices. How many of them the paper names for one test only: three
# memory devices to a computing one (section 6.3, 13B).
_COMPUTING = {"llama-13b": 1, "llama-33b": 2}
_MEMORY_DEVICES = 3  # of each computing device
_CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_ITERATIONS = 4
_LARGE = 128  # sequences: from here on the paper recommends pipelining


def paper_deployment(name: str) -> Deployment:
    """Of one of the two models that the paper evaluates, with two batches on one replica."""
    model = next(one for one in MODELS if one.name == name)
    count = _COMPUTING[name]
    return Deployment(
        model=model,
        computing=Group(device=A100_40G, count=count),
        pool=Group(device=A100_40G_AS_3090, count=_MEMORY_DEVICES * count),
        scheme=Rotational(2),
    )


def _run(deployment: Deployment, load: Load, batching: Batching) -> Outcome:
    return OffloadSimulation(deployment, load, batching).run(_ITERATIONS)


def throughput(deployment: Deployment, contexts: Sequence[int], progress: Callable[[str], None]) -> Report:
    """Figures 12 and 13: as many sequences as have room, against the same computing devices alone."""
    rows: list[Row] = []
    columns: dict[str, list[float]] = {}
    for context in contexts:
        progress(f"context {context}")
        alone = Homogeneous(model=deployment.model, computing=deployment.computing, context=context)
        load = Load(sequences=deployment.sequences(context), context=context)
        one, two, auto = (_run(deployment, load, batching) for batching in Batching)
        half = _run(deployment, replace(load, sequences=load.sequences // 2), Batching.ONE)
        per_cost = alone.computing.price / deployment.price
        ratios = {
            "sequences over homogeneous": load.sequences / alone.batch,
            "throughput over homogeneous, one batch": one.tokens_s / alone.tokens_s,
            "throughput over homogeneous, pipelined": two.tokens_s / alone.tokens_s,
            "throughput per cost over homogeneous": per_cost * two.tokens_s / alone.tokens_s,
            "gain of pipelining, same sequences": two.tokens_s / one.tokens_s,
            "gain of pipelining, same batch": two.tokens_s / half.tokens_s,
        }
        for name, ratio in ratios.items():
            columns.setdefault(name, []).append(ratio)
        rows.append(
            {
                "context": context,
                "homogeneous sequences": alone.batch,
                "homogeneous tokens/s": alone.tokens_s,
                "sequences": load.sequences,
                "one batch tokens/s": one.tokens_s,
                "pipelined tokens/s": two.tokens_s,
                "chosen tokens/s": auto.tokens_s,
                **ratios,
            }
        )
    extremes = {
        f"{name}, {word}": pick(values)
        for name, values in columns.items()
        for word, pick in (("least", min), ("most", max))
    }
    return Report(title=_title(deployment), ratios=extremes, rows=rows)


def breakdown(
    deployment: Deployment, sizes: Sequence[int], context: int, progress: Callable[[str], None]
) -> Report:
    """Figure 14, and where pipelining pays: parts of an iteration by the number of sequences, as far as the
    pool has room."""
    rows: list[Row] = []
    gains: dict[int, float] = {}
    for size in sizes:
        if size > deployment.sequences(context):
            continue
        progress(f"{size} sequences")
        load = Load(sequences=size, context=context)
        outcomes = {batching: _run(deployment, load, batching) for batching in Batching}
        # What messages take beside attention when nobody else is in the pool.
        network = _run(deployment, replace(load, sequences=size // 2), Batching.ONE)
        gains[size] = outcomes[Batching.STAGGERED].tokens_s / outcomes[Batching.ONE].tokens_s
        rows += [_parts(size, Batching.ONE, outcomes[Batching.ONE], outcomes[Batching.ONE])]
        rows += [_parts(size, Batching.STAGGERED, outcomes[Batching.STAGGERED], network)]
        chosen = outcomes[Batching.AUTO].batches
        rows[-1] = {**rows[-1], "gain": gains[size], "chosen": "two" if chosen > 1 else "one"}
    large = [gain for size, gain in gains.items() if size >= _LARGE]
    return Report(
        title=f"{_title(deployment)}, context {context}",
        ratios={
            "gain of pipelining, fewest sequences": next(iter(gains.values())),
            "gain of pipelining, large batches, least": min(large, default=0.0),
            "gain of pipelining, large batches, most": max(large, default=0.0),
        },
        rows=rows,
    )


def _parts(size: int, batching: Batching, outcome: Outcome, alone: Outcome) -> dict[str, str | int | float]:
    """`alone` has the same batches with the pool for themselves: what is more is waiting."""
    iterations = len(outcome.rows)
    network_s = (alone.stages_s - alone.attention_s) / len(alone.rows)
    stage_s = (outcome.stages_s - outcome.attention_s) / iterations
    return {
        "how": f"{size}, {'one' if batching is Batching.ONE else 'two'}",
        "slices ms": 1e3 * outcome.slices_s / iterations,
        "attention ms": 1e3 * outcome.attention_s / iterations,
        "network ms": 1e3 * min(network_s, stage_s),
        "waiting ms": 1e3 * (max(stage_s - network_s, 0.0) + outcome.replica_waits_s / iterations),
        "tokens/s": outcome.tokens_s,
    }


def overlap(
    deployment: Deployment, sizes: Sequence[int], context: int, progress: Callable[[str], None]
) -> Report:
    """Figure 16: a batch's messages whole, against mini-batches that hide them behind attention."""
    rows: list[Row] = []
    for size in sizes:
        if size > deployment.sequences(context):
            continue
        progress(f"{size} sequences")
        load = Load(sequences=size, context=context)
        whole = _run(replace(deployment, mini_batches=1), load, Batching.ONE)
        streamed = _run(deployment, load, Batching.ONE)
        network_s = (whole.stages_s - whole.attention_s) / len(whole.rows)
        hidden_s = whole.token_s - streamed.token_s
        rows.append(
            {
                "sequences": size,
                "ms a token, whole": 1e3 * whole.token_s,
                "ms a token, streamed": 1e3 * streamed.token_s,
                "attention ms": 1e3 * whole.attention_s / len(whole.rows),
                "network ms": 1e3 * network_s,
                "hidden %": 100 * hidden_s / network_s,
                "saved of the latency %": 100 * hidden_s / whole.token_s,
            }
        )
    return Report(
        title=f"{_title(deployment)}, context {context}, {deployment.mini_batches} mini-batches",
        ratios={
            "hidden, most, %": max(float(row["hidden %"]) for row in rows),
            "saved of the latency, most, %": max(float(row["saved of the latency %"]) for row in rows),
        },
        rows=rows,
    )


def replicas(
    deployment: Deployment, batch: int, context: int, counts: Sequence[int], progress: Callable[[str], None]
) -> Report:
    """Section 5.1: rotational and fixed pipelining of the same sequences on the same devices, as many of them
    for attention as rotational pipelining wants."""
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    model, computing = deployment.model, deployment.computing
    for count in counts:
        progress(f"{count} replicas")
        rotational = Rotational(count + 1)
        slice_s, device = computing.linear_s(model, batch), deployment.pool.device
        devices = attention_devices(model, rotational, slice_s, batch * context, device)
        pool = Group(device=device, count=devices)
        load = Load(sequences=batch * rotational.batches, context=context)
        row: dict[str, str | int | float] = {"replicas": count, "attention devices": devices}
        outcomes: dict[str, Outcome] = {}
        for name, scheme in (("fixed", Fixed(count)), ("rotational", rotational), ("home", rotational)):
            kind = replace(deployment, scheme=scheme, pool=pool, contexts_come_home=name == "home")
            outcomes[name] = outcome = _run(kind, load, Batching.STAGGERED)
            row[f"{name} tokens/s"] = outcome.tokens_s
            row[f"{name} ms a token"] = 1e3 * outcome.token_s
            row[f"{name} replicas busy %"] = 100 * outcome.replicas_busy
            row[f"{name} pool busy %"] = 100 * outcome.pool_busy
        for name, what in (("rotational", "rotational"), ("home", "rotational, contexts come home,")):
            ratio = outcomes[name].tokens_s / outcomes["fixed"].tokens_s
            ratios[f"{what} over fixed, {count} replicas"] = ratio
        rows.append(row)
    title = f"Simulated {model.name}: {computing.count} {computing.device.name} a replica, context {context}"
    return Report(title=title, ratios=ratios, rows=rows)


def _title(deployment: Deployment) -> str:
    computing, pool = deployment.computing, deployment.pool
    return (
        f"Simulated {deployment.model.name}: {computing.count} {computing.device.name} and {pool.count} "
        "for attention"
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    run: Callable[[argparse.Namespace, Deployment, Callable[[str], None]], Report]
    draw: Callable[[Path, Report], None]


def _draw_throughput(path: Path, report: Report) -> None:
    hows = ("homogeneous", "one batch", "pipelined")
    groups = [
        (f"context {row['context']}", [(how, float(row[f"{how} tokens/s"])) for how in hows])
        for row in report.rows
    ]
    panels(path, report.title, groups, "tokens a second")


def _draw_parts(path: Path, report: Report) -> None:
    parts = ("slices ms", "attention ms", "network ms", "waiting ms")
    stacked_bars(path, report.title, report.rows, parts, "how", "milliseconds of an iteration", " ms")


def _draw_overlap(path: Path, report: Report) -> None:
    hows = ("whole", "streamed")
    groups = [
        (f"{row['sequences']} sequences", [(how, float(row[f"ms a token, {how}"])) for how in hows])
        for row in report.rows
    ]
    panels(path, report.title, groups, "milliseconds a token")


def _draw_replicas(path: Path, report: Report) -> None:
    hows = ("fixed", "rotational", "home")
    groups = [
        (f"{row['replicas']} replicas", [(how, float(row[f"{how} tokens/s"])) for how in hows])
        for row in report.rows
    ]
    panels(path, report.title, groups, "tokens a second")


_KINDS = {
    "throughput": _Kind(lambda o, d, p: throughput(d, o.contexts, p), _draw_throughput),
    "breakdown": _Kind(lambda o, d, p: breakdown(d, o.sequences, o.context, p), _draw_parts),
    "overlap": _Kind(lambda o, d, p: overlap(d, o.sequences, o.context, p), _draw_overlap),
    "replicas": _Kind(lambda o, d, p: replicas(d, o.batch, o.context, o.replicas, p), _draw_replicas),
}


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "offload-simulated", help="attention on a pool of simulated devices: the figures of the Lamina paper"
    )
    parser.add_argument("--show", choices=_KINDS, default="throughput")
    parser.add_argument("--model", choices=_COMPUTING, default="llama-13b")
    parser.add_argument("--memory-devices", type=int, metavar="N", help="of the pool")
    parser.add_argument("--mini-batches", type=int, metavar="N", help="of a device's share of a batch")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="tokens of each sequence")
    parser.add_argument("--contexts", type=int, nargs="+", default=_CONTEXTS, metavar="N", help="throughput")
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=_SIZES, metavar="N", help="in all batches"
    )
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="replicas: of each batch")
    parser.add_argument("--replicas", type=int, nargs="+", default=(1, 2, 3, 4), metavar="N", help="replicas")
    add_outputs(parser)
    parser.set_defaults(run=_show, draw=_draw)


def _show(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    deployment = paper_deployment(options.model)
    if options.memory_devices:
        pool = replace(deployment.pool, count=options.memory_devices)
        deployment = replace(deployment, pool=pool)
    if options.mini_batches:
        deployment = replace(deployment, mini_batches=options.mini_batches)
    return _KINDS[options.show].run(options, deployment, progress)


def _draw(path: Path, report: Report) -> None:
    """By the table's columns, which say what was shown."""
    columns = report.rows[0].keys()
    kinds = {"homogeneous tokens/s": "throughput", "hidden %": "overlap", "replicas": "replicas"}
    name = next((kind for column, kind in kinds.items() if column in columns), "breakdown")
    _KINDS[name].draw(path, report)
