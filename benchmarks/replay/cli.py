"""`kvcommons replay TRACE …`: policies side by side, as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path

from benchmarks.replay.hierarchy import Capacity
from benchmarks.replay.replay import POLICIES, Outcome, Setting, replay
from benchmarks.replay.sharegpt import ShareGpt, generate
from benchmarks.replay.trace import Trace, read_trace
from benchmarks.report import command_line, describe_machine
from kvcommons.errors import InvalidInput, KVCommonsError

# K and V of a token in LLaMA-13B at two bytes a number, the paper's first model: 0.78 MiB.
TOKEN_BYTES = 2 * 40 * 5120 * 2


_TABLE_WIDTH = 130  # narrower ones would cut the figures


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, 1 for what failed, 2 for wrong usage."""
    options = _parser().parse_args(argv)
    try:
        trace = _trace(options)
        setting = _setting(options, trace)
        outcomes = []
        for policy, ttl_s in product(dict.fromkeys(options.policy), dict.fromkeys(options.ttl or [None])):
            print(f"{policy} …", file=sys.stderr, end=" ", flush=True)
            outcomes.append(replay(trace, policy, replace(setting, ttl_s=ttl_s)))
            print(f"{outcomes[-1].seconds:.1f} s", file=sys.stderr)
    except KVCommonsError as error:
        print(f"kvcommons replay: {error.message}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_result(trace, setting, outcomes), indent=1))
    else:
        _print(trace, setting, outcomes)
    if options.picture is not None:
        from benchmarks.replay.picture import draw

        draw(options.picture, trace, setting, outcomes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcommons replay",
        description="The kvstore's eviction policies on a trace, on a virtual clock.",
        epilog=f"Policies: {', '.join(POLICIES)}.",
    )
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or 'sharegpt' for a generated workload")
    dram = parser.add_mutually_exclusive_group(required=True)
    dram.add_argument("--dram-blocks", type=_count, metavar="N", help="room in DRAM, in blocks")
    dram.add_argument("--dram", type=_bytes, metavar="BYTES", help="room in DRAM: 128G, 1.5T, …")
    disk = parser.add_mutually_exclusive_group()
    disk.add_argument("--disk-blocks", type=_count, default=0, metavar="N", help="on disk (default: none)")
    disk.add_argument("--disk", type=_bytes, metavar="BYTES")
    parser.add_argument(
        "--policy", nargs="+", action="extend", required=True, choices=POLICIES, metavar="NAME"
    )
    parser.add_argument(
        "--look-ahead",
        type=_count,
        metavar="REQUESTS",
        help="known after the one that is served (default: those that wait; a plain trace has none)",
    )
    parser.add_argument(
        "--ttl",
        type=_seconds,
        nargs="+",
        action="extend",
        metavar="SECONDS",
        help="unused blocks go after this; several: side by side (default: when their room is wanted)",
    )
    parser.add_argument("--buffer", type=_share, default=0.0, metavar="SHARE", help="of DRAM, kept free")
    parser.add_argument("--warm-up", type=_count, default=0, metavar="REQUESTS", help="not counted")
    parser.add_argument("--token-bytes", type=_bytes, default=TOKEN_BYTES, metavar="BYTES")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG or SVG")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    workload = parser.add_argument_group("sharegpt")
    standard = ShareGpt()
    for name, kind, text in (
        ("sessions", int, "how many"),
        ("sessions_per_s", float, "arrive (Poisson)"),
        ("turns_per_s", float, "the server manages"),
        ("think_s", float, "mean time between an answer and the next question"),
        ("block_tokens", int, "a block has"),
        ("context_tokens", int, "window of the model, halved when full; 0: none"),
    ):
        default = getattr(standard, name)
        flag = "--" + name.replace("_", "-")
        workload.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} ({default})")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0: for no time to live, leave it out")
    return value


def _bytes(text: str) -> int:
    """'128G' and the like, in powers of 1024."""
    units = "KMGTP"
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    try:
        value = int(float(number) * 1024 ** (units.index(unit) + 1 if unit else 0))
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of bytes: write 4096, 128G or 1.5T")
    return value


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace != "sharegpt":
        return read_trace(Path(options.trace))
    names = [field.name for field in fields(ShareGpt)]
    return generate(ShareGpt(**{name: getattr(options, name) for name in names}))


def _setting(options: argparse.Namespace, trace: Trace) -> Setting:
    block_bytes = trace.block_tokens * options.token_bytes
    dram = options.dram_blocks if options.dram is None else options.dram // block_bytes
    disk = options.disk_blocks if options.disk is None else options.disk // block_bytes
    if dram < 1:
        raise InvalidInput(f"DRAM has no room for one block of {block_bytes} bytes", param="dram")
    if options.warm_up and options.warm_up >= len(trace.jobs):
        raise InvalidInput(f"the trace has {len(trace.jobs)} requests: nothing is left to be counted")
    return Setting(
        capacity=Capacity(dram_blocks=dram, disk_blocks=disk, buffer_blocks=int(options.buffer * dram)),
        look_ahead=options.look_ahead,
        warm_up=options.warm_up,
        block_bytes=block_bytes,
    )


def _result(trace: Trace, setting: Setting, outcomes: Sequence[Outcome]) -> dict[str, object]:
    return {
        "trace": trace.name,
        "block_tokens": trace.block_tokens,
        "dram_blocks": setting.capacity.dram_blocks,
        "disk_blocks": setting.capacity.disk_blocks,
        "look_ahead": setting.look_ahead,
        "results": [asdict(outcome) for outcome in outcomes],
        "machine": describe_machine(),
        "command": command_line(),
    }


def _print(trace: Trace, setting: Setting, outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    capacity = setting.capacity
    title = (
        f"{trace.name}: room for {capacity.dram_blocks:,} blocks in DRAM, {capacity.disk_blocks:,} on disk"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    columns = ("hits", "DRAM", "disk", "of reusable", "tokens", "DRAM", "disk", "misses")
    for name in (*columns, "read GiB", "written GiB", "time"):
        table.add_column(name, justify="right", no_wrap=name != "of reusable")
    for outcome in outcomes:
        rates = (
            outcome.block_hit_rate,
            outcome.dram_hit_rate,
            outcome.disk_hit_rate,
            outcome.reuse_hit_rate,
            outcome.token_hit_rate,
            outcome.token_dram_rate,
            outcome.token_disk_rate,
        )
        table.add_row(
            outcome.label,
            *(f"{100 * rate:.1f}%" for rate in rates),
            f"{outcome.misses:,}",
            f"{(outcome.fetched_bytes + outcome.loaded_bytes) / 2**30:,.0f}",
            f"{outcome.demoted_bytes / 2**30:,.0f}",
            f"{outcome.seconds:.1f} s",
        )
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
