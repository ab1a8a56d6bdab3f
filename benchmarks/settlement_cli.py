"""`kvcommons bench settlement`: simulated instances over half an hour, or real ones over minutes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.plot import curves
from benchmarks.report import Report
from benchmarks.settlement import MODES, Load, compare


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("settlement", help="throughput over time with debts settled and not")
    parser.add_argument("--instances", type=int, default=4, metavar="N")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="simulated")
    parser.add_argument("--windows", type=int, default=15, metavar="N", help="rows of the table")
    parser.add_argument("--requests-per-minute", type=float, default=200.0, metavar="R")
    parser.add_argument("--long-share", type=float, default=0.12, metavar="S", help="of the requests")
    parser.add_argument("--threshold", type=int, default=8, metavar="N", help="blocks worth a settlement")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first round")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="each with a seed of its own")
    parser.add_argument(
        "--real", action="store_true", help="real processes instead: minutes are of each mode"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=[*MODES], default=[*MODES], metavar="MODE", help="if real"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="7m", help="7m, 34m or 246m, if real")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    if options.real:
        from benchmarks import settlement_real

        return settlement_real.compare(
            settlement_real.RealLoad(instances=options.instances, long_share=options.long_share),
            size=options.random_model,
            minutes=options.minutes,
            windows=options.windows,
            modes=options.modes,
            seed=options.seed,
            progress=progress,
        )
    load = Load(
        instances=options.instances,
        requests_per_minute=options.requests_per_minute,
        long_share=options.long_share,
    )
    return compare(
        load,
        minutes=options.minutes,
        windows=options.windows,
        threshold=options.threshold,
        seeds=range(options.seed, options.seed + options.rounds),
        progress=progress,
    )


def _draw(path: Path, report: Report) -> None:
    """As the paper's figure 10, and below it why: the share of KV that lies elsewhere."""
    ends = [float(str(row["minutes"]).split("-")[1]) for row in report.rows]
    modes = [name for name in MODES if f"tokens/s, {name}" in report.rows[0]]
    groups = [
        (
            f"{title}, over minutes",
            "",
            {
                name: [
                    (end, float(row[f"{kind}, {name}"])) for end, row in zip(ends, report.rows, strict=True)
                ]
                for name in modes
            },
        )
        for kind, title in (("tokens/s", "tokens a second"), ("remote %", "KV elsewhere, %"))
    ]
    curves(path, report.title, groups)
