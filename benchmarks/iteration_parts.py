"""`kvcommons bench iteration-parts`: where the time of an iteration goes, by operator, beside the least that
each of them could take here.

The cells of `kvcommons bench peers`, without any service: rows that generate behind a context, and chunks of
a prompt. What a client waits for besides is its request's way to the engine, and the token's way back.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.limits import host_rates
from benchmarks.mixed_iterations import MixedIterations, Point
from benchmarks.peers.bounds import Rates, Rows, bound, in_words
from benchmarks.peers.instruction_sets import INSTRUCTION_SETS, named, narrow
from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row
from kvcommons.errors import InvalidInput

if TYPE_CHECKING:
    from kvcommons.engine.core import Core
    from kvcommons.model.spec import ModelSpec

Progress = Callable[[str], None]
BLOCK_TOKENS = 64
PARTS = ("matrices", "attention", "head", "sampling", "rest")
_UNCOUNTED = 2  # iterations of each cell, at the beginning


@dataclass(frozen=True, slots=True)
class Cell:
    """So many rows that generate, or a chunk of so many tokens, behind as many tokens of context."""

    point: Point
    context: int

    @property
    def name(self) -> str:
        if self.point.rows:
            return f"{self.point.rows} at once, context {self.context:,}"
        return f"a chunk of {self.point.chunk:,} behind {self.context:,}"

    @property
    def rows(self) -> list[Rows]:
        if self.point.rows:
            return [Rows(count=1, history=self.context)] * self.point.rows
        return [Rows(count=self.point.chunk, history=self.context)]

    @property
    def room_tokens(self) -> int:
        """Of each row, and of the chunk's sequence, which is there without a chunk, too."""
        return (self.point.rows + 1) * (self.context + self.point.chunk + 2 * BLOCK_TOKENS)


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "iteration-parts", help="where the time of an iteration goes, beside what each operator is bound by"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
    parser.add_argument(
        "--decode", nargs="*", metavar="ROWSxCONTEXT",
        default=["1x512", "1x2048", "1x8192", "8x512", "8x2048", "8x8192", "32x512", "32x2048"],
    )  # fmt: skip
    parser.add_argument(
        "--chunks", nargs="*", metavar="TOKENSxCONTEXT", default=["8x0", "64x2048", "512x0", "512x1536"]
    )
    parser.add_argument("--rounds", type=int, default=12, metavar="N")
    parser.add_argument("--narrow", choices=INSTRUCTION_SETS, help="use no instructions wider than these")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def cells_of(decode: Sequence[str], chunks: Sequence[str]) -> list[Cell]:
    """As they are written. Raises InvalidInput."""
    rows = [Cell(Point(chunk=0, rows=count), context) for count, context in map(_pair, decode)]
    return rows + [Cell(Point(chunk=tokens, rows=0), context) for tokens, context in map(_pair, chunks)]


def _pair(written: str) -> tuple[int, int]:
    count, x, context = written.partition("x")
    if not (x and count.isdecimal() and context.isdecimal() and int(count)):
        raise InvalidInput(f"{written!r} is no cell: write 8x512, or 512x0 for a chunk", param="decode")
    return int(count), int(context)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    narrow(options.narrow)
    import torch

    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings
    from kvcommons.model.spec import ModelSpec

    cells = cells_of(options.decode, options.chunks)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        model = write_random_model(Path(name), options.random_model, progress)
        progress("measuring what the machine can do")
        read, product = host_rates()
        rates = Rates(read_bytes_s=read, product_flop_s=product)
        progress("loading the model")
        core = load_core(
            EngineSettings(
                model=str(model), threads=options.threads, block_tokens=BLOCK_TOKENS,
                capacity_tokens=sum(cell.room_tokens for cell in cells) + BLOCK_TOKENS,
            )
        )  # fmt: skip
        taken_s = measure(core, cells, options.rounds, progress)
        spec = ModelSpec.read(model)
    where = f"{options.threads} threads{named(options.narrow)}"
    title = f"{options.random_model}, bfloat16, {where}; {in_words([rates])}"
    return summarise(title, spec, rates, taken_s)


def measure(
    core: Core, cells: Sequence[Cell], rounds: int, progress: Progress
) -> dict[Cell, list[dict[str, float]]]:
    """Seconds of each part, of each of a cell's iterations; cells take turns."""
    import torch

    from benchmarks.parted_slices import parts_of

    taken_s: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    with torch.inference_mode():
        core.memory.tensor.normal_()
        made = {
            cell: MixedIterations(core, cell.context, cell.point.chunk, cell.point.rows) for cell in cells
        }
        for round_ in range(_UNCOUNTED + rounds):
            progress(f"round {round_ + 1} of {_UNCOUNTED + rounds}")
            for cell in cells:
                parts_s = parts_of(core.model, partial(made[cell].run, cell.point))
                if round_ >= _UNCOUNTED:
                    taken_s[cell].append(parts_s)
    return taken_s


def summarise(
    title: str, spec: ModelSpec, rates: Rates, taken_s: dict[Cell, list[dict[str, float]]]
) -> Report:
    """Medians. "of the bound": what the least time is of what was taken."""
    rows: list[Row] = []
    for cell, iterations in taken_s.items():
        least = bound(spec, rates, cell.rows)
        generates = cell.point.rows > 0  # else nothing is sampled
        least_s = {
            "matrices": least.matrices_s,
            "attention": least.attention_s,
            "head": least.head_s if generates else 0.0,
        }
        whole_s = median(sum(parts.values()) for parts in iterations)
        row: dict[str, str | int | float] = {"cell": cell.name, "ms": whole_s * 1e3}
        row["of the bound"] = sum(least_s.values()) / whole_s
        for part in PARTS:
            row[f"{part}, ms"] = median(parts[part] for parts in iterations) * 1e3
            if part in least_s:
                row[f"{part} at least, ms"] = least_s[part] * 1e3
        rows.append(row)
    ratios = {str(row["cell"]): float(row["of the bound"]) for row in rows}
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    groups = [
        (str(row["cell"]), [(part, float(row[f"{part}, ms"])) for part in PARTS]) for row in report.rows
    ]
    panels(path, report.title, groups, "ms")
