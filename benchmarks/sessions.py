"""What does it bring a conversation that its KV survived?

Multi-turn chat, reuse against recomputing in one run of one stack. Before each measured turn the session is
forked: the session takes the turn from stored KV, its fork takes the same turn with `reuse` off, so that both
see the same tokens on the same machine within the same seconds; which goes first alternates. The prefill
instance has room for little more than one context per concurrent turn and sessions take turns, so that what
is reused comes from the kvstore's DRAM and not from the device. With a restart, every process is killed and
the stack started again before the last round: then it comes from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.report import Report, Row, p50, p99
from devstack.rest import RestClient, Turn
from kvcommons.errors import Internal


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`history_tokens` and `new_tokens` count prompt tokens, the chat template's included."""

    history_tokens: int
    new_tokens: int
    answer_tokens: int
    turns: int
    sessions: int
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One turn taken twice: from stored KV, and computed whole."""

    source: str  # "dram" or "disk": where the KV that is reused lies
    reuse: Turn
    compute: Turn


Progress = Callable[[str], None]
# Content of a message that makes a prompt grow by so many tokens; the first number makes contents differ.
Writer = Callable[[int, int], str]


class SessionsBenchmark:
    """Drives a running stack; the caller owns the stack."""

    def __init__(self, workload: Workload, write: Writer, progress: Progress, *, name: str = "bench") -> None:
        """`name` is what its sessions' names begin with."""
        self._load = workload
        self._name = name
        self._write = write
        self._progress = progress
        self._serial = 0

    def begin(self, client: RestClient) -> None:
        """Gives every session its history."""
        load = self._load
        tokens = load.history_tokens - load.answer_tokens
        for group in self._groups():
            self._progress(f"history of session {group[0] + 1} of {load.sessions}")
            self._together(
                [partial(self._turn, client, f"{self._name}-{i}", tokens, self._next()) for i in group]
            )

    def round(self, client: RestClient, turn: int, source: str) -> list[Pair]:
        """One turn of every session, each one taken twice."""
        pairs: list[Pair] = []
        groups = self._groups()
        alone = len(groups) == 1
        for group in groups:
            self._progress(f"turn {turn + 1} of session {group[0] + 1} of {self._load.sessions}")
            names = [f"{self._name}-{i}" for i in group]
            forks = [str(client.post(f"/v1/sessions/{name}/fork", {})["id"]) for name in names]
            serials = [self._next() for _ in group]

            def take(
                sessions: Sequence[str], reuse: bool, serials: Sequence[int] = tuple(serials)
            ) -> list[Turn]:
                tokens = self._load.new_tokens
                return self._together(
                    [
                        partial(self._turn, client, session, tokens, serial, reuse=reuse)
                        for session, serial in zip(sessions, serials, strict=True)
                    ]
                )

            # What lone sessions left on the device makes room for the whole context that is computed.
            if alone or (turn + group[0]) % 2:
                computed = take(forks, False)
                reused = take(names, True)
            else:
                reused = take(names, True)
                computed = take(forks, False)
            for fork in forks:
                client.delete_session(fork)
            for with_reuse, without in zip(reused, computed, strict=True):
                pairs.append(Pair(source=source, reuse=with_reuse, compute=without))
        _check(pairs)
        return pairs

    def _turn(
        self, client: RestClient, session: str, tokens: int, serial: int, *, reuse: bool = True
    ) -> Turn:
        return client.say(
            self._write(serial, tokens),
            session,
            max_tokens=self._load.answer_tokens,
            ignore_eos=True,
            temperature=0.0,
            reuse=reuse,
        )

    def _together(self, calls: Sequence[Callable[[], Turn]]) -> list[Turn]:
        with ThreadPoolExecutor(max_workers=len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def _groups(self) -> list[range]:
        """Sessions that take their turns at the same time."""
        load = self._load
        starts = range(0, load.sessions, load.concurrency)
        return [range(start, min(start + load.concurrency, load.sessions)) for start in starts]

    def _next(self) -> int:
        self._serial += 1
        return self._serial


def summarise(title: str, pairs: Sequence[Pair]) -> Report:
    """Ratios are medians over pairs: of TTFT (reuse over recomputing), and of prompt tokens per second of
    prefill time (how many times recomputing's)."""
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for source in dict.fromkeys(pair.source for pair in pairs):
        group = [pair for pair in pairs if pair.source == source]
        ratios[f"ttft_{source}"] = p50([pair.reuse.ttft_s / pair.compute.ttft_s for pair in group])
        ratios[f"prefill_{source}"] = p50([prefill_rate(p.reuse) / prefill_rate(p.compute) for p in group])
        rows.append(_row(f"reuse from {source}", [pair.reuse for pair in group]))
        rows.append(_row(f"recompute ({source} run)", [pair.compute for pair in group]))
    return Report(title=title, ratios=ratios, rows=rows)


# The server's parts of the time to the first token; what they leave over is dispatch, network and the client.
_PARTS_OF_TTFT = ("queue_ms", "prefill_queue_ms", "load_wait_ms", "prefill_ms")


def _row(name: str, turns: Sequence[Turn]) -> Row:
    ttft_ms = [turn.ttft_s * 1000 for turn in turns]
    row: dict[str, str | int | float] = {
        "how": name,
        "turns": len(turns),
        "prompt tokens": round(p50([turn.prompt_tokens for turn in turns])),
        "cached share": sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
        "device share": sum(t.timings["device_tokens"] for t in turns) / sum(t.prompt_tokens for t in turns),
        "TTFT p50 ms": p50(ttft_ms),
        "TTFT p99 ms": p99(ttft_ms),
        "prefill tokens/s": p50([prefill_rate(turn) for turn in turns]),
        "output tokens/s": p50([turn.tokens_per_s for turn in turns]),
    }
    for part in _PARTS_OF_TTFT:
        row[part.removesuffix("_ms").replace("_", " ") + " ms"] = p50([turn.timings[part] for turn in turns])
    row["rest ms"] = p50(
        [turn.ttft_s * 1000 - sum(turn.timings[part] for part in _PARTS_OF_TTFT) for turn in turns]
    )
    return row


def prefill_rate(turn: Turn) -> float:
    """Prompt tokens answered for, cached ones included, per second of prefill time: computing, and waiting
    for history."""
    prefill_ms: float = turn.timings["prefill_ms"] + turn.timings["load_wait_ms"]
    return turn.prompt_tokens / prefill_ms * 1000


def _check(pairs: Sequence[Pair]) -> None:
    """A benchmark that did not do what its rows say is an error, not a figure."""
    for pair in pairs:
        if pair.compute.cached_tokens:
            raise Internal(f"a turn without reuse reports {pair.compute.cached_tokens} cached tokens")
        if not pair.reuse.cached_tokens:
            raise Internal("a turn with reuse reports no cached token: is the kvstore up, and large enough?")
