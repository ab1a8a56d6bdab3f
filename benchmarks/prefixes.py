"""Many prefixes, little room: what does the order of the queue bring on a real stack?

The workload of Jha and Wang, section VII (text analysis), as in `prefixes_simulation`: each request takes one
of so many prefixes, with tokens of its own behind it, and as many clients as the queue is to have waiting ask
at the same time. Each policy has a stack of its own, whose prefill, DRAM and disk have room for so many
prefixes, and is given the same requests in the same order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Report, Row, p50, p99
from devstack.rest import RestClient
from kvcommons.errors import Internal

BLOCK_TOKENS = 64
ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`room`: prefixes on the device, in DRAM and on disk. `token_bytes`: KV of a token."""

    prefixes: int
    room: tuple[int, int, int]
    requests: int
    waiting: int
    prefix_tokens: int
    new_tokens: int
    vocab_size: int
    token_bytes: int
    overtakes_max: int
    look_ahead: int
    seed: int

    def tables(self, policy: str, dtype: str) -> dict[str, dict[str, Any]]:
        """Settings of a stack with this room."""
        device, dram, disk = self.room
        blocks = -(-(self.prefix_tokens + self.new_tokens + ANSWER_TOKENS) // BLOCK_TOKENS)
        engine = {
            "dtype": dtype,
            "block_tokens": BLOCK_TOKENS,
            "capacity_tokens": device * blocks * BLOCK_TOKENS,
        }
        size = self.prefix_tokens * self.token_bytes
        return {
            "router": {
                "policy": policy,
                "max_running": 1,
                "max_queue": self.waiting + 1,
                "overtakes_max": self.overtakes_max,
                "look_ahead_jobs": self.look_ahead,
            },
            "prefill": engine,
            "decode": engine,
            "attention_pool": {**engine, "capacity_tokens": blocks * BLOCK_TOKENS},
            "kvstore": {"dram_bytes": max(1 << 20, dram * size), "disk_bytes": disk * size * 5 // 4},
        }

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)

        def text(tokens: int) -> list[int]:
            return [rng.randrange(100, self.vocab_size) for _ in range(tokens)]

        prefixes = [text(self.prefix_tokens) for _ in range(self.prefixes)]
        return [rng.choice(prefixes) + text(self.new_tokens) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request: seconds from its sending to its answer, and tokens."""

    took_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    policy: str
    took_s: float
    answers: Sequence[Answered]


def measure(client: RestClient, load: Workload, policy: str, progress: Callable[[str], None]) -> Trial:
    """Asks all, `waiting` + 1 at a time. The caller owns the stack."""
    done = 0

    def ask(prompt: list[int]) -> Answered:
        nonlocal done
        begun = time.monotonic()
        body = client.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
        )
        done += 1
        progress(f"{policy}: {done} of {load.requests} requests")
        usage = body["usage"]
        return Answered(
            took_s=time.monotonic() - begun,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        )

    begun = time.monotonic()
    with ThreadPoolExecutor(max_workers=load.waiting + 1) as pool:
        answers = list(pool.map(ask, load.prompts()))
    return Trial(policy=policy, took_s=time.monotonic() - begun, answers=answers)


def summarise(title: str, trials: Sequence[Trial]) -> Report:
    """Ratios are of throughput, over the first trial's."""
    if not any(answer.cached_tokens for trial in trials for answer in trial.answers):
        raise Internal("no request found its prefix: is the kvstore up, and large enough?")
    first, *others = trials
    return Report(
        title=title,
        ratios={trial.policy: _rate(trial) / _rate(first) for trial in others},
        rows=[_row(trial) for trial in trials],
    )


def _rate(trial: Trial) -> float:
    return len(trial.answers) / trial.took_s


def _row(trial: Trial) -> Row:
    waits_s = [answer.took_s for answer in trial.answers]
    cached = sum(answer.cached_tokens for answer in trial.answers)
    return {
        "policy": trial.policy,
        "requests/s": _rate(trial),
        "cached %": 100 * cached / sum(answer.prompt_tokens for answer in trial.answers),
        "answer p50 s": p50(waits_s),
        "answer p99 s": p99(waits_s),
        "longest s": max(waits_s),
    }
