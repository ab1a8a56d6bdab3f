"""Many prefixes, little room: what does the order of the queue bring on a real stack?

The workload of Jha and Wang, section VII (text analysis), as in `prefixes_simulation`: each request takes one
of so many prefixes, with tokens of its own behind it, and as many clients as the queue is to have waiting ask
at the same time. Prefill, DRAM and disk have room for so many prefixes. In each round every policy has a
fresh stack and the same requests in the same order, one policy after the other, beginning with another one
each time; what is compared is what happened in one round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.report import Report, Row, p50, p99
from devstack.rest import RestClient
from kvcommons.errors import Internal

BLOCK_TOKENS = 64
ANSWER_TOKENS = 4
PATIENCE_S = 3600.0  # policies that starve jobs are let to


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
    skew: float  # of Zipf's law

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
                "request_deadline_s": PATIENCE_S,
            },
            "prefill": engine,
            "decode": engine,
            "attention_pool": {**engine, "capacity_tokens": blocks * BLOCK_TOKENS},
            "kvstore": {"dram_bytes": max(1 << 20, dram * size), "disk_bytes": disk * size * 5 // 4},
        }

    def prompts(self, seed: int) -> list[list[int]]:
        rng = random.Random(seed)

        def text(tokens: int) -> list[int]:
            return [rng.randrange(100, self.vocab_size) for _ in range(tokens)]

        prefixes = [text(self.prefix_tokens) for _ in range(self.prefixes)]
        weights = [(rank + 1) ** -self.skew for rank in range(self.prefixes)]
        chosen = rng.choices(prefixes, weights, k=self.requests)
        return [prefix + text(self.new_tokens) for prefix in chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request: seconds from its sending to its answer, tokens, and the server's account of the time."""

    took_s: float
    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    compute_s: float
    load_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One policy in one round."""

    policy: str
    round: int
    took_s: float
    answers: Sequence[Answered]


def measure(
    client: RestClient, load: Workload, policy: str, turn: int, seed: int, progress: Callable[[str], None]
) -> Trial:
    """Asks all, `waiting` + 1 at a time. The caller owns the stack."""
    done = 0

    def ask(prompt: list[int]) -> Answered:
        nonlocal done
        begun = time.monotonic()
        usage, timings = client.complete(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        done += 1
        progress(f"round {turn + 1}, {policy}: {done} of {load.requests} requests")
        return Answered(
            took_s=time.monotonic() - begun,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            device_tokens=timings["device_tokens"],
            compute_s=timings["prefill_ms"] / 1000,
            load_wait_s=timings["load_wait_ms"] / 1000,
        )

    begun = time.monotonic()
    with ThreadPoolExecutor(max_workers=load.waiting + 1) as pool:
        answers = list(pool.map(ask, load.prompts(seed)))
    return Trial(policy=policy, round=turn, took_s=time.monotonic() - begun, answers=answers)


def summarise(title: str, trials: Sequence[Trial]) -> Report:
    """Ratios are of throughput, over FCFS in the same round: their median, and the least and greatest of our
    own policy over FPF."""
    if not any(answer.cached_tokens for trial in trials for answer in trial.answers):
        raise Internal("no request found its prefix: is the kvstore up, and large enough?")
    rates = {(trial.policy, trial.round): len(trial.answers) / trial.took_s for trial in trials}
    rounds = sorted({trial.round for trial in trials})
    policies = list(dict.fromkeys(trial.policy for trial in trials if trial.round == 0))
    ratios = {
        policy: median(rates[policy, number] / rates["fcfs", number] for number in rounds)
        for policy in policies
        if policy != "fcfs"
    }
    if "fpf" in policies and "bounded_fpf" in policies:
        over = [rates["bounded_fpf", number] / rates["fpf", number] for number in rounds]
        ratios |= {"bounded_fpf / fpf, least": min(over), "bounded_fpf / fpf, greatest": max(over)}
    rows = [_row(policy, [trial for trial in trials if trial.policy == policy]) for policy in policies]
    return Report(title=title, ratios=ratios, rows=rows)


def _row(policy: str, trials: Sequence[Trial]) -> Row:
    """Seconds are sums over all rounds, where nothing else is said; jobs run one at a time."""
    answers = [answer for trial in trials for answer in trial.answers]
    waits_s = [answer.took_s for answer in answers]
    took_s = sum(trial.took_s for trial in trials)
    tokens = sum(answer.prompt_tokens for answer in answers)
    compute_s = sum(answer.compute_s for answer in answers)
    load_wait_s = sum(answer.load_wait_s for answer in answers)
    return {
        "policy": policy,
        "requests": len(answers),
        "requests/s": len(answers) / took_s,
        "on device %": 100 * sum(answer.device_tokens for answer in answers) / tokens,
        "cached %": 100 * sum(answer.cached_tokens for answer in answers) / tokens,
        "compute s": compute_s,
        "waiting for loads s": load_wait_s,
        "rest s": took_s - compute_s - load_wait_s,
        "answer p50 s": p50(waits_s),
        "answer p99 s": p99(waits_s),
        "longest s": max(waits_s),
    }
