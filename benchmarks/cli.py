"""`kvcommons bench …`: a progress line, a table, and with `--json` and `--picture` what others can read."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from benchmarks import (
    agents,
    attention,
    attention_store_cli,
    beside_prompt,
    borrow,
    chunk_attention,
    cores,
    first_token,
    fixed_time_cli,
    gpu,
    iteration_parts,
    kv_parallel,
    live_hits,
    long_context,
    mini_batches,
    mixed_iterations,
    offload,
    offload_figures,
    offload_plan,
    overlap_cli,
    partition,
    prefixes_cli,
    products,
    records,
    remote_attention,
    rotation,
    serve,
    settlement_cli,
    short_prompts,
    speculation,
    stages,
    store_cli,
    structured_outputs,
    trade_off,
    transport,
)
from benchmarks.peers import cli as peers
from benchmarks.plot import stacked_bars, stacked_times
from benchmarks.prompts import PromptWriter
from benchmarks.random_model import write_random_model
from benchmarks.report import Report
from benchmarks.session_stack import StackSetting, take_pairs, template_tokens
from benchmarks.sessions import Workload, summarise
from devstack.running import RunningStack
from kvcommons.errors import KVCommonsError
from kvcommons.openmp import bound_waits


def main(argv: Sequence[str]) -> int:
    """The exit status: 0, 1 for a benchmark that failed, 2 for wrong usage. A SIGTERM ends what it started,
    as a Ctrl-C does."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    bound_waits(os.environ)  # some compute in this process, as services do
    console = Console()
    try:
        with console.status("starting") as status:
            report = options.run(options, status.update)
    except KVCommonsError as error:
        Console(stderr=True).print(f"kvcommons bench: {error.message}", markup=False, soft_wrap=True)
        return 1
    report.print(console)
    if options.json is not None:
        report.write_json(options.json)
    if options.picture is not None:
        options.draw(options.picture, report)
    return 0


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvcommons bench", description="Benchmarks of a real stack.")
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    sessions = commands.add_parser(
        "sessions", help="multi-turn chat: KV reused against KV recomputed, in one run of one stack"
    )
    sessions.add_argument(
        "--random-model", metavar="SIZE", help="random weights: 7m, 34m or 246m (default: demo)"
    )
    sessions.add_argument("--model", metavar="DIR_OR_HUB_ID", help="a model of your own")
    sessions.add_argument("--history", type=int, default=1024, metavar="N", help="tokens before the turns")
    sessions.add_argument("--new", type=int, default=64, metavar="N", help="new tokens a turn")
    sessions.add_argument("--answer", type=int, default=8, metavar="N", help="tokens of each answer")
    sessions.add_argument("--turns", type=int, default=2, metavar="N", help="measured turns of each session")
    sessions.add_argument("--sessions", type=int, default=5, metavar="N")
    sessions.add_argument("--concurrency", type=int, default=1, metavar="N", help="turns at the same time")
    sessions.add_argument(
        "--block-tokens",
        type=int,
        default=16,
        metavar="N",
        help="of a block; the last, unfinished one is computed",
    )
    sessions.add_argument("--restart", action="store_true", help="then kill all, and measure from disk")
    sessions.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    _add_outputs(sessions)
    sessions.set_defaults(run=_sessions, draw=_draw_sessions)
    first = commands.add_parser(
        "first-token", help="a short prompt on the demo model: TTFT besides the model"
    )
    first.add_argument("--requests", type=int, default=100, metavar="N")
    _add_outputs(first)
    first.set_defaults(run=_first_token, draw=_draw_first_token)
    prefixes_cli.add(commands, _add_outputs)
    attention.add(commands, _add_outputs)
    chunk_attention.add(commands, _add_outputs)
    gpu.add(commands, _add_outputs)
    products.add(commands, _add_outputs)
    overlap_cli.add(commands, _add_outputs)
    store_cli.add(commands, _add_outputs)
    live_hits.add(commands, _add_outputs)
    records.add(commands, _add_outputs)
    transport.add(commands, _add_outputs)
    borrow.add(commands, _add_outputs)
    settlement_cli.add(commands, _add_outputs)
    cores.add(commands, _add_outputs)
    serve.add(commands, _add_outputs)
    short_prompts.add(commands, _add_outputs)
    speculation.add(commands, _add_outputs)
    peers.add(commands, _add_outputs)
    beside_prompt.add(commands, _add_outputs)
    agents.add(commands, _add_outputs)
    stages.add(commands, _add_outputs)
    structured_outputs.add(commands, _add_outputs)
    attention_store_cli.add(commands, _add_outputs)
    remote_attention.add(commands, _add_outputs)
    kv_parallel.add(commands, _add_outputs)
    fixed_time_cli.add(commands, _add_outputs)
    trade_off.add(commands, _add_outputs)
    partition.add(commands, _add_outputs)
    mini_batches.add(commands, _add_outputs)
    mixed_iterations.add(commands, _add_outputs)
    iteration_parts.add(commands, _add_outputs)
    long_context.add(commands, _add_outputs)
    offload.add(commands, _add_outputs)
    offload_plan.add(commands, _add_outputs)
    offload_figures.add(commands, _add_outputs)
    rotation.add(commands, _add_outputs)
    _add_truncation(commands)
    return parser


def _add_truncation(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "truncation",
        help="a full context window: KV that is left, against recomputing it and against using it naively",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="for quality, with the demo's tokenizer (default: demo)"
    )
    parser.add_argument("--texts", type=int, default=12, metavar="N", help="of each kind, for perplexity")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="quality on this text instead, token by token"
    )
    parser.add_argument("--tokens", type=int, default=50_000, metavar="N", help="of it, after overflows")
    parser.add_argument("--questions", type=int, default=200, metavar="N", help="for recall")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--random-model", metavar="SIZE", help="time to the first token instead: 7m or 246m")
    parser.add_argument(
        "--window", type=int, default=4096, metavar="N", help="for the text and the random model, in tokens"
    )
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens of the turn that overflows")
    parser.add_argument("--sessions", type=int, default=5, metavar="N")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    _add_outputs(parser)
    parser.set_defaults(run=_truncation, draw=_draw_truncation)


def _truncation(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    from benchmarks import truncation
    from demo import MODEL_DIR

    if options.text:
        from benchmarks.truncation_text import quality_of_text

        model = Path(options.model or MODEL_DIR)
        return quality_of_text(model, options.text, options.tokens, options.window, progress)
    if not options.random_model:
        return truncation.quality(
            Path(options.model or MODEL_DIR), options.texts, options.questions, options.seed, progress
        )
    from kvcommons.model.tokenizer import Tokenizer

    load = truncation.Overflow(
        window_tokens=options.window, new_tokens=options.new, sessions=options.sessions
    )
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        model = write_random_model(
            Path(name), options.random_model, progress, dtype=options.dtype, window_tokens=options.window
        )
        write = PromptWriter(Tokenizer.read(model), template_tokens(str(model)))
        progress("starting the stack")
        tables = load.tables(options.dtype)
        with RunningStack(Path(name) / "stack", tables=tables, model=str(model)) as stack:
            return truncation.first_tokens(stack.client, load, write, options.random_model, progress)


def _draw_truncation(path: Path, report: Report) -> None:
    if "recall, %" in report.rows[0]:
        stacked_bars(path, report.title, report.rows, ("recall, %",), "how", "questions answered right, %")
    elif "perplexity" in report.rows[0]:
        stacked_bars(path, report.title, report.rows, ("perplexity",), "how", "perplexity")
    else:
        stacked_times(path, report.title, report.rows, ("TTFT p50 ms",), "how")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG or SVG")


def _first_token(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        progress("starting the stack")
        with RunningStack(Path(name)) as stack:
            progress("asking")
            runs = {
                "without a session": first_token.measure(
                    stack.client, requests=options.requests, sessions=False
                ),
                "with a session": first_token.measure(stack.client, requests=options.requests, sessions=True),
            }
    return first_token.summarise("Demo model, short prompts, one at a time", runs)


def _draw_first_token(path: Path, report: Report) -> None:
    stacked_times(path, report.title, report.rows, ("model p50 ms", "besides the model p50 ms"), "how")


def _sessions(options: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    workload = Workload(
        history_tokens=options.history,
        new_tokens=options.new,
        answer_tokens=options.answer,
        turns=options.turns,
        sessions=options.sessions,
        concurrency=options.concurrency,
    )
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        model = _model(options, folder, progress)
        setting = StackSetting(
            folder=folder / "stack", model=model, dtype=options.dtype, block_tokens=options.block_tokens
        )
        pairs = take_pairs(setting, workload, restart=options.restart, progress=progress)
    label = options.random_model or options.model or "demo model"
    return summarise(f"{label}: history {options.history}, {options.new} new tokens a turn", pairs)


def _model(options: argparse.Namespace, folder: Path, progress: Callable[[str], None]) -> str:
    if options.model:
        return str(options.model)
    if not options.random_model:
        from demo import MODEL_DIR

        return str(MODEL_DIR)
    return str(write_random_model(folder, options.random_model, progress, dtype=options.dtype))


def _draw_sessions(path: Path, report: Report) -> None:
    parts = ("queue ms", "prefill queue ms", "load wait ms", "prefill ms", "rest ms")
    stacked_times(path, report.title, report.rows, parts, "how")
