"""`kvcommons bench trade-off`: the first token of a long prompt against the tokens of those beside it, by the
length of chunks and the number of holders (Mnemosyne, figures 18 and 19).

What an iteration costs is measured: one process computes chunks, and rows beside them, from which the
engine's predictor learns; what a layer takes to ask a holder is measured at a real pool. Iterations over
several holders are put together from that by the paper's law (equation 10): attention is divided by the
holders, which have devices of their own, and what is no attention stays, with the asking added. So are those
over holders that join while the prompt is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import kv_parallel
from benchmarks.plot import Curves, curves
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50, p99
from kvcommons.engine.chunk_budget import LEAST_TOKENS, ChunkBudget
from kvcommons.engine.iteration_costs import IterationCosts, IterationWork

if TYPE_CHECKING:
    from kvcommons.engine.core import Core

Progress = Callable[[str], None]
BLOCK_TOKENS = 64
ADAPTIVE = "adaptive"
JOINING = "joining"
_CALIBRATED_S = 60.0
_ASKED_CONTEXT = 1024  # of the layer whose asking is measured


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "trade-off", help="a long prompt's first token against tokens beside it, by chunks and holders"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1 << 17, 1 << 20], metavar="TOKENS")
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 128, 512, 2048, 4096], metavar="TOKENS")
    parser.add_argument("--holders", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="that generate beside the prompt")
    parser.add_argument("--row-context", type=int, default=1024, metavar="TOKENS", help="of each")
    parser.add_argument("--objective", type=float, default=2.0, metavar="S", help="of chunks that adapt")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldersCosts:
    """`costs`: of an iteration in one process. `asked_s`: what asking holders adds in all layers. `rows` that
    generate are in each, with so many bytes of KV here. From the first to the last of a prompt's tokens there
    are `holders`; where they join, another one for each `share` tokens, up to so many."""

    costs: IterationCosts
    asked_s: float
    rows: int
    rows_bytes: int
    holders: int
    share: int | None = None
    error: float = field(default=0.0, init=False)  # as a predictor has it: what is put together has none

    def at(self, tokens: int) -> int:
        """Holders of a prompt's first `tokens`."""
        return self.holders if self.share is None else min(self.holders, 1 + (tokens - 1) // self.share)

    @property
    def beside(self) -> IterationWork:
        return IterationWork(rows=self.rows, read_bytes=self.rows_bytes)

    def seconds(self, work: IterationWork) -> float:
        """Of an iteration whose one chunk ends where its pairs say."""
        chunk = work.rows - self.rows
        end = round(work.pairs / chunk + (chunk - 1) / 2) if chunk else 1
        holders, attention_s = self.at(end), self.costs.of_one("pairs") * work.pairs
        asked_s = self.asked_s if holders > 1 else 0.0
        return self.costs.seconds(work) - attention_s + attention_s / holders + asked_s

    def knows(self, work: IterationWork) -> bool:
        """All is put together."""
        return True


def iterations(
    over: HoldersCosts, context: int, chunk_tokens: int, objective_s: float = float("inf")
) -> list[tuple[int, float]]:
    """Of a prompt of so many tokens: where each chunk ends, and what its iteration takes. `chunk_tokens`: of
    each, or at most, where they adapt to an objective."""
    first, found = 0, list[tuple[int, float]]()
    while first < context:
        budget = ChunkBudget(over, over.beside, objective_s=objective_s, chunk_tokens=chunk_tokens)
        stop = first + budget.fit(first, min(chunk_tokens, context - first))
        work = over.beside.beside(IterationWork.of_chunk(range(first, stop)))
        found.append((stop, over.seconds(work)))
        first = stop
    return found


def dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether another one is as good in one regard and better in the other."""
    return [
        any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points) for one in points
    ]


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    with tempfile.TemporaryDirectory(prefix="kvc-") as name:
        costs, layers, token_bytes = _costs(Path(name), options, progress)
        asked_s = layers * _asked_s(Path(name), progress)
    rows: list[Row] = []
    beside = {"rows": options.rows, "rows_bytes": options.rows * options.row_context * token_bytes}
    for context in options.contexts:
        some: list[Row] = []
        for holders in options.holders:
            over = HoldersCosts(costs=costs, asked_s=asked_s, holders=holders, **beside)
            some += [_row(over, context, chunk, None) for chunk in options.chunks]
            some.append(_row(over, context, max(options.chunks), options.objective))
        worse = dominated([(float(row["first token s"]), float(row["token p99 ms"])) for row in some])
        rows += [{**row, "best": "" if lost else "yes"} for row, lost in zip(some, worse, strict=True)]
        share = -(-context // max(options.holders))
        over = HoldersCosts(costs=costs, asked_s=asked_s, holders=max(options.holders), share=share, **beside)
        rows += _timeline(over, context, max(options.chunks), options.objective)
    return Report(
        title=f"{options.random_model}: a prompt beside {options.rows} rows of {options.row_context} tokens; "
        f"asking {layers} layers takes {asked_s * 1e3:.1f} ms",
        ratios=_ratios(rows),
        rows=rows,
    )


def _costs(folder: Path, options: argparse.Namespace, progress: Progress) -> tuple[IterationCosts, int, int]:
    """Of one process here; the model's layers, and a token's bytes of KV in all of them."""
    from kvcommons.engine.core import load_core
    from kvcommons.engine.settings import EngineSettings

    model = write_random_model(folder, options.random_model, progress)
    progress("loading the model")
    settings = EngineSettings(
        model=str(model), threads=options.threads, block_tokens=BLOCK_TOKENS,
        capacity_tokens=64 * BLOCK_TOKENS,
    )  # fmt: skip
    core = load_core(settings)
    progress(f"measuring iterations for up to {_CALIBRATED_S:.0f} s")
    return _learnt(core, options), core.layout.layers, core.layout.block_bytes // BLOCK_TOKENS


def _learnt(core: Core, options: argparse.Namespace) -> IterationCosts:
    from kvcommons.engine.calibration import Calibration
    from kvcommons.engine.predictor import Predictor

    predictor = Predictor()
    calibration = Calibration(core, chunk_tokens=max(options.chunks), generates=True)
    calibration.run(predictor, seconds_max=_CALIBRATED_S)
    return predictor.costs


def _asked_s(folder: Path, progress: Progress) -> float:
    """Of one layer, beside the attention that a holder computes."""
    setting = kv_parallel.Setting(contexts=(_ASKED_CONTEXT,), holders=(1,), queries=(LEAST_TOKENS,), rounds=8)
    (row,) = asyncio.run(kv_parallel.measure(folder, setting, progress))
    return float(row["not attention"]) / 1e3


def _row(over: HoldersCosts, context: int, chunk: int, objective_s: float | None) -> Row:
    made = iterations(over, context, chunk, objective_s or float("inf"))
    seconds = [one for _, one in made]
    return {
        "context": context,
        "holders": str(over.holders),
        "chunks": f"{ADAPTIVE}, {objective_s:g} s" if objective_s else str(chunk),
        "iterations": len(made),
        "first token s": sum(seconds),
        "token p50 ms": p50(seconds) * 1e3,
        "token p99 ms": p99(seconds) * 1e3,
    }


def _timeline(over: HoldersCosts, context: int, chunk: int, objective_s: float) -> Iterator[Row]:
    """While holders join: what is between two of them."""
    made = iterations(over, context, chunk, objective_s)
    first = 0
    for holders in range(1, over.holders + 1):
        some = [one for one in made if over.at(one[0]) == holders]
        if not some:
            continue
        seconds = [one for _, one in some]
        yield {
            "context": context,
            "holders": f"{JOINING}: {holders}",
            "chunks": f"{(some[-1][0] - first) / len(some):.0f} on average",
            "iterations": len(some),
            "first token s": sum(seconds),
            "token p50 ms": p50(seconds) * 1e3,
            "token p99 ms": p99(seconds) * 1e3,
            "best": "",
        }
        first = some[-1][0]


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    """What the most holders make of the first token, and of the tokens beside, with the longest chunks and
    with the shortest."""
    found: dict[str, float] = {}
    plain = [row for row in rows if str(row["holders"]).isdigit() and str(row["chunks"]).isdigit()]
    for context in sorted({int(row["context"]) for row in plain}):
        some = [row for row in plain if row["context"] == context]
        few, many = (by(int(row["holders"]) for row in some) for by in (min, max))
        for chunk in dict.fromkeys(by(int(row["chunks"]) for row in some) for by in (min, max)):
            one, other = (
                next(row for row in some if int(row["holders"]) == holders and int(row["chunks"]) == chunk)
                for holders in (few, many)
            )
            name = f"{context:,} tokens in chunks of {chunk}, {many} holders over {few}"
            found[f"{name}: first token"] = float(other["first token s"]) / float(one["first token s"])
            found[f"{name}: token p99"] = float(other["token p99 ms"]) / float(one["token p99 ms"])
    return found


def _draw(path: Path, report: Report) -> None:
    curves(path, report.title, list(_groups(report.rows)), columns=2)


def _groups(rows: Sequence[Row]) -> Iterator[Curves]:
    for context in sorted({int(row["context"]) for row in rows}):
        some = [row for row in rows if row["context"] == context and str(row["holders"]).isdigit()]
        lines = {
            f"{holders} holders": [
                (float(row["token p99 ms"]) / 1e3, float(row["first token s"]))
                for row in some
                if row["holders"] == holders and str(row["chunks"]).isdigit()
            ]
            for holders in dict.fromkeys(str(row["holders"]) for row in some)
        }
        yield f"{context:,} tokens", "first token over p99 between tokens, s", lines
