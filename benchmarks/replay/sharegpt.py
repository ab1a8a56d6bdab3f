"""Chat sessions with the published statistics of ShareGPT, as AttentionStore's evaluation uses them (§4.1).

73% of the sessions have several turns, 5.75 turns on average over all; 47% have more than 2K tokens and
30% more than 4K. Sessions arrive at random (Poisson). One server takes the turns in the order of their
arrival, at a rate that does not suffice: the queue is saturated, as it was in the paper's runs.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from benchmarks.replay.trace import Job, Trace

MULTI_TURN_SHARE = 0.73
TURNS_MEAN = 5.75
_NORMAL = NormalDist()
# Lognormal through the two published points: P(tokens > 2048) = 0.47 and P(tokens > 4096) = 0.30.
_SIGMA = math.log(2) / (_NORMAL.inv_cdf(0.70) - _NORMAL.inv_cdf(0.53))
_MU = math.log(2048) - _NORMAL.inv_cdf(0.53) * _SIGMA
# Sessions of two turns and more have a geometric number of further ones.
_FURTHER = (TURNS_MEAN - (1 - MULTI_TURN_SHARE)) / MULTI_TURN_SHARE - 2
_TURN_TOKENS_MIN = 16
_SESSION_TOKENS_MAX = 32_768
_SESSION_BITS = 24  # of a block's number the lower ones are its position in its session


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGpt:
    """`turns_per_s` is what the server manages; `context_tokens` is the model's window, of which the older
    half is dropped when it is full (§3.4: what stays is still valid); 0 is no window. Larger blocks make a
    replay as much shorter, and little else of it different: sessions use all of their blocks or none."""

    sessions: int = 9000
    sessions_per_s: float = 1.0
    turns_per_s: float = 0.5
    think_s: float = 60.0
    context_tokens: int = 0
    block_tokens: int = 64
    seed: int = 1


def generate(options: ShareGpt) -> Trace:
    """All turns of all sessions, in the order in which they are served."""
    source = random.Random(options.seed)
    arrivals: list[tuple[float, int, int]] = []  # (seconds, session, turn)
    sessions: list[list[int]] = []
    at_s = 0.0
    for number in range(options.sessions):
        at_s += source.expovariate(options.sessions_per_s)
        arrivals.append((at_s, number, 0))
        sessions.append(_turns(source))
    heapq.heapify(arrivals)
    histories = [_History(number, options) for number in range(options.sessions)]
    jobs: list[Job] = []
    free_s = 0.0
    while arrivals:
        arrive_s, number, turn = heapq.heappop(arrivals)
        start_s = max(free_s, arrive_s)
        free_s = start_s + 1 / options.turns_per_s
        run, tokens = histories[number].add(sessions[number][turn])
        jobs.append(Job(run=run, tokens=tokens, arrive_s=arrive_s, start_s=start_s))
        if turn + 1 < len(sessions[number]):
            think_s = source.expovariate(1 / options.think_s)
            heapq.heappush(arrivals, (free_s + think_s, number, turn + 1))
    return Trace(name="sharegpt", jobs=jobs, block_tokens=options.block_tokens, queued=True)


def session_of(job: Job) -> int:
    """Whose turn it is, in a trace that was generated here."""
    assert isinstance(job.run, range)
    return job.run.start >> _SESSION_BITS


def _turns(source: random.Random) -> list[int]:
    """Tokens that each turn of a session adds. Sessions of many turns have more tokens in all."""
    z = source.gauss(0, 1)
    quantile = _NORMAL.cdf(z)
    turns = 1
    if quantile > 1 - MULTI_TURN_SHARE:
        rest = (1 - quantile) / MULTI_TURN_SHARE
        turns = 2 + int(math.log(max(rest, 1e-12)) / math.log(_FURTHER / (1 + _FURTHER)))
    correlation = 0.8
    own = correlation * z + math.sqrt(1 - correlation**2) * source.gauss(0, 1)
    total = min(_SESSION_TOKENS_MAX, math.exp(_MU + _SIGMA * own))
    weights = [source.expovariate(1.0) + 0.2 for _ in range(turns)]
    return [max(_TURN_TOKENS_MIN, round(total * weight / sum(weights))) for weight in weights]


class _History:
    """A session's whole blocks, numbered by session and by position in the session."""

    def __init__(self, session: int, options: ShareGpt) -> None:
        self._first = session << _SESSION_BITS
        self._window = options.context_tokens
        self._block_tokens = options.block_tokens
        self._dropped_blocks = 0
        self._tokens = 0

    def add(self, tokens: int) -> tuple[range, int]:
        """The run of whole blocks after this turn, and the tokens in view."""
        self._tokens += tokens
        in_view = self._tokens - self._dropped_blocks * self._block_tokens
        while self._window and in_view > self._window:
            half = max(1, self._window // 2 // self._block_tokens)
            self._dropped_blocks += half
            in_view -= half * self._block_tokens
        first = self._first + self._dropped_blocks
        return range(first, self._first + self._tokens // self._block_tokens), in_view
