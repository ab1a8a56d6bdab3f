"""`kvcommons bench mixed-iterations`: chunks of a prompt beside rows that generate (Mnemosyne, section 6.5).

An iteration with a chunk of 32 to 4,096 tokens beside 0 to 128 rows of 1,024 tokens of context each (figure
22), what the engine's predictor says of it before it has seen it, and how much of the machine's peak is used
by chunks alone (MFU, figure 20) and of its bandwidth by rows alone (MBU, figure 21). Both limits are measured
beside it, between the iterations.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.holders import CALL_S, decoded
from benchmarks.limits import PRODUCT_SIZE, device_rates, product_flop_s, read_memory
from benchmarks.plot import Curves, curves
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row

if TYPE_CHECKING:
    from kvcommons.engine.chunk_rows import InnerChunk
    from kvcommons.engine.core import Core
    from kvcommons.engine.iteration import Iteration
    from kvcommons.engine.iteration_costs import IterationWork
    from kvcommons.engine.predictor import Predictor
    from kvcommons.engine.slices import Slices
    from kvcommons.engine.token_rows import TokenRows

Progress = Callable[[str], None]
BLOCK_TOKENS = 64


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "mixed-iterations", help="chunks of a prompt beside rows that generate, measured and predicted"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 128, 512, 2048, 4096], metavar="N")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N", help="rows")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens before each")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="the first three are for learning")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="as torch names it")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """What is in an iteration; one of both may be 0."""

    chunk: int
    rows: int


@dataclass(slots=True)
class Measured:
    """Seconds of a point's iterations, and for each what was expected of it."""

    taken_s: list[float] = field(default_factory=list)
    expected_s: list[float] = field(default_factory=list)


_LEARNT_IN = 3  # rounds


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings

    points = sorted(
        Point(chunk, rows)
        for chunk, rows in itertools.product([0, *options.chunks], [0, *options.batch])
        if chunk or rows
    )
    capacity = max(options.batch) * (options.context + BLOCK_TOKENS) + options.context + max(options.chunks)
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        model = write_random_model(Path(name), options.random_model, progress)
        progress("loading the model")
        core = load_core(
            EngineSettings(
                model=str(model), device=options.device, threads=options.threads,
                block_tokens=BLOCK_TOKENS,
                capacity_tokens=capacity + 4 * BLOCK_TOKENS,
            )
        )  # fmt: skip
        machine = _Machine(core, model)
        measured = _measure(core, points, options, machine, progress)
    return summarise(
        f"{options.random_model}: iterations of a chunk beside rows of {options.context} tokens", measured,
        machine,
    )  # fmt: skip


def _measure(
    core: Core, points: Sequence[Point], options: argparse.Namespace, machine: _Machine, progress: Progress
) -> dict[Point, Measured]:
    import torch

    from kvcommons.engine.predictor import Predictor

    found: dict[Point, Measured] = {point: Measured() for point in points}
    predictor, order = Predictor(), random.Random(0)
    with torch.inference_mode():
        core.memory.tensor.normal_()
        mixed = MixedIterations(core, options.context, max(options.chunks), max(options.batch))
        for round_ in range(options.rounds):
            progress(f"round {round_ + 1} of {options.rounds}")
            for point in order.sample(points, len(points)):
                work, seconds, expected_s = mixed.iterate(point, predictor)
                if round_ >= _LEARNT_IN:
                    found[point].taken_s.append(seconds)
                    found[point].expected_s.append(expected_s)
                    machine.count(point, work, seconds)
            machine.measure()
    return found


class MixedIterations:
    """Makes iterations: a chunk of one sequence, behind `context` tokens, and one row of each of others with
    as many tokens. No iteration changes what the next one finds."""

    def __init__(self, core: Core, context: int, chunk_max: int, rows_max: int) -> None:
        from kvcommons.engine.remote.attention import RemoteAttention
        from kvcommons.engine.sequence import LocalRun
        from kvcommons.holder.budget import AttentionBudget

        self._core = core
        self._context = context
        self._remote = RemoteAttention(core.layout, core.backend, AttentionBudget(1.0))
        self._prompt = core.allocator.allocate(core.layout.blocks_of(context + chunk_max))
        self._sequences = []
        for key in range(rows_max):
            blocks = core.allocator.allocate(core.layout.blocks_of(context + 1))
            run = LocalRun(first_block=0, blocks=blocks)
            sequence = decoded(core, key + 1, context, 1 << 30, [run])
            sequence.start(1)
            self._sequences.append(sequence)

    def iterate(self, point: Point, predictor: Predictor) -> tuple[IterationWork, float, float]:
        """What was in it, the seconds that it took, and those that were expected."""
        iteration = self.run(point)
        work, seconds = iteration.work, iteration.timing.own_s
        expected_s = predictor.seconds(work)
        predictor.learn(work, seconds)
        return work, seconds, expected_s

    def run(self, point: Point, slices: Slices | None = None) -> Iteration:
        """One, after it has run. Raises what it failed with."""
        from kvcommons.engine.chunk_rows import InnerChunk
        from kvcommons.engine.iteration import Iteration

        groups: list[TokenRows | InnerChunk] = []
        if point.rows:
            groups.append(self._token_rows(point.rows))
        if point.chunk:
            chunk = range(self._context, self._context + point.chunk)
            groups.append(InnerChunk(self._core, chunk, self._prompt))
        iteration = Iteration(self._core, groups, slices)
        iteration.run()
        for error in iteration.failures.values():
            raise error
        return iteration

    def _token_rows(self, count: int) -> TokenRows:
        from kvcommons.engine.batch import Batch
        from kvcommons.engine.token_rows import TokenRows

        core = self._core
        batch = Batch(self._sequences[:count], core.block_tokens, core.backend)
        return TokenRows(core, self._remote, batch, CALL_S)


class _Machine:
    """What this machine can do at most, and how much of it iterations of one kind used."""

    def __init__(self, core: Core, folder: Path) -> None:
        from kvcommons.model.spec import ModelSpec
        from kvcommons.model.weights import tensor_shapes

        self._core = core
        shapes = tensor_shapes(ModelSpec.read(folder))
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
        self._layers = sum(size for name, size in sizes.items() if ".layers." in name)
        self._head = next(size for name, size in sizes.items() if "lm_head" in name or "embed" in name)
        self._peaks: list[float] = []
        self._read: list[float] = []
        self.flop_s: dict[int, list[float]] = {}  # by the chunk's tokens
        self.bytes_s: dict[int, list[float]] = {}  # by rows

    @property
    def peak_flop_s(self) -> float:
        return max(self._peaks)

    @property
    def peak_bytes_s(self) -> float:
        return max(self._read)

    def count(self, point: Point, work: IterationWork, seconds: float) -> None:
        """Products of a chunk with all matrices but the head, and its attention with causality; matrices and
        KV that rows read. Of iterations of one kind only."""
        layout = self._core.layout
        if not point.rows:
            attention = 4 * work.pairs * layout.query_heads * layout.head_dim * layout.layers
            flop = 2 * point.chunk * self._layers + attention
            self.flop_s.setdefault(point.chunk, []).append(flop / seconds)
        if not point.chunk:
            weights = (self._layers + self._head) * self._core.memory.tensor.element_size()
            self.bytes_s.setdefault(point.rows, []).append((weights + work.read_bytes) / seconds)

    def measure(self) -> None:
        """The peaks, now."""
        if not self._core.backend.device.host:
            read, product = device_rates(str(self._core.memory.tensor.device))
            self._read.append(read)
            self._peaks.append(product)
            return
        self._peaks.append(product_flop_s(PRODUCT_SIZE))
        began_s = time.monotonic()
        read_memory(self._core)
        self._read.append(self._core.memory.tensor.nbytes / (time.monotonic() - began_s))


def summarise(title: str, measured: dict[Point, Measured], machine: _Machine) -> Report:
    """Medians. `over alone`: what the rows add to the chunk's iteration, and the chunk to nothing."""
    taken_s = {point: statistics.median(one.taken_s) for point, one in measured.items()}
    rows: list[Row] = []
    errors: list[float] = []
    for point, one in measured.items():
        off = [abs(expected / taken - 1) for expected, taken in zip(one.expected_s, one.taken_s, strict=True)]
        errors += off
        row: dict[str, str | int | float] = {
            "chunk": point.chunk,
            "rows": point.rows,
            "ms": taken_s[point] * 1e3,
            "predicted ms": statistics.median(one.expected_s) * 1e3,
            "error": statistics.mean(off),
        }
        if point.chunk and point.rows:
            row["over the chunk alone"] = taken_s[point] / taken_s[Point(point.chunk, 0)]
        elif point.chunk:
            row["MFU"] = statistics.median(machine.flop_s[point.chunk]) / machine.peak_flop_s
        else:
            row["MBU"] = statistics.median(machine.bytes_s[point.rows]) / machine.peak_bytes_s
        rows.append(row)
    ratios = {
        "mean absolute error of the predictor": statistics.mean(errors),
        "peak of products, GFLOP/s": machine.peak_flop_s / 1e9,
        "peak of reading, GB/s": machine.peak_bytes_s / 1e9,
    }
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    curves(path, report.title, list(_groups(report.rows)), columns=2)


def _groups(rows: Sequence[Row]) -> Iterator[Curves]:
    for count in sorted({int(row["rows"]) for row in rows}):
        of_count = [row for row in rows if row["rows"] == count and row["chunk"]]
        lines = {
            label: [(float(row["chunk"]), float(row[label])) for row in of_count]
            for label in ("ms", "predicted ms")
        }
        yield f"chunks of so many tokens, beside {count} rows", "ms", lines
