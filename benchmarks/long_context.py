"""`kvcommons bench long-context`: contexts longer than an instance has room for (Infinite-LLM, section 6).

- `reach`: one long sequence over holders of which each has room for a small part of it, against one
  instance that has room for all of it.
- `migration` (section 6.3): a sequence outgrows its instance while it decodes. Either it goes on with memory
  of others, or it moves to a larger instance, which is started for it, loads its weights from disk, and gets
  the KV.
- `contexts` (section 6.1): the largest batch of requests of one length.
- `rates` (section 6.2): requests that arrive by chance, of which some are long.

The last two compare two instances that share their memory with one that has the memory and the threads of
both. Real stacks, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import migration
from benchmarks.plot import Curves, curves
from benchmarks.random_model import write_random_model
from benchmarks.report import Report, Row, p50
from benchmarks.streams import Stream, arrive, ask, at_once, prompt
from devstack.running import RunningStack
from kvcommons.errors import InvalidInput

Progress = Callable[[str], None]
PARTS = ("reach", "migration", "contexts", "rates")
BLOCK_TOKENS = 64
WARM_TOKENS = 2  # of an answer that is asked for only so that its prompt is known
ROUNDS = 3  # of each batch: one lasts a second or less
MODES = ("two that share", "one large")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Tokens; `capacity` is an instance's for contexts, `rates_capacity` for rates, `holder` a holder's
    for the other two parts."""

    parts: tuple[str, ...]
    size: str
    moved_size: str  # model of `migration`
    holder: int
    reaches: tuple[tuple[int, int], ...]  # tokens, and holders besides the instance itself
    answer: int
    capacity: int
    contexts: tuple[int, ...]
    rates_capacity: int
    rates: tuple[float, ...]  # requests a second
    long_shares: tuple[float, ...]
    requests: int  # for each rate and share
    seed: int


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "long-context", help="contexts longer than an instance has room for, against larger instances"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--random-model", metavar="SIZE", default="7m", help="7m, 34m or 246m")
    parser.add_argument("--migrated-model", metavar="SIZE", default="246m", help="the same, for migration")
    parser.add_argument(
        "--holder", type=int, default=4096, metavar="N", help="tokens that a holder has room for"
    )
    parser.add_argument(
        "--holders", type=int, nargs="+", default=[7], metavar="N", help="besides the instance itself"
    )
    parser.add_argument(
        "--reach", type=int, nargs="+", default=[30_000], metavar="N",
        help="tokens of a long sequence, for each number of holders",
    )  # fmt: skip
    parser.add_argument("--answer", type=int, default=128, metavar="N", help="tokens of each answer")
    parser.add_argument(
        "--capacity", type=int, default=8192, metavar="N", help="of each instance, for contexts"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 7168, 12288], metavar="N")
    parser.add_argument(
        "--rates-capacity", type=int, default=4096, metavar="N", help="of each instance, for rates"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0], metavar="R", help="a second")
    parser.add_argument("--long-shares", type=float, nargs="+", default=[0.01, 0.1, 0.3], metavar="S")
    parser.add_argument("--requests", type=int, default=20, metavar="N", help="for each rate and share")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    if len(options.reach) != len(options.holders):
        raise InvalidInput("--reach and --holders go together: as many of one as of the other")
    if options.picture is not None and not {"contexts", "rates"} & set(options.parts):
        raise InvalidInput("only contexts and rates make a picture: name one of them in --parts")
    setting = Setting(
        parts=tuple(options.parts), size=options.random_model, moved_size=options.migrated_model,
        holder=options.holder, reaches=tuple(zip(options.reach, options.holders, strict=True)),
        answer=options.answer, capacity=options.capacity, contexts=tuple(options.contexts),
        rates_capacity=options.rates_capacity, rates=tuple(options.rates),
        long_shares=tuple(options.long_shares),
        requests=options.requests, seed=options.seed,
    )  # fmt: skip
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as temporary:
        folder = Path(temporary)
        if "migration" in setting.parts:
            rows += _migration(folder / "moved", setting, progress)
        if set(setting.parts) - {"migration"}:
            longest = max(tokens for tokens, _ in setting.reaches)
            window = 2 * max(longest, 2 * setting.capacity, 2 * setting.rates_capacity)
            model = write_random_model(folder, setting.size, progress, window_tokens=window)
            for number, (tokens, holders) in enumerate(setting.reaches if "reach" in setting.parts else ()):
                rows += _reach(folder / f"reach-{number}", model, tokens, holders, setting, progress)
            for name, rows_of in (("contexts", _contexts), ("rates", _rates)):
                for number, mode in enumerate(MODES if name in setting.parts else ()):
                    rows += rows_of(folder / f"{name}-{number}", model, mode, setting, progress)
    return Report(title="contexts longer than an instance", ratios=_ratios(rows), rows=rows)


def _tables(
    capacity_tokens: int, threads: int, prefill_tokens: int | None = None
) -> dict[str, dict[str, Any]]:
    shared = {"block_tokens": BLOCK_TOKENS, "capacity_tokens": capacity_tokens, "threads": threads}
    prefill = {**shared, "threads": 1, "capacity_tokens": prefill_tokens or capacity_tokens}
    return {
        "prefill": {**prefill, "push_deadline_s": 30.0},
        "decode": {**shared, "attend_deadline_s": 30.0, "lend_share": 1.0},
        "attention_pool": shared,
    }


def _reach(
    folder: Path, model: Path, tokens: int, holders: int, setting: Setting, progress: Progress
) -> list[Row]:
    """Time to the first token and between tokens."""
    kinds = {
        f"{1 + holders} holders of {setting.holder:,}": (setting.holder, holders),
        "one large": (tokens + setting.holder, 0),
    }
    rows: list[Row] = []
    for number, (how, (capacity, pools)) in enumerate(kinds.items()):
        progress(f"a sequence of {tokens:,} tokens, {how}")
        flags: dict[str, Any] = {"model": str(model), "attention_pool": max(pools, 1)}
        tables = _tables(capacity, 1)
        with RunningStack(folder / str(number), tables=tables, **flags) as stack:
            got = ask(stack.client, prompt(setting.seed, tokens), setting.answer)
        rows.append(
            {
                "part": f"{tokens:,} tokens",
                "how": how,
                "TTFT s": got.first_s,
                "ms/token": 1e3 * p50(got.gaps_s()),
            }
        )
    return rows


def _migration(folder: Path, setting: Setting, progress: Progress) -> list[Row]:
    """The delay: what the sequence waits for when it outgrows its instance, beyond a token's usual time."""
    folder.mkdir()
    model = write_random_model(
        folder, setting.moved_size, progress, window_tokens=4 * setting.holder + setting.answer
    )
    progress("borrowing")
    before = setting.answer // 2
    tables = _tables(setting.holder, 1)
    tables["prefill"]["capacity_tokens"] = 2 * setting.holder
    with RunningStack(folder / "stack", tables=tables, model=str(model)) as stack:
        got = ask(stack.client, prompt(setting.seed, setting.holder - before), 2 * before)
    gaps = got.gaps_s()
    edge = slice(max(before - BLOCK_TOKENS // 2, 1), before + 2)
    usual_s = p50(gaps[: edge.start])
    progress("starting a larger instance")
    moved = asyncio.run(
        migration.measure(folder, model, tokens=setting.holder, larger_tokens=2 * setting.holder)
    )
    return [
        {
            "part": "migration",
            "how": "memory of others",
            "delay s": max(max(gaps[edge]) - usual_s, 0.0),
            "ms/token": 1e3 * p50(gaps[edge.stop :]),
        },
        {
            "part": "migration",
            "how": "a larger instance",
            "delay s": moved.start_s + moved.move_s,
            "started s": moved.start_s,
            "moved s": moved.move_s,
            "ms/token": 1e3 * usual_s,
        },
    ]


@contextmanager
def _instances(folder: Path, model: Path, mode: str, capacity: int) -> Iterator[RunningStack]:
    """Two instances of that room which lend to each other, or one of twice the room and the threads. Prefill
    is the same for both, and has room for everything."""
    shares = mode == MODES[0]
    flags: dict[str, Any] = {"model": str(model), "decode": 2 if shares else 1, "attention_pool": 1}
    tables = _tables(capacity if shares else 2 * capacity, 1 if shares else 2, prefill_tokens=4 * capacity)
    tables["decode"]["placement"] = "overflow" if shares else "local"
    tables["attention_pool"]["capacity_tokens"] = BLOCK_TOKENS  # for nobody
    with RunningStack(folder, tables=tables, **flags) as stack:
        yield stack


def _contexts(folder: Path, model: Path, mode: str, setting: Setting, progress: Progress) -> list[Row]:
    """Tokens a second while all of the largest batch decode, the median of some rounds."""
    rows: list[Row] = []
    progress(f"starting {mode}")
    with _instances(folder, model, mode, setting.capacity) as stack:
        for context in setting.contexts:
            progress(f"{context:,} tokens, {mode}")
            whole = context + setting.answer + BLOCK_TOKENS
            count = max(1, 2 * setting.capacity // whole)
            prompts = [prompt(1000 * context + number, context) for number in range(count)]
            for one in prompts:
                ask(stack.client, one, WARM_TOKENS)
            rounds = [at_once(stack.client, prompts, setting.answer) for _ in range(ROUNDS)]
            rows.append(
                {
                    "part": "contexts",
                    "how": mode,
                    "context": context,
                    "batch": count,
                    "tokens/s": p50([together(streams) for streams in rounds]),
                }
            )
    return rows


def together(streams: Sequence[Stream]) -> float:
    """Tokens a second from when the last of them began until the first has ended; where they never ran
    together, of all of them over all of their time."""
    began_s = max(one.times_s[0] for one in streams)
    ended_s = min(one.times_s[-1] for one in streams)
    if ended_s <= began_s:
        began_s = min(one.times_s[0] for one in streams)
        ended_s = max(one.times_s[-1] for one in streams)
    return sum(began_s < at_s <= ended_s for one in streams for at_s in one.times_s) / (ended_s - began_s)


def _rates(folder: Path, model: Path, mode: str, setting: Setting, progress: Progress) -> list[Row]:
    rows: list[Row] = []
    progress(f"starting {mode}")
    with _instances(folder, model, mode, setting.rates_capacity) as stack:
        for share in setting.long_shares:
            for rate in setting.rates:
                progress(f"{rate:g} requests a second, {share:.0%} long, {mode}")
                rows.append({"part": "rates", "how": mode, **_rate(stack, rate, share, setting)})
    return rows


def _rate(stack: RunningStack, rate: float, long_share: float, setting: Setting) -> Row:
    """Short requests are up to a quarter of an instance, long ones up to one and a half of it."""
    # Of its own: prompts that another point asked for before would be found again.
    dice = random.Random(f"{setting.seed} {rate} {long_share}")
    capacity = setting.rates_capacity
    bounds = {False: (capacity // 16, capacity // 4), True: (capacity // 2, capacity * 3 // 2)}
    starts_s: list[float] = []
    for _ in range(setting.requests):
        starts_s.append(dice.expovariate(rate) + (starts_s[-1] if starts_s else 0.0))
    # The share is kept exactly, as far as whole requests allow; which ones are long is chance.
    longs = max(round(long_share * setting.requests), 1)
    long = [number < longs for number in range(setting.requests)]
    dice.shuffle(long)
    prompts = [prompt(dice.randrange(1 << 30), dice.randint(*bounds[one])) for one in long]
    streams = arrive(stack.client, starts_s, prompts, setting.answer)
    took_s = max(one.sent_s + one.ended_s for one in streams)
    tokens = sum(one.tokens for one in streams)
    return {
        "requests/s": rate,
        "long %": 100 * long_share,
        "long": longs,
        "tokens/s": tokens / took_s,
        "s/answer": sum(one.ended_s for one in streams) / len(streams),
    }


def _ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Of the shared memory over the other way: time, throughput, latency."""
    found: dict[str, float] = {}
    by_key: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(str(row.get(name, "")) for name in ("part", "context", "requests/s", "long %"))
        by_key.setdefault(key, []).append(row)
    for key, pair in by_key.items():
        if len(pair) != 2:
            continue
        name = " ".join(part for part in key if part)
        for figure in ("delay s", "TTFT s", "tokens/s", "s/answer"):
            if figure in pair[0] and float(pair[1][figure]) > 0:
                found[f"{name}, {figure}"] = float(pair[0][figure]) / float(pair[1][figure])
    return found


def _draw(path: Path, report: Report) -> None:
    """Throughput over context length; throughput and latency over request rate, for each share of long
    requests."""
    lengths = [row for row in report.rows if row["part"] == "contexts"]
    panels: list[Curves | None] = [
        ("Tokens a second, by context", "tokens/s", _lines(lengths, "context", "tokens/s")), None,
    ]  # fmt: skip
    rates = [row for row in report.rows if row["part"] == "rates"]
    for share in dict.fromkeys(float(row["long %"]) for row in rates):
        of_share = [row for row in rates if float(row["long %"]) == share]
        for what, unit in (("Tokens a second", "tokens/s"), ("Seconds an answer", "s/answer")):
            title = f"{what}, by requests a second, {share:g}% long"
            panels.append((title, unit, _lines(of_share, "requests/s", unit)))
    curves(path, report.title, panels if lengths else panels[2:], columns=2)


def _lines(rows: Sequence[Row], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    return {mode: [(float(row[x]), float(row[y])) for row in rows if row["how"] == mode] for mode in MODES}
