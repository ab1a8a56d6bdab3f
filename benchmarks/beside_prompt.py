"""What others wait for while a long prompt is computed (Mnemosyne, figures 7 and 8): short requests for their
first token, answers for each further one.

One process with both roles (`kvcommons up --colocated`), so that chunks and tokens share its iterations: with
chunks that adapt to what was promised between two tokens, with chunks of fixed lengths, and with chunks that
adapt where the long prompt is a session's document, which gives way to others. A stack for each way, one
after the other; each is asked first while it does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.plot import panels
from benchmarks.prompts import PromptWriter
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50, p99
from benchmarks.scraping import metric
from benchmarks.streams import Stream, ask, prompt
from devstack.running import RunningStack
from kvcommons.errors import Internal
from kvcommons.model.tokenizer import Tokenizer

Progress = Callable[[str], None]
ADAPTIVE = "adaptive"
DOCUMENT = "adaptive, of a document"
NO_OBJECTIVE_S = 1e6  # chunks are as long as they may be, whatever is beside them
BLOCK_TOKENS = 64
ALONE = 5  # short requests, one after the other
PAUSE_S = 0.2  # between two short requests
FIGURES = ("short p50 ms", "short p99 ms", "token p50 ms", "token p99 ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """While a long prompt was computed."""

    long_s: float  # to its first token, or a document's end
    shorts: list[Stream]
    answers: list[Stream]
    iterations: float
    iterations_s: float


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "beside-prompt", help="what short requests and answers wait for while a long prompt is computed"
    )
    parser.add_argument("--random-model", metavar="SIZE", default="7m", help="random weights")
    parser.add_argument("--tokens", type=int, default=65536, metavar="N", help="of the long prompt")
    parser.add_argument("--short", type=int, default=64, metavar="N", help="tokens of a short prompt")
    parser.add_argument("--answers", type=int, default=2, metavar="N", help="at once, beside the prompt")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens of each")
    parser.add_argument("--objective", type=float, default=0.2, metavar="S", help="between two tokens")
    parser.add_argument("--most", type=int, default=4096, metavar="N", help="tokens of a chunk that adapts")
    parser.add_argument("--fixed", type=int, nargs="*", default=[128, 4096], metavar="N", help="tokens")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    adaptive = (options.most, options.objective)
    ways = {ADAPTIVE: adaptive, DOCUMENT: adaptive}
    ways |= {f"fixed {chunk}": (chunk, NO_OBJECTIVE_S) for chunk in options.fixed}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        window = options.tokens + BLOCK_TOKENS
        model = write_random_model(folder, options.random_model, progress, window_tokens=window)
        document = PromptWriter(Tokenizer.read(model), BLOCK_TOKENS)(0, options.tokens)
        for number, (way, (chunk, objective_s)) in enumerate(ways.items()):
            progress(f"a prompt of {options.tokens} tokens, chunks: {way}")
            with _stack(folder / f"stack-{number}", model, options, chunk, objective_s) as stack:
                alone = [ask(stack.client, prompt(seed, options.short), 1) for seed in range(1, ALONE + 1)]
                long = (
                    partial(_document_s, stack, document)
                    if way == DOCUMENT
                    else partial(_first_token_s, stack, prompt(0, options.tokens))
                )
                rows.append(_row(way, alone, _beside(stack, options, long)))
    title = (
        f"{options.random_model}: a prompt of {options.tokens} tokens beside {options.answers} answers and "
        f"short prompts of {options.short}, {options.objective * 1e3:.0f} ms promised between tokens"
    )
    return Report(title=title, ratios=_ratios(rows, options.objective), rows=rows)


def _stack(
    folder: Path, model: Path, options: argparse.Namespace, chunk: int, objective_s: float
) -> RunningStack:
    # Room for the long prompt and twice what is beside it: nothing waits for memory.
    beside = (options.answers + 2) * (options.short + options.answer + BLOCK_TOKENS)
    decode = {
        "block_tokens": BLOCK_TOKENS,
        "capacity_tokens": options.tokens + 2 * BLOCK_TOKENS + 2 * beside,
        "chunk_tokens": chunk,
        "tbt_objective_s": objective_s,
    }
    tables = {"decode": decode, "router": {"request_deadline_s": 7200.0}}
    return RunningStack(folder, tables=tables, model=str(model), attention_pool=0, colocated=True)


def _first_token_s(stack: RunningStack, ids: Sequence[int]) -> float:
    return ask(stack.client, ids, 1).first_s


def _document_s(stack: RunningStack, text: str) -> float:
    """Until it is committed."""
    began_s, path = time.monotonic(), "/v1/sessions/document/prefill"
    stack.client.post(path, {"content": text})
    *_, last = stack.client.events(f"{path}?stream=true")
    if last["status"] != "completed":
        raise Internal(f"the document was not computed: {last}")
    return time.monotonic() - began_s


def _beside(stack: RunningStack, options: argparse.Namespace, long: Callable[[], float]) -> _Beside:
    """`long`: computes the long prompt, and says how long that took. Prompts share nothing with any other."""
    client, over = stack.client, threading.Event()
    seeds = itertools.count(1000)

    def again_and_again(tokens: int, pause_s: float) -> list[Stream]:
        made = []
        while not over.is_set():
            made.append(ask(client, prompt(next(seeds), options.short), tokens))
            over.wait(pause_s)
        return made

    with ThreadPoolExecutor(max_workers=options.answers + 2) as pool:
        answering = [pool.submit(again_and_again, options.answer, 0.0) for _ in range(options.answers)]
        time.sleep(1.0)  # until they generate
        before = _iterations(stack)
        computing = pool.submit(long)
        asking = pool.submit(again_and_again, 1, PAUSE_S)
        try:
            long_s = computing.result()
            after = _iterations(stack)
        finally:
            over.set()
        # Those under way at its end have felt the most of it.
        return _Beside(
            long_s=long_s,
            shorts=asking.result(),
            answers=[stream for one in answering for stream in one.result()],
            iterations=after[0] - before[0],
            iterations_s=after[1] - before[1],
        )


def _iterations(stack: RunningStack) -> tuple[float, float]:
    """How many there were, and what they took together."""
    path = stack.runtime / "decode.m"
    name = "kvcommons_iteration_seconds"
    return metric(path, f"{name}_count"), metric(path, f"{name}_sum")


def _row(way: str, alone: list[Stream], beside: _Beside) -> Row:
    shorts_ms = [stream.first_s * 1e3 for stream in beside.shorts]
    gaps_ms = [gap * 1e3 for stream in beside.answers for gap in stream.gaps_s()]
    return {
        "chunks": way,
        "long prompt s": beside.long_s,
        "short requests": len(shorts_ms),
        "alone p50 ms": p50([stream.first_s * 1e3 for stream in alone]),
        "short p50 ms": p50(shorts_ms),
        "short p99 ms": p99(shorts_ms),
        "token p50 ms": p50(gaps_ms),
        "token p99 ms": p99(gaps_ms),
        "token most ms": max(gaps_ms),
        "iteration ms": 1e3 * beside.iterations_s / max(beside.iterations, 1.0),
    }


def _ratios(rows: list[Row], objective_s: float) -> Mapping[str, float]:
    """Of each way: what short requests wait for, over their time alone and the longest iteration, which is
    the longest that a token took; tokens over their objective; and the long prompt over that with chunks that
    adapt."""
    adaptive = float(rows[0]["long prompt s"])
    ratios: dict[str, float] = {}
    for row in rows:
        bound_ms = float(row["alone p50 ms"]) + float(row["token most ms"])
        ratios[f"short p99 over alone + one {row['chunks']}"] = float(row["short p99 ms"]) / bound_ms
        ratios[f"token p99 over objective {row['chunks']}"] = float(row["token p99 ms"]) / (1e3 * objective_s)
        ratios[f"long prompt {row['chunks']}"] = float(row["long prompt s"]) / adaptive
    return ratios


def _draw(path: Path, report: Report) -> None:
    groups = [(name, [(str(row["chunks"]), float(row[name])) for row in report.rows]) for name in FIGURES]
    panels(path, report.title, groups, "milliseconds")
