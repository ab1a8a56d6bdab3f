"""`kvcommons bench fixed-time`: what an iteration takes beside its attention, by the length of the context
(Mnemosyne, section 5), and by the number of sequences."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plot import Curves, curves
from benchmarks.report import Report, Row, p50

if TYPE_CHECKING:
    from benchmarks.fixed_time import Measured, Taken

Progress = Callable[[str], None]


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("fixed-time", help="an iteration beside its attention, by the context")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20],
        metavar="TOKENS", help="multiples of 64; the shortest is the base",
    )  # fmt: skip
    parser.add_argument(
        "--sequences", type=int, nargs="*", default=[1, 8, 32, 64], metavar="N", help="of batches"
    )
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of a sequence, in a round")
    parser.add_argument("--chunks", type=int, default=64, metavar="N", help="of a prompt, in a round")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    from benchmarks.fixed_time import LAYERS, WINDOW, Setting, measure

    setting = Setting(
        contexts=tuple(sorted(set(options.contexts))),
        sequences=tuple(sorted(set(options.sequences))),
        tokens=options.tokens,
        chunks=options.chunks,
        rounds=options.rounds,
    )
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        measured = asyncio.run(measure(Path(name), setting, progress))
    rows, base, longest = list(_rows(measured)), setting.contexts[0], setting.contexts[-1]
    ratios = {
        f"a {row['what']}, {longest:,} tokens over {base:,}": float(row["over the shortest"])
        for row in rows
        if row["context"] == longest and "over the shortest" in row
    }
    return Report(
        title=f"{LAYERS} layers that see {WINDOW} tokens of the context; of an iteration",
        ratios=ratios | further_us(measured.batches),
        rows=rows,
    )


def further_us(batches: Mapping[int, Sequence[Taken]]) -> dict[str, float]:
    """What each further sequence takes of the processors, from one size of a batch to the next: medians of
    rounds."""
    return {
        f"a further sequence, from {few} to {many}, CPU us": p50(
            [
                (more.engine_s - less.engine_s) / (many - few) * 1e6
                for less, more in zip(batches[few], batches[many], strict=True)
            ]
        )
        for few, many in pairwise(sorted(batches))
    }


def _rows(measured: Measured) -> Iterator[Row]:
    """Medians of rounds; ratios are of neighbours in time."""
    from benchmarks.fixed_time import BATCH_CONTEXT

    for kind, by_context in measured.kinds.items():
        shortest = by_context[min(by_context)]
        for context, some in by_context.items():
            yield {
                "what": kind.value,
                "context": context,
                "ms": p50([one.wall_s for one in some]) * 1e3,
                "CPU ms of the engine": p50([one.engine_s for one in some]) * 1e3,
                "CPU ms of the holder": p50([one.holder_s for one in some]) * 1e3,
                "over the shortest": p50(
                    [one.wall_s / least.wall_s for one, least in zip(some, shortest, strict=True)]
                ),
            }
    for count, some in sorted(measured.batches.items()):
        yield {
            "what": f"batch of {count}, KV here",
            "context": BATCH_CONTEXT,
            "ms": p50([one.wall_s for one in some]) * 1e3,
            "CPU ms of the engine": p50([one.engine_s for one in some]) * 1e3,
        }


def _draw(path: Path, report: Report) -> None:
    curves(path, report.title, list(_groups(report.rows)), columns=2)


def _groups(rows: Sequence[Row]) -> Iterator[Curves]:
    for what in dict.fromkeys(str(row["what"]) for row in rows if "over the shortest" in row):
        some = [row for row in rows if row["what"] == what]
        lines = {
            name: [(float(row["context"]), float(row[name])) for row in some]
            for name in ("ms", "CPU ms of the engine", "CPU ms of the holder")
        }
        yield f"a {what}, by the tokens before it", "ms", lines
