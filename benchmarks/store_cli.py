"""`kvcommons bench hits` and `kvcommons bench store-cost`: when the store is worth it, and what it costs."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import hits, store_cost
from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.report import Report
from benchmarks.session_stack import StackSetting
from benchmarks.sessions import Workload

Progress = Callable[[str], None]
ANSWER_TOKENS = 8  # of each turn of `hits`


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    found = commands.add_parser(
        "hits", help="as decided against computed and against loaded, over lengths of the history"
    )
    found.add_argument(
        "--histories", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384], metavar="N", help="tokens"
    )
    found.add_argument("--new", type=int, default=64, metavar="N", help="new tokens a turn")
    found.add_argument("--sessions", type=int, default=8, metavar="N", help="turns of each kind")
    found.set_defaults(run=_hits, draw=_draw_hits)
    cost = commands.add_parser("store-cost", help="what saving costs where nothing is reused")
    cost.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens")
    cost.add_argument("--answer", type=int, default=32, metavar="N", help="tokens")
    cost.add_argument("--pairs", type=int, default=24, metavar="N")
    cost.set_defaults(run=_store_cost, draw=_draw_store_cost)
    for parser in (found, cost):
        parser.add_argument("--random-model", metavar="SIZE", default="246m", help="random weights")
        parser.add_argument("--block-tokens", type=int, default=16, metavar="N")
        add_outputs(parser)


def _setting(options: argparse.Namespace, folder: Path, model: Path) -> StackSetting:
    return StackSetting(folder=folder, model=str(model), dtype="bfloat16", block_tokens=options.block_tokens)


def _hits(options: argparse.Namespace, progress: Progress) -> Report:
    by_history = {}
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        grown = 3 * (options.new + ANSWER_TOKENS)
        model = write_random_model(
            folder, options.random_model, progress, window_tokens=max(options.histories) + grown
        )
        for history in options.histories:

            def tell(text: str, history: int = history) -> None:
                progress(f"{history} tokens: {text}")

            workload = Workload(
                history_tokens=history,
                new_tokens=options.new,
                answer_tokens=ANSWER_TOKENS,
                turns=1,
                sessions=options.sessions,
                concurrency=1,
            )
            setting = _setting(options, folder / str(history), model)
            by_history[history] = hits.take_trials(setting, workload, tell)
    return hits.summarise(f"{options.random_model}: hits against computing and loading", by_history)


def _draw_hits(path: Path, report: Report) -> None:
    groups = [
        (str(row["history"]), [(how, float(row[f"{how} TTFT ms"])) for how in ("hit", "computed", "loaded")])
        for row in report.rows
    ]
    panels(path, report.title, groups, "milliseconds to the first token (medians)")


def _store_cost(options: argparse.Namespace, progress: Progress) -> Report:
    workload = Workload(
        history_tokens=options.prompt,
        new_tokens=64,
        answer_tokens=options.answer,
        turns=1,
        sessions=1,
        concurrency=1,
    )
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        model = write_random_model(folder, options.random_model, progress)
        setting = _setting(options, folder / "stack", model)
        write = setting.writer()
        progress("starting the stack")
        with setting.stack(workload) as stack:
            pairs = store_cost.measure(
                stack,
                write,
                pairs=options.pairs,
                prompt_tokens=options.prompt,
                answer_tokens=options.answer,
                progress=progress,
            )
    title = f"{options.random_model}: prompts of {options.prompt} tokens, answers of {options.answer}"
    return store_cost.summarise(title, pairs)


def _draw_store_cost(path: Path, report: Report) -> None:
    groups = [
        (figure, [(str(row["how"]), float(row[figure])) for row in report.rows])
        for figure in ("CPU ms", "wall ms")
    ]
    panels(path, report.title, groups, "milliseconds a turn (medians)")
