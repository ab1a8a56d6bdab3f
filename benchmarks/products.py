"""`kvcommons bench products`: all matrices of a model once, as an iteration without attention has them,
against reading as much memory and against oneDNN's products.

With a few rows a product can be as fast as the weights are read, with many as fast as the processor
multiplies. Each round reads, multiplies with the kernel and multiplies with oneDNN, so that ratios are of
neighbours in time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.plot import panels
from benchmarks.random_model import chosen_model
from benchmarks.report import Report, Row, p50

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcommons.backend.interface import Matrix
    from kvcommons.model.spec import ModelSpec

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds, of neighbours in time."""

    read: float
    native: float
    onednn: float


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "products", help="a model's matrices against the memory's bandwidth and against oneDNN"
    )
    parser.add_argument("--model", metavar="DIR", help="default: smollm2, fetched once")
    parser.add_argument("--random-model", metavar="SIZE", help="random weights instead: 7m, 34m or 246m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 256], metavar="N")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    import torch

    from kvcommons.backend.memory import TORCH_DTYPES
    from kvcommons.model.spec import ModelSpec

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model, name = chosen_model(options, Path(folder), progress)
        spec = ModelSpec.read(model)
    bench = Matrices(spec, TORCH_DTYPES[options.dtype])
    found: dict[int, list[Round]] = {}
    for rows in options.rows:
        progress(f"{rows} rows")
        found[rows] = bench.measure(rows, options.rounds)
    title = (
        f"All matrices of {name} in {options.dtype}, {bench.size / 1e6:.0f} MB, {options.threads} threads, "
        f"{bench.multiplies}"
    )
    return summarise(title, bench.elements, found)


class Matrices:
    """Of all layers, and the head, with random weights; both forms of each."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        import torch

        from kvcommons.backend.choice import choose
        from kvcommons.backend.products import Products

        queries, kv = spec.query_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        layer = [(queries + 2 * kv, spec.hidden), (spec.hidden, queries)]
        layer += [(2 * spec.mlp, spec.hidden), (spec.hidden, spec.mlp)]
        shapes = [*layer * spec.layers, (spec.vocab_size, spec.hidden)]
        weights = [torch.randn(shape).mul_(0.02).to(dtype) for shape in shapes]
        self.elements = sum(weight.numel() for weight in weights)
        self.size = self.elements * dtype.itemsize
        self._dtype, self._inputs = dtype, [size for _, size in shapes]
        self._memory = torch.ones(self.size // 8, dtype=torch.int64)
        native, onednn = (choose(products=who).operators for who in (Products.NATIVE, Products.ONEDNN))
        self.multiplies = native.multiplies
        self._native = [native.pack(weight.clone()) for weight in weights]
        self._onednn = [onednn.pack(weight.clone()) for weight in weights]

    def measure(self, rows: int, rounds: int) -> list[Round]:
        """A round before them counts for nothing."""
        import torch

        from benchmarks.limits import read

        with torch.inference_mode():
            inputs = {size: torch.randn((rows, size)).to(self._dtype) for size in set(self._inputs)}
            given = [inputs[size] for size in self._inputs]
            return [
                Round(
                    read=_seconds(lambda: read(self._memory)),
                    native=_seconds(lambda: _multiply(self._native, given)),
                    onednn=_seconds(lambda: _multiply(self._onednn, given)),
                )
                for _ in range(rounds + 1)
            ][1:]


def _multiply(matrices: Sequence[Matrix], inputs: Sequence[Tensor]) -> None:
    for matrix, x in zip(matrices, inputs, strict=True):
        matrix(x)


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def summarise(title: str, elements: int, found: Mapping[int, Sequence[Round]]) -> Report:
    """Times are medians over rounds, and ratios medians of each round's. `elements`: of the matrices."""
    rows: list[Row] = [
        {
            "rows": count,
            "reading ms": 1e3 * p50([one.read for one in rounds]),
            "kernel ms": 1e3 * p50([one.native for one in rounds]),
            "oneDNN ms": 1e3 * p50([one.onednn for one in rounds]),
            "of reading %": 100 * p50([one.read / one.native for one in rounds]),
            "over oneDNN": p50([one.onednn / one.native for one in rounds]),
            "kernel GFLOP/s": 2 * count * elements / 1e9 / p50([one.native for one in rounds]),
        }
        for count, rounds in found.items()
    ]
    ratios = {
        "of_reading_most": max(float(row["of reading %"]) for row in rows) / 100,
        "over_onednn_least": min(float(row["over oneDNN"]) for row in rows),
    }
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    names = ("reading", "kernel", "oneDNN")
    groups = [
        (f"{row['rows']} rows", [(name, float(row[f"{name} ms"])) for name in names]) for row in report.rows
    ]
    panels(path, report.title, groups, "ms")
