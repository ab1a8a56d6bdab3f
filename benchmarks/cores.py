"""Prefill and decode on the same cores: one after the other with all of them (`core_lock`), or at the same
time with the cores divided by the processes, as `kvcommons up` did before.

Two stacks of one model run beside each other, and only one is asked at a time; which goes first alternates
from round to round. A prompt by itself, an answer by itself, and an answer while prompts come one after
another.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50, p99
from benchmarks.store_cost import cpu_by_process_s
from benchmarks.streams import ask, prompt
from devstack.running import RunningStack

Progress = Callable[[str], None]
WARM_UP = 1  # rounds that count for nothing
BLOCK_TOKENS = 16
FIGURES = ("prompt alone ms", "token alone ms", "prompt beside ms", "token beside p50 ms")


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "cores", help="prefill and decode on the same cores: one after the other, or with the cores divided"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens")
    parser.add_argument("--beside", type=int, default=3, metavar="N", help="prompts beside an answer")
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        model = write_random_model(folder, options.random_model, progress)
        progress("starting two stacks")
        with (
            _stack(folder / "locked", model, options, core_lock=True) as locked,
            _stack(folder / "divided", model, options, core_lock=False) as divided,
        ):
            stacks = {"one after the other": locked, "cores divided": divided}
            rounds: dict[str, list[dict[str, float]]] = {how: [] for how in stacks}
            for number in range(WARM_UP + options.rounds):
                progress(f"round {number + 1} of {WARM_UP + options.rounds}")
                for how in list(stacks) if number % 2 else reversed(list(stacks)):
                    figures = _round(stacks[how], options, number)
                    if number >= WARM_UP:
                        rounds[how].append(figures)
    return _summarise(f"{options.random_model}: prompts of {options.prompt} tokens", rounds)


def _stack(folder: Path, model: Path, options: argparse.Namespace, *, core_lock: bool) -> RunningStack:
    capacity = 8 * (options.prompt + options.answer + (options.beside + 1) * options.prompt)
    engine = {"block_tokens": BLOCK_TOKENS, "capacity_tokens": capacity}
    tables = {"up": {"core_lock": core_lock}, "prefill": engine, "decode": engine}
    return RunningStack(folder, tables=tables, model=str(model), attention_pool=0)


def _round(stack: RunningStack, options: argparse.Namespace, number: int) -> dict[str, float]:
    """Prompts that share nothing with any other."""
    client, seed = stack.client, 1000 * number
    cpu_s, began_s = sum(cpu_by_process_s(stack).values()), time.monotonic()
    alone = ask(client, prompt(seed, options.prompt), 2)
    answer = ask(client, prompt(seed + 1, BLOCK_TOKENS), options.answer)
    long_answer = options.answer * (options.beside + 1)
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(ask, client, prompt(seed + 2, BLOCK_TOKENS), long_answer)
        firsts_s = [
            ask(client, prompt(seed + 3 + beside, options.prompt), 2).first_s
            for beside in range(options.beside)
        ]
        gaps_s = running.result().gaps_s()
    return {
        "prompt alone ms": alone.first_s * 1e3,
        "token alone ms": p50(answer.gaps_s()) * 1e3,
        "prompt beside ms": p50(firsts_s) * 1e3,
        "token beside p50 ms": p50(gaps_s) * 1e3,
        "token beside p99 ms": p99(gaps_s) * 1e3,
        "wall s": time.monotonic() - began_s,
        "CPU s": sum(cpu_by_process_s(stack).values()) - cpu_s,
    }


def _summarise(title: str, rounds: Mapping[str, list[dict[str, float]]]) -> Report:
    """Ratios are medians over rounds, one after the other over divided."""
    rows: list[Row] = [
        {"how": how, "rounds": len(made), **{name: p50([one[name] for one in made]) for name in made[0]}}
        for how, made in rounds.items()
    ]
    locked, divided = rounds.values()
    ratios = {
        name: p50([one[name] / other[name] for one, other in zip(locked, divided, strict=True)])
        for name in locked[0]
    }
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    groups = [(name, [(str(row["how"]), float(row[name])) for row in report.rows]) for name in FIGURES]
    panels(path, report.title, groups, "milliseconds (medians)")
