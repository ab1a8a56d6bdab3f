"""`kvcommons bench agents TRACE`: sessions of coding agents side by side, in chunks that adapt to what was
promised between tokens and in chunks of one length (Mnemosyne, figures 7 and 8, on a real trace).

Each turn sends the session's whole prompt, as its client did, of which what was sent before is found.
Lengths and think times of the trace are divided. One process has both roles, a stack for each way. So many
sessions are played at a time, and the next one begins where one ends.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.beside_prompt import ADAPTIVE, NO_OBJECTIVE_S
from benchmarks.plot import panels
from benchmarks.random_model import write_random_model
from benchmarks.replay.trace import Job, read_trace, session_number
from benchmarks.report import Report, Row, p50, p99
from benchmarks.streams import Stream, ask, prompt
from devstack.rest import RestClient
from devstack.running import RunningStack
from kvcommons.errors import InvalidInput

Progress = Callable[[str], None]
BLOCK_TOKENS = 64
FIGURES = ("first token p50 ms", "first token p99 ms", "token p50 ms", "token p99 ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """One request: the trace's blocks of its prompt, and what follows."""

    run: Sequence[int]
    answer_tokens: int
    pause_s: float  # before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A turn, and how many tokens of its prompt no turn before had."""

    stream: Stream
    new_tokens: int


def add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_outputs: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = commands.add_parser("agents", help="sessions of coding agents side by side, by chunks")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="of sessions (hash_runs)")
    parser.add_argument("--random-model", metavar="SIZE", default="7m", help="random weights")
    parser.add_argument("--scale", type=int, default=4, metavar="N", help="divides lengths")
    parser.add_argument("--hurry", type=float, default=40.0, metavar="X", help="divides think times")
    parser.add_argument("--sessions", type=int, default=8, metavar="N", help="the trace's first ones")
    parser.add_argument("--at-once", type=int, default=3, metavar="N")
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="of each session, at most")
    parser.add_argument(
        "--window", type=int, default=32768, metavar="TOKENS", help="turns beyond it are left"
    )
    parser.add_argument("--objective", type=float, default=0.2, metavar="S", help="between two tokens")
    parser.add_argument("--most", type=int, default=4096, metavar="N", help="tokens of a chunk that adapts")
    parser.add_argument("--fixed", type=int, nargs="*", default=[128, 512, 4096], metavar="N", help="tokens")
    add_outputs(parser)
    parser.set_defaults(run=_run, draw=_draw)


def sessions_of(jobs: Sequence[Job], options: argparse.Namespace) -> list[list[AgentTurn]]:
    """Of the trace's first sessions, the turns that fit the window; none that has no turn."""
    found: dict[int, list[AgentTurn]] = {}
    longest = (options.window - BLOCK_TOKENS) * options.scale
    for job in jobs:
        turns = found.setdefault(session_number(job), [])
        if len(turns) < options.turns and job.tokens + job.answer_tokens <= longest:
            turns.append(
                AgentTurn(
                    run=job.run,
                    answer_tokens=max(job.answer_tokens // options.scale, 2),
                    pause_s=job.think_s / options.hurry,
                )
            )
    return [turns for turns in found.values() if turns][: options.sessions]


def play(client: RestClient, turns: Sequence[AgentTurn], block_tokens: int) -> Iterator[Played]:
    """One after another, each when its user has thought. A block of the trace is so many tokens here."""
    known: set[int] = set()
    for turn in turns:
        time.sleep(turn.pause_s)
        ids = [token for block in turn.run for token in prompt(block, block_tokens)]
        new = len(set(turn.run) - known) * block_tokens
        known |= set(turn.run)
        yield Played(stream=ask(client, ids, turn.answer_tokens), new_tokens=new)


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    trace = read_trace(options.trace)
    if trace.block_tokens % options.scale:
        raise InvalidInput(f"scale has to divide a block's {trace.block_tokens} tokens", param="scale")
    sessions = sessions_of(trace.jobs, options)
    ways = {ADAPTIVE: (options.most, options.objective)}
    ways |= {f"fixed {chunk}": (chunk, NO_OBJECTIVE_S) for chunk in options.fixed}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvcommons-bench-") as name:
        folder = Path(name)
        model = write_random_model(folder, options.random_model, progress, window_tokens=options.window)
        for way, (chunk, objective_s) in ways.items():
            progress(f"{sum(map(len, sessions))} turns of {len(sessions)} sessions, chunks: {way}")
            with _stack(folder / way.replace(" ", "-"), model, options, chunk, objective_s) as stack:
                began_s = time.monotonic()
                played = _play_all(stack.client, sessions, trace.block_tokens // options.scale, options)
                rows.append(_row(way, played, time.monotonic() - began_s))
    title = (
        f"{options.random_model}: {len(played)} turns of {len(sessions)} sessions, {options.at_once} at "
        f"once, lengths over {options.scale}, think times over {options.hurry:g}"
    )
    return Report(title=title, ratios=_ratios(rows, options.objective), rows=rows)


def _play_all(
    client: RestClient,
    sessions: Sequence[Sequence[AgentTurn]],
    block_tokens: int,
    options: argparse.Namespace,
) -> list[Played]:
    with ThreadPoolExecutor(max_workers=options.at_once) as pool:
        each = pool.map(lambda turns: list(play(client, turns, block_tokens)), sessions)
        return [played for session in each for played in session]


def _stack(
    folder: Path, model: Path, options: argparse.Namespace, chunk: int, objective_s: float
) -> RunningStack:
    """With room for the sessions that are played at once: no turn waits for memory."""
    decode = {
        "block_tokens": BLOCK_TOKENS,
        "capacity_tokens": (options.at_once + 1) * options.window,
        "chunk_tokens": chunk,
        "tbt_objective_s": objective_s,
    }
    tables = {"decode": decode, "router": {"request_deadline_s": 7200.0}}
    return RunningStack(folder, tables=tables, model=str(model), attention_pool=0, colocated=True)


def _row(way: str, played: Sequence[Played], seconds: float) -> Row:
    firsts_ms = [one.stream.first_s * 1e3 for one in played]
    new = sorted(one.new_tokens for one in played)
    small = new[len(new) // 2]
    short_ms = [one.stream.first_s * 1e3 for one in played if one.new_tokens <= small]
    gaps_ms = [gap * 1e3 for one in played for gap in one.stream.gaps_s()]
    return {
        "chunks": way,
        "seconds in all": seconds,
        "new tokens p50": small,
        "new tokens most": new[-1],
        "first token p50 ms": p50(firsts_ms),
        "first token p99 ms": p99(firsts_ms),
        "of the shorter half p50 ms": p50(short_ms),
        "of the shorter half p99 ms": p99(short_ms),
        "token p50 ms": p50(gaps_ms),
        "token p99 ms": p99(gaps_ms),
        "token most ms": max(gaps_ms),
    }


def _ratios(rows: Sequence[Row], objective_s: float) -> Mapping[str, float]:
    """Of each way: tokens over their objective, and all turns over the time with chunks that adapt."""
    ratios: dict[str, float] = {}
    for row in rows:
        ratios[f"token p99 over objective {row['chunks']}"] = float(row["token p99 ms"]) / (1e3 * objective_s)
        ratios[f"seconds {row['chunks']}"] = float(row["seconds in all"]) / float(rows[0]["seconds in all"])
    return ratios


def _draw(path: Path, report: Report) -> None:
    groups = [(name, [(str(row["chunks"]), float(row[name])) for row in report.rows]) for name in FIGURES]
    panels(path, report.title, groups, "milliseconds")
