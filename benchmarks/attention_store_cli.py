"""`kvcommons bench attention-store`."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import attention_store as tables
from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report
from benchmarks.session_stack import StackSetting
from benchmarks.sessions import SessionsBenchmark, Workload

Progress = Callable[[str], None]
ANSWER_TOKENS = 8


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("attention-store", help="tables of AttentionStore's evaluation")
    kinds = parser.add_subparsers(required=True, metavar="TABLE")
    ratios = kinds.add_parser("ratios", help="§4.3.1: prefill by the share that is history")
    ratios.add_argument("--tokens", type=int, default=1000, metavar="N", help="history and new ones together")
    ratios.add_argument("--new", type=int, nargs="+", default=[500, 400, 300, 200, 100], metavar="N")
    ratios.add_argument("--sessions", type=int, default=4, metavar="N", help="pairs of each ratio")
    ratios.set_defaults(run=_ratios, draw=_draw_ratios)
    capacity = kinds.add_parser("capacity", help="§4.3.5: hit rate by room (replay)")
    shares = [0.05, 0.1, 0.15, 0.25, 0.5, 1.0]
    capacity.add_argument(
        "--shares", type=float, nargs="+", default=shares, metavar="X", help="RCC/CCpUT; the paper's term"
    )
    capacity.set_defaults(run=_capacity, draw=_draw_capacity)
    mediums = kinds.add_parser("mediums", help="§4.3.6: hits with a device, DRAM and a disk (replay)")
    names = [model.name for model in tables.MODELS]
    mediums.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")
    mediums.set_defaults(run=_mediums, draw=_draw_mediums)
    # The paper does not say how long users think: minutes where a server keeps up; where it does not, their
    # turns wait for hours anyway.
    for kind, think_s in ((capacity, 600.0), (mediums, 60.0)):
        kind.add_argument("--sessions", type=int, default=tables.SESSIONS, metavar="N")
        kind.add_argument("--policy", nargs="+", default=["lru", "attention-store"], metavar="NAME")
        kind.add_argument("--block-tokens", type=int, default=256, metavar="N")
        kind.add_argument("--think-s", type=float, default=think_s, metavar="S", help="mean, between turns")
    measured = kinds.add_parser("mediums-measured", help="§4.3.6 on real stacks, small")
    measured.add_argument("--sessions", type=int, default=28, metavar="N")
    measured.add_argument("--scale", type=int, default=8, metavar="N", help="tokens of ShareGPT's for one")
    measured.add_argument("--warm-up", type=int, default=30, metavar="N", help="turns that are not counted")
    measured.add_argument("--dram-part", type=int, default=6, metavar="N", help="DRAM has 1/N of all KV")
    measured.set_defaults(run=_measured_mediums, draw=_draw_measured)
    for kind, size in ((ratios, "246m"), (measured, "34m")):
        kind.add_argument("--random-model", metavar="SIZE", default=size, help="random weights")
        kind.add_argument("--block-tokens", type=int, default=16, metavar="N")
    for kind in (ratios, capacity, mediums, measured):
        add_outputs(kind)


def _ratios(options: argparse.Namespace, progress: Progress) -> Report:
    loads = [
        Workload(
            history_tokens=options.tokens - new,
            new_tokens=new,
            answer_tokens=ANSWER_TOKENS,
            turns=1,
            sessions=options.sessions + 1,  # the first one's turns warm up
            concurrency=1,
        )
        for new in options.new
    ]
    found = {}
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        model = write_random_model(Path(name), options.random_model, progress)
        setting = _setting(options, Path(name) / "stack", model)
        progress("starting the stack")
        with setting.stack(max(loads, key=lambda load: load.new_tokens)) as stack:
            for load in loads:
                ratio = f"{load.history_tokens}/{load.new_tokens}"

                def tell(text: str, ratio: str = ratio) -> None:
                    progress(f"{ratio}: {text}")

                benchmark = SessionsBenchmark(load, setting.writer(), tell, name=ratio.replace("/", "-"))
                benchmark.begin(stack.client)
                found[ratio] = benchmark.round(stack.client, 0, "dram")[1:]
    return tables.ratios(found, options.random_model)


def _replayed(options: argparse.Namespace) -> tables.Replayed:
    return tables.Replayed(
        sessions=options.sessions,
        block_tokens=options.block_tokens,
        policies=options.policy,
        think_s=options.think_s,
    )


def _capacity(options: argparse.Namespace, progress: Progress) -> Report:
    return tables.capacity(_replayed(options), options.shares, progress)


def _mediums(options: argparse.Namespace, progress: Progress) -> Report:
    models = [model for model in tables.MODELS if model.name in options.models]
    return tables.mediums(_replayed(options), models, progress)


def _measured_mediums(options: argparse.Namespace, progress: Progress) -> Report:
    from kvcommons.model.spec import ModelSpec

    load = tables.Chat(
        sessions=options.sessions,
        scale=options.scale,
        answer_tokens=ANSWER_TOKENS,
        warm_up=options.warm_up,
    )
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        model = write_random_model(Path(name), options.random_model, progress)
        spec = ModelSpec.read(model)
        all_bytes = sum(load.lengths().values()) * 2 * spec.layers * spec.kv_heads * spec.head_dim * 2
        capacities = {
            "device": (1 << 20, 0),
            "+ DRAM": (all_bytes // options.dram_part, 0),
            "+ disk": (all_bytes // options.dram_part, 2 * all_bytes),
        }
        # The device has room for the longest session.
        workload = Workload(
            history_tokens=load.longest(),
            new_tokens=64,
            answer_tokens=ANSWER_TOKENS,
            turns=1,
            sessions=options.sessions,
            concurrency=1,
        )
        found = {}
        for number, (medium, (dram, disk)) in enumerate(capacities.items()):
            setting = _setting(options, Path(name) / str(number), model, dram_bytes=dram, disk_bytes=disk)

            def tell(text: str, medium: str = medium) -> None:
                progress(f"{medium}: {text}")

            tell("starting the stack")
            with setting.stack(workload) as stack:
                found[medium] = tables.chat(stack.client, load, setting.writer(), tell)
            shutil.rmtree(setting.folder)
    title = (
        f"{options.random_model}: {options.sessions} sessions, {all_bytes / 2**30:.2f} GiB of KV in all, "
        f"DRAM for 1/{options.dram_part} of it, the device for {load.longest():,} tokens"
    )
    return tables.measured_mediums(title, found)


def _setting(
    options: argparse.Namespace,
    folder: Path,
    model: Path,
    *,
    dram_bytes: int = 2 << 30,
    disk_bytes: int = 16 << 30,
) -> StackSetting:
    return StackSetting(
        folder=folder,
        model=str(model),
        dtype="bfloat16",
        block_tokens=options.block_tokens,
        dram_bytes=dram_bytes,
        disk_bytes=disk_bytes,
    )


def _draw_ratios(path: Path, report: Report) -> None:
    ways = ("recompute", "reuse")
    groups = [
        (str(row["history/new"]), [(way, float(row[f"{way} ms"])) for way in ways]) for row in report.rows
    ]
    panels(path, report.title, groups, "milliseconds of prefill (medians)")


def _draw_capacity(path: Path, report: Report) -> None:
    groups = [
        (
            f"RCC/CCpUT = {share}",
            [(str(row["policy"]), float(row["hits %"])) for row in report.rows if row["RCC/CCpUT"] == share],
        )
        for share in dict.fromkeys(row["RCC/CCpUT"] for row in report.rows)
    ]
    panels(path, report.title, groups, "hits, % of the blocks that had come before")


def _draw_mediums(path: Path, report: Report) -> None:
    groups = [
        (
            f"{row['model']}, {row['policy']}",
            [(name, float(row[f"{name} %"])) for name in ("device", "+ DRAM", "+ disk")],
        )
        for row in report.rows
    ]
    panels(path, report.title, groups, "turns that found their history, %")


def _draw_measured(path: Path, report: Report) -> None:
    groups = [
        (figure, [(str(row["KV kept in"]), float(row[figure])) for row in report.rows])
        for figure in ("prefill tokens/s", "tokens from cache %")
    ]
    panels(path, report.title, groups, "")
