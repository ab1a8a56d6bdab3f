"""What holding answers to a schema costs: a token's time in a full batch, beside the same batch without it,
and the first token of a schema that nobody has used before, beside the same prompt without one.

Both ways take turns in one run of one stack. The answers that are held are cut by their length like the
others, so both have the same number of tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.plot import stacked_times
from benchmarks.random_model import chosen_model
from benchmarks.report import Report, Row, p50, p99
from benchmarks.store_cost import cpu_by_process_s
from benchmarks.streams import Stream, ask, prompt
from devstack.rest import RestClient
from devstack.running import RunningStack

Progress = Callable[[str], None]
UsedSeconds = Callable[[], float]
WAYS = ("free", "held")
PROMPT_TOKENS = 64
WARM_UP = 1  # rounds that count for nothing
_NAMES = ("name", "colour", "kind", "address", "comment")


def schema(number: int) -> dict[str, Any]:
    """An endless list of records; no two numbers have the same schema."""
    fields: dict[str, Any] = {f"{name}_{number}": {"type": "string", "maxLength": 40} for name in _NAMES}
    fields[f"count_{number}"] = {"type": "integer", "minimum": 0, "maximum": 10_000}
    fields[f"state_{number}"] = {"enum": ["open", "closed", "unknown"]}
    record = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"type": "array", "items": record, "minItems": 1000}


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "structured-outputs", help="a token's time held to a schema, and a schema's first use"
    )
    parser.add_argument("--model", metavar="DIR", help="default: smollm2, fetched once")
    parser.add_argument("--random-model", metavar="SIZE", help="random weights instead")
    parser.add_argument(
        "--url",
        help="a server with OpenAI's API and vLLM's structured_outputs, instead of a stack of our own",
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="answers at the same time")
    parser.add_argument("--answer", type=int, default=96, metavar="N", help="tokens")
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--schemas", type=int, default=20, metavar="N", help="used for the first time")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    title = f"{options.batch} answers of {options.answer} tokens at once"
    if options.url:
        client = RestClient(options.url)
        rounds = _batches(client, None, options, progress)
        return _summarise(f"{options.url}: {title}", rounds, _first_uses(client, options.schemas, progress))
    engine = {"capacity_tokens": 2 * (options.batch + 1) * (PROMPT_TOKENS + options.answer + 64)}
    tables = {"prefill": engine, "decode": {**engine, "max_batch": options.batch}}
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        model, what = chosen_model(options, folder, progress)
        progress("starting the stack")
        with RunningStack(folder / "stack", tables=tables, model=str(model), attention_pool=0) as stack:
            rounds = _batches(stack.client, partial(_used_s, stack), options, progress)
            firsts = _first_uses(stack.client, options.schemas, progress)
    return _summarise(f"{what}: {title}", rounds, firsts)


def _used_s(stack: RunningStack) -> float:
    return sum(cpu_by_process_s(stack).values())


def _batches(
    client: RestClient, used_s: UsedSeconds | None, options: argparse.Namespace, progress: Progress
) -> list[dict[str, dict[str, float]]]:
    """Of each round the figures of both ways. `used_s`: processor time that the server has used so far; None:
    not known."""
    rounds = []
    for number in range(WARM_UP + options.rounds):
        progress(f"round {number + 1} of {WARM_UP + options.rounds}")
        order = WAYS if number % 2 else WAYS[::-1]
        made = {way: _batch(client, used_s, options, way, number) for way in order}
        if number >= WARM_UP:
            rounds.append(made)
    return rounds


def _batch(
    client: RestClient, used_s: UsedSeconds | None, options: argparse.Namespace, way: str, number: int
) -> dict[str, float]:
    structured = {"json": schema(0)} if way == "held" else None
    began_s, cpu_s = time.monotonic(), used_s() if used_s is not None else 0.0

    def one(at: int) -> Stream:
        ids = prompt(10_000 * number + 10 * at + (way == "held"), PROMPT_TOKENS)
        return ask(client, ids, options.answer, structured=structured)

    with ThreadPoolExecutor(options.batch) as pool:
        streams = list(pool.map(one, range(options.batch)))
    tokens = sum(stream.tokens for stream in streams)
    gaps_s = [gap for stream in streams for gap in stream.gaps_s()]
    figures = {
        "tokens/s": tokens / (time.monotonic() - began_s),
        "token p50 ms": p50(gaps_s) * 1e3,
        "token p99 ms": p99(gaps_s) * 1e3,
    }
    if used_s is not None:
        figures["CPU ms a token"] = (used_s() - cpu_s) / tokens * 1e3
    return figures


def _first_uses(client: RestClient, schemas: int, progress: Progress) -> dict[str, list[float]]:
    """Milliseconds to the first token: without a schema, with a new one, and with the same one again."""
    firsts: dict[str, list[float]] = {"free": [], "new schema": [], "known schema": []}
    for number in range(1, schemas + 1):
        progress(f"schema {number} of {schemas}")
        structured = {"json": schema(number)}
        for at, (way, held) in enumerate(
            (("free", None), ("new schema", structured), ("known schema", structured))
        ):
            ids = prompt(5_000_000 + 10 * number + at, PROMPT_TOKENS)
            firsts[way].append(ask(client, ids, 2, structured=held).first_s * 1e3)
    return firsts


def _summarise(
    title: str, rounds: list[dict[str, dict[str, float]]], firsts: Mapping[str, list[float]]
) -> Report:
    rows: list[Row] = [
        {"way": way, **{name: p50([one[way][name] for one in rounds]) for name in rounds[0][way]}}
        for way in WAYS
    ]
    for row, way in zip(rows, ("free", "new schema"), strict=True):
        assert isinstance(row, dict)
        row["first token p50 ms"], row["first token p99 ms"] = p50(firsts[way]), p99(firsts[way])
    ratios = {}
    for name in ("token p50 ms", "CPU ms a token", "tokens/s"):
        if name not in rounds[0]["free"]:
            continue
        found = [one["held"][name] / one["free"][name] for one in rounds]
        ratios[f"{name}, held over free"] = p50(found)
        if len(found) > 1:
            ratios[f"{name}, standard error"] = statistics.stdev(found) / len(found) ** 0.5
    for way in ("new schema", "known schema"):
        more = [one - other for one, other in zip(firsts[way], firsts["free"], strict=True)]
        ratios[f"{way}, ms more to the first token, p50"] = p50(more)
        ratios[f"{way}, ms more to the first token, most"] = max(more)
    return Report(title=title, ratios=ratios, rows=rows)


def _draw(path: Path, report: Report) -> None:
    stacked_times(path, report.title, report.rows, ("token p50 ms",), "way")
