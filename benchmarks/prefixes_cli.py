"""`kvcommons bench prefixes`: simulated, or on real stacks with `--stack`."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import prefixes
from benchmarks.plot import stacked_bars
from benchmarks.prefixes_simulation import TIERS, Rates, Trial, compare
from benchmarks.random_model import write_random_model
from benchmarks.report import Report
from devstack.running import RunningStack
from services.router.admission.scheduling import OVERTAKES_MAX

_DTYPE, _VALUE_BYTES = "bfloat16", 2
_STACK_PARTS = ("compute s", "waiting for loads s", "decode s", "rest s")


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "prefixes", help="many shared prefixes, little room: policies of the router's queue"
    )
    parser.add_argument("--prefixes", type=int, default=128, metavar="N")
    parser.add_argument(
        "--capacity",
        type=_capacity,
        default=(8, 32, 128),
        metavar="DEVICE/DRAM/DISK",
        help="prefixes in each tier",
    )
    parser.add_argument("--requests", type=int, default=4096, metavar="N")
    parser.add_argument("--waiting", type=int, default=512, metavar="N", help="jobs that wait at any time")
    parser.add_argument("--prefix", type=int, default=2048, metavar="N", help="tokens of a prefix")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens of each request's own")
    parser.add_argument("--skew", type=float, default=0.0, metavar="S", help="of Zipf's law; 0: all alike")
    parser.add_argument("--look-ahead", type=int, default=64, metavar="N", help="jobs hinted; 0: none")
    parser.add_argument("--overtakes-max", type=int, default=OVERTAKES_MAX, metavar="N")
    parser.add_argument("--disk-gb-s", type=float, default=1.0, metavar="R", help="how fast the disk reads")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first round")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="each with a seed of its own")
    parser.add_argument(
        "--policy", nargs="+", default=("fpf", "relaxed_fpf", "bounded_fpf"), help="compared with fcfs"
    )
    stacks = parser.add_argument_group("real stacks")
    stacks.add_argument("--stack", action="store_true", help="with a random model, no simulation")
    stacks.add_argument("--random-model", metavar="SIZE", default="7m", help="7m, 34m or 246m")
    stacks.add_argument("--answer", type=int, default=4, metavar="N", help="tokens of each answer")
    stacks.add_argument("--running", type=int, default=1, metavar="N", help="jobs that run at once")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _capacity(text: str) -> tuple[int, int, int]:
    device, dram, disk = (int(part) for part in text.split("/"))
    return device, dram, disk


def _run(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    if options.stack:
        return _on_stacks(options, progress)
    device, dram, disk = options.capacity
    first = Trial(
        prefixes=options.prefixes,
        device=device,
        dram=dram,
        disk=disk,
        requests=options.requests,
        waiting=options.waiting,
        prefix_tokens=options.prefix,
        new_tokens=options.new,
        skew=options.skew,
        look_ahead=options.look_ahead,
        overtakes_max=options.overtakes_max,
        rates=Rates(disk_bytes_s=options.disk_gb_s * 1e9),
    )
    return compare([replace(first, seed=seed) for seed in _seeds(options)], options.policy, progress)


def _seeds(options: argparse.Namespace) -> range:
    return range(options.seed, options.seed + options.rounds)


def _on_stacks(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    from kvcommons.model.spec import ModelSpec

    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        model = write_random_model(folder, options.random_model, progress, dtype=_DTYPE)
        spec = ModelSpec.read(model)
        load = prefixes.Workload(
            prefixes=options.prefixes,
            capacity=options.capacity,
            requests=options.requests,
            waiting=options.waiting,
            running=options.running,
            prefix_tokens=options.prefix,
            new_tokens=options.new,
            answer_tokens=options.answer,
            vocab_size=spec.vocab_size,
            token_bytes=2 * spec.layers * spec.kv_heads * spec.head_dim * _VALUE_BYTES,
            overtakes_max=options.overtakes_max,
            look_ahead=options.look_ahead,
            skew=options.skew,
        )
        policies = ("fcfs", *options.policy)
        trials = []
        for turn, seed in enumerate(_seeds(options)):
            first = turn % len(policies)
            for policy in (*policies[first:], *policies[:first]):
                progress(f"round {turn + 1}: starting the stack for {policy}")
                own = folder / f"{policy}-{turn}"
                with RunningStack(own, tables=load.tables(policy, _DTYPE), model=str(model)) as stack:
                    trials.append(prefixes.measure(stack, load, policy, turn, seed, progress))
                shutil.rmtree(own)
    capacity = "/".join(map(str, options.capacity))
    return prefixes.summarise(
        f"{options.random_model}: {options.prefixes} prefixes of {options.prefix} tokens, {capacity} kept",
        trials,
    )


def _draw(path: Path, report: Report) -> None:
    parts, axis = tuple(f"from {tier} %" for tier in TIERS), "share of requests, by the tier of their prefix"
    if _STACK_PARTS[0] in report.rows[0]:
        parts, axis = _STACK_PARTS, "seconds"
    rows = [{**row, "how": f"{row['policy']}\n{row['requests/s']:.2f}/s"} for row in report.rows]
    stacked_bars(path, report.title, rows, parts, "how", axis)
