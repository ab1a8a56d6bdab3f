"""Traces: who wanted which blocks, and when. The format is found out from the file's first line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcommons.errors import InvalidInput

MOONCAKE_BLOCK_TOKENS = 512
_SESSION_BITS = 40  # of a block's number; the session's is above them


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. It joins the queue at `arrive_s` and is served at `start_s`."""

    run: Sequence[int]
    tokens: int
    arrive_s: float
    start_s: float
    answer_tokens: int = 0  # 0: the trace does not say
    think_s: float = 0.0  # before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs in the order in which they are served. `queued`: they arrive before they are served, so that what
    waits is known; else a look-ahead has to be asked for."""

    name: str
    jobs: Sequence[Job]
    block_tokens: int
    queued: bool = False


def read_trace(path: Path) -> Trace:
    """A trace of Mooncake's form (`hash_ids`) or of sessions (`hash_runs`), gzipped or not.

    Raises InvalidInput for what cannot be read.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read the trace {path}: {error}", param="TRACE") from None
    try:
        if rows and "hash_ids" in rows[0]:
            return _mooncake(path.name, rows)
        if rows and "hash_runs" in rows[0]:
            return _sessions(path.name, rows)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"the trace {path} has a row that is not like its first: {error}") from None
    raise InvalidInput(
        f"the trace {path} has neither hash_ids (Mooncake's form) nor hash_runs (sessions)", param="TRACE"
    )


def _mooncake(name: str, rows: Iterable[dict[str, Any]]) -> Trace:
    jobs = []
    for row in rows:
        at_s = row["timestamp"] / 1000
        run = tuple(row["hash_ids"])
        jobs.append(Job(run=run, tokens=row["input_length"], arrive_s=at_s, start_s=at_s))
    return Trace(name=name, jobs=jobs, block_tokens=MOONCAKE_BLOCK_TOKENS)


def _sessions(name: str, rows: Sequence[dict[str, Any]]) -> Trace:
    """All sessions side by side, each from its own `t`: think times are kept as they were."""
    numbers: dict[str, int] = {}
    jobs = []
    for row in rows:
        session = numbers.setdefault(row["session"], len(numbers)) << _SESSION_BITS
        run = tuple(_expand(session, row["hash_runs"]))
        jobs.append(
            Job(
                run=run,
                tokens=row["input_length"],
                arrive_s=row["t"],
                start_s=row["t"],
                answer_tokens=row.get("output_length", 0),
                think_s=row.get("think_time", 0.0),
            )
        )
    jobs.sort(key=lambda job: job.start_s)
    return Trace(name=name, jobs=jobs, block_tokens=int(rows[0]["block_tokens"]))


def session_number(job: Job) -> int:
    """Whose turn it is, in a trace of sessions."""
    return job.run[0] >> _SESSION_BITS


def _expand(session: int, runs: Iterable[Sequence[int]]) -> Iterator[int]:
    for first, count in runs:
        yield from range(session + first, session + first + count)
