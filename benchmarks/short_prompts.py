"""Who computes short prompts: prefill processes, the decode process beside its tokens
(`max_local_prefill_tokens`), or one process with both roles (`kvcommons up --colocated`).

A stack of each way runs, and only one is asked at a time; which goes first changes from round to round. A
prompt by itself, and clients that each send the next prompt when they have their answer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50, p99
from benchmarks.store_cost import cpu_by_process_s
from benchmarks.streams import Stream, ask, prompt
from devstack.running import RunningStack

Progress = Callable[[str], None]
WAYS = ("separate", "local", "colocated")
WARM_UP = 1  # rounds that count for nothing
BLOCK_TOKENS = 16
FIGURES = ("alone ms", "first p50 ms", "first p99 ms", "token p50 ms", "token p99 ms")


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "short-prompts",
        help="computed by prefill, by decode beside its tokens, or by one process with both roles",
    )
    parser.add_argument("--model", metavar="DIR", help="instead of random weights")
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256], metavar="N", help="tokens")
    parser.add_argument("--answer", type=int, default=32, metavar="N", help="tokens")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--requests", type=int, default=3, metavar="N", help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name, ExitStack() as running:
        folder = Path(name)
        model = options.model or str(write_random_model(folder, options.random_model, progress))
        progress("starting three stacks")
        stacks = {way: running.enter_context(_stack(folder / way, model, options, way)) for way in WAYS}
        rounds: dict[tuple[int, str], list[dict[str, float]]] = {}
        for number in range(WARM_UP + options.rounds):
            progress(f"round {number + 1} of {WARM_UP + options.rounds}")
            for tokens in options.prompts:
                for turn in range(len(WAYS)):
                    way = WAYS[(turn + number) % len(WAYS)]
                    figures = _round(stacks[way], options, tokens, number)
                    if number >= WARM_UP:
                        rounds.setdefault((tokens, way), []).append(figures)
    what = Path(model).name if options.model else options.random_model
    return _summarise(f"{what}: {options.clients} clients, answers of {options.answer} tokens", rounds)


def _stack(folder: Path, model: str, options: argparse.Namespace, way: str) -> RunningStack:
    longest = max(options.prompts)
    # Room for twice what the clients have under way: nothing waits for memory.
    engine = {
        "block_tokens": BLOCK_TOKENS,
        "capacity_tokens": 2 * (options.clients + 1) * (longest + options.answer + BLOCK_TOKENS),
    }
    local = {"max_local_prefill_tokens": longest} if way == "local" else {}
    tables = {"prefill": engine, "decode": {**engine, **local}}
    if way == "colocated":
        del tables["prefill"]
    return RunningStack(folder, tables=tables, model=model, attention_pool=0, colocated=way == "colocated")


def _round(stack: RunningStack, options: argparse.Namespace, tokens: int, number: int) -> dict[str, float]:
    """Prompts that share nothing with any other."""
    client, seed = stack.client, 1000 * number + 100_000 * tokens
    alone_s = p50([ask(client, prompt(seed + one, tokens), 2).first_s for one in range(3)])
    cpu_s, began_s = sum(cpu_by_process_s(stack).values()), time.monotonic()

    def converse(one: int) -> list[Stream]:
        first = seed + 10 * (one + 1)
        return [ask(client, prompt(first + at, tokens), options.answer) for at in range(options.requests)]

    with ThreadPoolExecutor(max_workers=options.clients) as pool:
        streams = [stream for some in pool.map(converse, range(options.clients)) for stream in some]
    wall_s = time.monotonic() - began_s
    firsts_s = [stream.first_s for stream in streams]
    gaps_s = [gap for stream in streams for gap in stream.gaps_s()]
    return {
        "alone ms": alone_s * 1e3,
        "first p50 ms": p50(firsts_s) * 1e3,
        "first p99 ms": p99(firsts_s) * 1e3,
        "token p50 ms": p50(gaps_s) * 1e3,
        "token p99 ms": p99(gaps_s) * 1e3,
        "requests/s": len(streams) / wall_s,
        "CPU s": sum(cpu_by_process_s(stack).values()) - cpu_s,
    }


def _summarise(title: str, rounds: Mapping[tuple[int, str], list[dict[str, float]]]) -> Report:
    """Ratios are medians over rounds, each way's over that of separate processes in the same round."""
    rows: list[Row] = [
        {"prompt": tokens, "way": way, **{name: p50([one[name] for one in made]) for name in made[0]}}
        for (tokens, way), made in rounds.items()
    ]
    ratios = {
        f"{name} {way} {tokens}": p50(
            [one[name] / other[name] for one, other in zip(made, rounds[tokens, WAYS[0]], strict=True)]
        )
        for (tokens, way), made in rounds.items()
        if way != WAYS[0]
        for name in made[0]
    }
    rows.sort(key=lambda row: (int(row["prompt"]), WAYS.index(str(row["way"]))))
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    groups = [
        (name, [(f"{row['prompt']}, {row['way']}", float(row[name])) for row in report.rows])
        for name in FIGURES
    ]
    panels(path, report.title, groups, "milliseconds (medians)")
