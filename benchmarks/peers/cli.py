"""`kvcommons bench peers`: one server after the other answers the same requests, cell by cell; beside each
cell stands the least time that this machine could take.

In each round every server is asked once, and who is first changes from round to round; ratios are of one
round. All servers run all the time, and those that are not asked rest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.limits import device_rates, host_rates
from benchmarks.peers import instruction_sets
from benchmarks.peers.bounds import Rates, in_words, kv_token_bytes
from benchmarks.peers.grid import Cell, grid, kv_tokens
from benchmarks.peers.named import RunningServer, add_peer_options, peer_servers
from benchmarks.peers.servers import Sizes
from benchmarks.plot import panels
from benchmarks.random_model import chosen_model
from benchmarks.report import Report, Row, geometric, p50
from devstack.running import RunningStack
from kvcommons.errors import InvalidInput, KVCommonsError, Unavailable
from kvcommons.model.spec import ModelSpec

Progress = Callable[[str], None]
OWN = "kvcommons"
WARM_UP = 1  # rounds that count for nothing
_GPU_CHUNK_TOKENS = 4096  # a GPU is not busy with fewer
_GPU_WAIT_SCALE = 5.0  # of larger models, whose kernels are compiled when they start
_DRAM_BYTES_MIN, _DRAM_BYTES_MAX = 1 << 20, 32 << 30  # the kvstore takes no less


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "peers", help="prefill, decode and cached prompts beside vLLM and llama.cpp, and what bounds them"
    )
    parser.add_argument("--model", metavar="DIR", help="a Llama in bfloat16; default: smollm2, fetched once")
    parser.add_argument("--random-model", metavar="SIZE", help="random weights instead: 7m, 34m, 246m or 8b")
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="as torch names it; with cuda, one process has it all"
    )
    add_peer_options(parser)
    parser.add_argument(
        "--cells",
        type=int,
        nargs="+",
        metavar="N",
        help="of the table, from 1; default: all that fit the model",
    )
    parser.add_argument(
        "--answer", type=int, default=64, metavar="N", help="tokens, where decoding is measured"
    )
    parser.add_argument("--rounds", type=int, default=6, metavar="N")
    parser.add_argument(
        "--pause", type=float, default=1.5, metavar="S", help="before each measurement (default: 1.5)"
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="of each server"
    )
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    instruction_sets.narrow(options.narrow)
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name, ExitStack() as running:
        folder = Path(name)
        model, what = chosen_model(options, folder, progress)
        spec = ModelSpec.read(model)
        cells = _chosen(grid(spec.context_window, options.answer), options.cells)
        progress("measuring what the machine can do")
        measured: list[Rates] = []

        def rates() -> Rates:
            # Of a GPU once, before servers have its memory.
            if options.device == "cpu" or not measured:
                measured.append(_rates(options))
            return measured[-1]

        rates()
        sizes = _sizes(cells, spec, options)
        progress("starting the stack")
        servers: dict[str, RunningServer] = {
            OWN: running.enter_context(_stack(folder / "stack", model, sizes))
        }
        servers |= peer_servers(options, model, sizes, folder, running=running, progress=progress)
        compare = partial(_compare, servers, spec=spec, rates=rates, options=options, progress=progress)
        rows = [_row(cell, compare) for cell in cells]
    title = f"{what}, bfloat16, {_where(options)}; {in_words(measured)}"
    ratios = {
        str(row["cell"]): float(row["over the better peer"]) for row in rows if "over the better peer" in row
    }
    return Report(title=title, ratios=ratios, rows=rows)


def _chosen(cells: Sequence[Cell], numbers: Sequence[int] | None) -> list[Cell]:
    if numbers is None:
        return list(cells)
    if not all(1 <= number <= len(cells) for number in numbers):
        raise InvalidInput(f"--cells: there are 1 to {len(cells)} with this model", param="cells")
    return [cells[number - 1] for number in numbers]


def _where(options: argparse.Namespace) -> str:
    if options.device == "cpu":
        return f"{options.threads} threads{instruction_sets.named(options.narrow)}"
    from kvcommons.backend.choice import device_name

    return device_name(options.device)


def _rates(options: argparse.Namespace) -> Rates:
    import torch

    torch.set_num_threads(options.threads)
    read, product = host_rates() if options.device == "cpu" else device_rates(options.device)
    return Rates(read_bytes_s=read, product_flop_s=product)


def _sizes(cells: Sequence[Cell], spec: ModelSpec, options: argparse.Namespace) -> Sizes:
    tokens = kv_tokens(cells)
    return Sizes(
        kv_tokens=tokens,
        kv_bytes=tokens * kv_token_bytes(spec),
        threads=options.threads,
        sequences=max(8, *(cell.batch for cell in cells)),
        window_tokens=spec.context_window,
        device=options.device,
        narrow=options.narrow,
    )


def _stack(folder: Path, model: Path, sizes: Sizes) -> RunningStack:
    engine: dict[str, int | str] = {"capacity_tokens": sizes.kv_tokens, "threads": sizes.threads}
    on_gpu = sizes.device != "cpu"
    if on_gpu:
        engine |= {"device": sizes.device, "chunk_tokens": _GPU_CHUNK_TOKENS}
    tables: dict[str, dict[str, int | str]] = {
        "prefill": engine,
        # Each round has the answers of the one before, which drafts would foretell: they have a benchmark
        # of their own.
        "decode": {**engine, "max_batch": sizes.sequences, "max_draft_tokens": 0},
        "kvstore": {"dram_bytes": min(max(sizes.kv_bytes, _DRAM_BYTES_MIN), _DRAM_BYTES_MAX)},
    }
    stack = RunningStack(folder, tables=tables, model=str(model), attention_pool=0, colocated=on_gpu)
    stack.wait_scale = _GPU_WAIT_SCALE if on_gpu else 1.0
    return stack


def _row(cell: Cell, compare: Callable[[Cell], Row]) -> Row:
    """A cell that a server does not manage takes nothing from the others."""
    try:
        return compare(cell)
    except KVCommonsError as error:
        return {"cell": cell.name, "not measured": str(error)}


def _compare(
    servers: dict[str, RunningServer],
    cell: Cell,
    *,
    spec: ModelSpec,
    rates: Callable[[], Rates],
    options: argparse.Namespace,
    progress: Progress,
) -> Row:
    """`rates`: what the machine can do just now, asked in each round: a virtual one's changes."""
    names = list(servers)
    taken_s: dict[str, list[float]] = {name: [] for name in names}
    bounds_s: list[float] = []
    for name in names:
        progress(f"{cell.name}: {name} sees its prompts")
        with _named(name):
            cell.prepare(servers[name].client)
    for number in range(WARM_UP + options.rounds):
        progress(f"{cell.name}: round {number + 1} of {WARM_UP + options.rounds}")
        if number >= WARM_UP:
            bounds_s.append(cell.bound_s(spec, rates()))
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(options.pause)
            with _named(name):
                seconds = cell.measure(servers[name], _serial(cell, number))
            if number >= WARM_UP:
                taken_s[name].append(seconds)
    own_s = taken_s[OWN]
    row: dict[str, str | int | float] = {"cell": cell.name}
    for name in names:
        row[f"{name}, ms"] = p50(taken_s[name]) * 1e3
        row[f"{name}, tokens/s"] = cell.made_tokens / p50(taken_s[name])
    row["bound, ms"] = p50(bounds_s) * 1e3
    row["of the bound"] = p50([bound_s / taken_s for bound_s, taken_s in zip(bounds_s, own_s, strict=True)])
    peers = [name for name in names if name != OWN]
    if peers:
        better = min(peers, key=lambda name: p50(taken_s[name]))
        ratio, factor = geometric([peer / own for peer, own in zip(taken_s[better], own_s, strict=True)])
        row["better peer"] = better
        row["over the better peer"], row["low"], row["high"] = ratio, ratio / factor, ratio * factor
    return row


@contextmanager
def _named(server: str) -> Iterator[None]:
    """An error in it says whose it is."""
    try:
        yield
    except KVCommonsError as error:
        raise Unavailable(f"{server}: {error}") from error


def _serial(cell: Cell, number: int) -> int:
    """Of the cell's new prompt in this round; all servers get the same one."""
    return 100_000 * cell.tokens + 1000 * cell.new + number


def _draw(path: Path, report: Report) -> None:
    measured = [row for row in report.rows if "over the better peer" in row]
    groups = [
        (
            "over the better peer",
            [(str(row["cell"]), float(row["over the better peer"])) for row in measured],
        ),
        (
            "of the bound",
            [(str(row["cell"]), float(row["of the bound"])) for row in report.rows if "of the bound" in row],
        ),
    ]
    panels(path, report.title, [group for group in groups if group[1]], "speed, as a ratio")
