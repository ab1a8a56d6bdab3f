"""Conversations at given rates: how many turns a second keep their objectives, here and at other servers.

Each conversation arrives by itself, waits between its turns as its user does, and sends the next one whatever
the others do: so a server that falls behind has more and more of them at once. Other servers (`--with`, and
by OpenAI's API `--peer NAME=URL`) get the same conversations at the same times, one server after the other.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.peers import instruction_sets
from benchmarks.peers.bounds import kv_token_bytes
from benchmarks.peers.named import add_peer_options, peer_servers
from benchmarks.peers.servers import Sizes
from benchmarks.plot import panels
from benchmarks.prompts import PromptWriter
from benchmarks.random_model import chosen_model
from benchmarks.report import Report, Row, geometric, p50, p99
from benchmarks.session_stack import template_tokens
from devstack.rest import Piece, RestClient, Turn
from devstack.running import RunningStack
from kvcommons.errors import InvalidInput, KVCommonsError
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tokenizer import Tokenizer

Progress = Callable[[str], None]
OWN = "kvcommons"
# Of the memory for KV: decode's, prefill's, and the kvstore's DRAM.
SHARES = (0.5, 0.25, 0.25)
# Templates and words that are several tokens make conversations longer than their steps say.
LONGER = 1.3
FIGURES = ("goodput turns/s", "TTFT p50 s", "TTFT p99 s", "TBT p50 ms", "TBT p99 ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A turn as its user makes it: `think_s` after the answer before it."""

    new_tokens: int
    answer_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    arrives_s: float
    steps: Sequence[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTurn:
    """`gaps_s`: between what came of its answer, a token's text as a rule; several that a server sends at
    once are waited for once."""

    turn: Turn
    gaps_s: Sequence[float]

    def kept(self, ttft_s: float, tbt_s: float) -> bool:
        """Whether its first token and 99% of its gaps were within their objectives."""
        return self.turn.ttft_s <= ttft_s and p99(self.gaps_s or [0.0]) <= tbt_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The turns of all conversations at one server that were answered, how many failed, and how long all
    took."""

    turns: Sequence[TimedTurn]
    failed: int
    seconds: float

    def kept(self, ttft_s: float, tbt_s: float) -> int:
        """Turns that kept their objectives."""
        return sum(timed.kept(ttft_s, tbt_s) for timed in self.turns)

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(timed.turn.completion_tokens for timed in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`sessions`: it keeps conversations by their ids; else each request brings the whole of its own."""

    name: str
    client: RestClient
    model: str
    sessions: bool


def arriving(steps: Sequence[Sequence[Step]], *, rate_per_s: float, seed: int) -> list[Conversation]:
    """Conversations of these steps, at random times (Poisson's) at this rate."""
    draw, now_s, found = random.Random(seed), 0.0, []
    for some in steps:
        now_s += draw.expovariate(rate_per_s)
        found.append(Conversation(arrives_s=now_s, steps=some))
    return found


def alike(conversations: int, turns: int, *, new: int, answer: int, think_s: float) -> list[list[Step]]:
    """The first turn of each needs no thought."""
    later = Step(new_tokens=new, answer_tokens=answer, think_s=think_s)
    first = Step(new_tokens=new, answer_tokens=answer, think_s=0.0)
    return [[first, *[later] * (turns - 1)] for _ in range(conversations)]


def of_trace(
    path: Path, conversations: int, *, scale: float, time_scale: float, window: int
) -> list[list[Step]]:
    """The first conversations of a trace of sessions, their lengths multiplied by `scale`, and the times
    between their turns by `time_scale`; each until the context window is full. Raises InvalidInput."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        by_session: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_session[row["session"]].append(row)
        chosen = [
            _steps(some, scale, time_scale, window) for some in list(by_session.values())[:conversations]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path} is no trace of sessions: {error}", param="trace") from None
    if not any(chosen):
        raise InvalidInput(f"{path} has no session that fits; a smaller --scale helps", param="scale")
    return [steps for steps in chosen if steps]


def _steps(rows: Sequence[dict[str, Any]], scale: float, time_scale: float, window: int) -> list[Step]:
    """A request whose input is no longer than what was said before it edits its history: it counts as new
    text of one token."""
    steps: list[Step] = []
    before = total = 0
    for row in rows:
        new = max(1, round((row["input_length"] - before) * scale))
        answer = max(2, round(row["output_length"] * scale))
        if total + new + answer > window:
            break
        steps.append(Step(new_tokens=new, answer_tokens=answer, think_s=row["think_time"] * time_scale))
        before, total = row["input_length"] + row["output_length"], total + new + answer
    return steps


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser(
        "serve", help="conversations at given rates: turns a second that keep objectives, here and elsewhere"
    )
    parser.add_argument("--model", metavar="DIR", help="default: smollm2, fetched once")
    parser.add_argument("--random-model", metavar="SIZE", help="random weights instead: 7m, 34m or 246m")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.2, 0.5], metavar="N", help="conversations/s"
    )
    parser.add_argument("--conversations", type=int, default=16, metavar="N")
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="of each")
    parser.add_argument("--new", type=int, default=128, metavar="N", help="tokens that each turn asks with")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens of each answer")
    parser.add_argument(
        "--think", type=float, default=2.0, metavar="S", help="between an answer and the next turn"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="sessions of a trace instead")
    parser.add_argument("--scale", type=float, default=0.01, metavar="N", help="of the trace's lengths")
    parser.add_argument(
        "--time-scale", type=float, default=0.1, metavar="N", help="of the trace's think times"
    )
    parser.add_argument(
        "--memory-mb", type=int, default=1024, metavar="N", help="for KV in all; peers get as much"
    )
    parser.add_argument("--ttft", type=float, default=2.0, metavar="S", help="objective")
    parser.add_argument("--tbt", type=float, default=0.2, metavar="S", help="objective")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="each rate so many times at each server, in turns"
    )
    add_peer_options(parser)
    parser.add_argument("--histories", action="store_true", help="send whole conversations here, too")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    instruction_sets.narrow(options.narrow)
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name, ExitStack() as running:
        folder = Path(name)
        model, what = chosen_model(options, folder, progress)
        spec = ModelSpec.read(model)
        steps = _conversations(options, spec.context_window)
        progress("starting the stack")
        stack = running.enter_context(_stack(folder / "stack", model, spec, options))
        own = Server(
            name=OWN, client=stack.client, model=_model_of(stack.client), sessions=not options.histories
        )
        sizes = _sizes(steps, spec, options)
        peers = peer_servers(options, model, sizes, folder, running=running, progress=progress)
        servers = [own, *(_peer(name, peer.client) for name, peer in peers.items())]
        write = PromptWriter(Tokenizer.read(model), template_tokens(str(model)))
        runs: dict[tuple[float, str], list[Run]] = defaultdict(list)
        for rate in options.rates:
            for number in range(options.rounds):
                arrivals = arriving(steps, rate_per_s=rate, seed=options.seed + number)
                first = number % len(servers)
                for server in servers[first:] + servers[:first]:
                    progress(f"{server.name}, {rate:g} conversations a second")
                    serial = sum(map(len, runs.values()))
                    runs[rate, server.name].append(converse(server, arrivals, write, serial=serial))
    label = options.trace.name if options.trace else f"{len(steps)} conversations"
    what += instruction_sets.named(options.narrow)
    return _summarise(f"{what}: {label}", runs, ttft_s=options.ttft, tbt_s=options.tbt)


def _conversations(options: argparse.Namespace, window: int) -> list[list[Step]]:
    if options.trace is None:
        return alike(
            options.conversations,
            options.turns,
            new=options.new,
            answer=options.answer,
            think_s=options.think,
        )
    return of_trace(
        options.trace,
        options.conversations,
        scale=options.scale,
        time_scale=options.time_scale,
        window=window * 9 // 10,  # words are no exact measure of tokens
    )


def _stack(folder: Path, model: Path, spec: ModelSpec, options: argparse.Namespace) -> RunningStack:
    """Which has so much memory for KV in all."""
    token_bytes = kv_token_bytes(spec)
    decode, prefill, dram = (int(share * (options.memory_mb << 20)) for share in SHARES)
    tables = {
        "decode": {"capacity_tokens": decode // token_bytes},
        "prefill": {"capacity_tokens": prefill // token_bytes},
        "kvstore": {"dram_bytes": dram},
    }
    return RunningStack(folder, tables=tables, model=str(model), attention_pool=0)


def _sizes(steps: Sequence[Sequence[Step]], spec: ModelSpec, options: argparse.Namespace) -> Sizes:
    """Of a peer: as much memory for KV as the stack has in all."""
    longest = max(sum(step.new_tokens + step.answer_tokens for step in some) for some in steps)
    memory = options.memory_mb << 20
    return Sizes(
        kv_tokens=memory // kv_token_bytes(spec),
        kv_bytes=memory,
        threads=os.cpu_count() or 1,
        sequences=len(steps),
        window_tokens=min(spec.context_window, int(LONGER * longest) + 256),
        narrow=options.narrow,
    )


def _peer(name: str, client: RestClient) -> Server:
    return Server(name=name, client=client, model=_model_of(client), sessions=False)


def _model_of(client: RestClient) -> str:
    return str(client.get("/v1/models")["data"][0]["id"])


def converse(server: Server, arrivals: Sequence[Conversation], write: PromptWriter, *, serial: int) -> Run:
    """`serial` keeps what is said apart from what any other call says."""
    began_s, failed = time.monotonic(), 0
    lock = threading.Lock()
    answered: list[TimedTurn] = []

    def one(number: int, conversation: Conversation) -> None:
        nonlocal failed
        time.sleep(max(0.0, began_s + conversation.arrives_s - time.monotonic()))
        for timed in _turns(
            server, conversation, write, f"serve-{serial}-{number}", 1000 * number + 10**6 * serial
        ):
            with lock:
                if timed is None:
                    failed += 1
                else:
                    answered.append(timed)

    with ThreadPoolExecutor(len(arrivals)) as pool:
        for done in [pool.submit(one, number, some) for number, some in enumerate(arrivals)]:
            done.result()
    return Run(turns=answered, failed=failed, seconds=time.monotonic() - began_s)


def _turns(
    server: Server, conversation: Conversation, write: PromptWriter, session: str, serial: int
) -> Iterator[TimedTurn | None]:
    """One after the other; None for one that failed, which ends its conversation."""
    said: list[dict[str, str]] = []
    for number, step in enumerate(conversation.steps):
        time.sleep(step.think_s)
        message = {"role": "user", "content": write(serial + number, step.new_tokens)}
        said.append(message)
        parameters: dict[str, Any] = {
            "model": server.model,
            "max_tokens": step.answer_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "messages": [message] if server.sessions else said,
        }
        timed: TimedTurn | None
        try:
            timed = timed_turn(server.client.chat("", session if server.sessions else None, **parameters))
        except KVCommonsError:
            timed = None
        if timed is None or not timed.turn.completion_tokens:  # some servers answer nothing, and no error
            yield None
            return
        said.append({"role": "assistant", "content": timed.turn.text})
        yield timed


def timed_turn(streamed: Iterable[Piece | Turn]) -> TimedTurn:
    """Waited for. Raises what the server says."""
    came_s: list[float] = []
    for part in streamed:
        if isinstance(part, Turn):
            return TimedTurn(turn=part, gaps_s=[later - before for before, later in pairwise(came_s)])
        came_s.append(part.after_s)
    raise AssertionError("a chat ends with its Turn")


def _summarise(
    title: str, runs: Mapping[tuple[float, str], Sequence[Run]], *, ttft_s: float, tbt_s: float
) -> Report:
    """Goodput: turns a second that kept their objectives."""

    def goodput(run: Run) -> float:
        return run.kept(ttft_s, tbt_s) / run.seconds

    def throughput(run: Run) -> float:
        return run.tokens / run.seconds

    rows: list[Row] = []
    for (rate, server), some in runs.items():
        turns, seconds = [timed.turn for run in some for timed in run.turns], sum(run.seconds for run in some)
        failed, kept = sum(run.failed for run in some), sum(run.kept(ttft_s, tbt_s) for run in some)
        firsts = [turn.ttft_s for turn in turns] or [0.0]
        gaps = [gap * 1e3 for run in some for timed in run.turns for gap in timed.gaps_s] or [0.0]
        prompts = sum(turn.prompt_tokens for turn in turns)
        rows.append(
            {
                "server": server,
                "conversations/s": rate,
                "turns": len(turns),
                "failed": failed,
                "goodput turns/s": kept / seconds,
                "kept": kept / max(len(turns) + failed, 1),
                "TTFT p50 s": p50(firsts),
                "TTFT p99 s": p99(firsts),
                "TBT p50 ms": p50(gaps),
                "TBT p99 ms": p99(gaps),
                "output tokens/s": sum(run.tokens for run in some) / seconds,
                "prompt from cache": sum(turn.cached_tokens for turn in turns) / max(prompts, 1),
            }
        )
    ratios: dict[str, float] = {}
    for rate in dict.fromkeys(rate for rate, _ in runs):
        at_rate = {server: some for (at, server), some in runs.items() if at == rate}
        for name, figure in (("goodput", goodput), ("output tokens/s", throughput)):
            ratios |= _over_the_better(f"{name} at {rate:g}/s", figure, at_rate)
    return Report(title=title, ratios=ratios, rows=rows)


def _over_the_better(
    name: str, figure: Callable[[Run], float], runs: Mapping[str, Sequence[Run]]
) -> dict[str, float]:
    """Of one rate, by server: the mean of the rounds' ratios to the peer that has more of it in all, and 95%
    bounds where there are several rounds. Without a peer, the figure."""
    figures = {server: [figure(run) for run in some] for server, some in runs.items()}
    own = figures.pop(OWN)
    better = max(figures, key=lambda peer: sum(figures[peer]), default=None)
    if better is None or not all([*own, *figures[better]]):  # a round in which nothing was kept is no measure
        return {name: fmean(own)}
    ratio, factor = geometric([ours / theirs for ours, theirs in zip(own, figures[better], strict=True)])
    found = {f"{name} over {better}'s": ratio}
    if len(own) > 1:
        found |= {
            f"{name} over {better}'s, low": ratio / factor,
            f"{name} over {better}'s, high": ratio * factor,
        }
    return found


def _draw(path: Path, report: Report) -> None:
    groups = [
        (name, [(f"{row['server']}, {row['conversations/s']:g}/s", float(row[name])) for row in report.rows])
        for name in FIGURES
    ]
    panels(path, report.title, groups, "turns a second, seconds, milliseconds")
