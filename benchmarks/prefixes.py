"""Many prefixes, little room: what does the order of the queue bring on a real stack?

The workload of Jha and Wang, section VII (text analysis), as in `prefixes_simulation`: each request takes one
of so many prefixes, with tokens of its own behind it, and as many clients as the queue is to have waiting ask
at the same time. Prefill, DRAM and disk have room for so many prefixes. In each round every policy has a
fresh stack and the same requests in the same order, one policy after the other, beginning with another one
each time; what is compared is what happened in one round.

A stack begins with empty tiers and ends with an empty queue. So that neither hides what a queue that is kept
full comes to, rates are given of all requests, and of those that ended while it was full, without the first
quarter of them, as the simulation gives them.
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
from benchmarks.store_cost import cpu_by_process_s
from devstack.rest import RestClient
from devstack.running import RunningStack
from kvcommons.errors import Internal

BLOCK_TOKENS = 64
PATIENCE_S = 3600.0  # policies that starve jobs are let to


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`room`: prefixes on the device, in DRAM and on disk. `running`: jobs that the router lets run at once.
    `token_bytes`: KV of a token."""

    prefixes: int
    capacity: tuple[int, int, int]
    requests: int
    waiting: int
    running: int
    prefix_tokens: int
    new_tokens: int
    answer_tokens: int
    vocab_size: int
    token_bytes: int
    overtakes_max: int
    look_ahead: int
    skew: float  # of Zipf's law

    @property
    def clients(self) -> int:
        """That ask at the same time."""
        return self.waiting + self.running

    def tables(self, policy: str, dtype: str) -> dict[str, dict[str, Any]]:
        """Settings of a stack with this room."""
        device, dram, disk = self.capacity
        blocks = -(-(self.prefix_tokens + self.new_tokens + self.answer_tokens) // BLOCK_TOKENS)
        engine = {
            "dtype": dtype,
            "block_tokens": BLOCK_TOKENS,
            "capacity_tokens": device * blocks * BLOCK_TOKENS,
        }
        size = self.prefix_tokens * self.token_bytes
        return {
            "router": {
                "policy": policy,
                "max_running": self.running,
                "max_queue": self.clients,
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
    """A request: seconds from its sending to its answer, when that was (seconds since the first was sent),
    tokens, and the server's account of the time from its start."""

    took_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    running_s: float
    compute_s: float
    load_wait_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One policy in one round. The last request was sent when `full` had been answered. `cpu_s`: of all
    processes of the stack, which says what the work was where others have a share in the machine."""

    policy: str
    round: int
    full: int
    cpu_s: float
    answers: Sequence[Answered]  # in the order in which they ended

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.answers[-1].ended_s

    @property
    def full_requests_per_s(self) -> float:
        """While the queue was full, without the first quarter of that; of all where it never was."""
        first, last = self.full // 4, self.full - 1
        if last <= first:
            return self.requests_per_s
        return (last - first) / (self.answers[last].ended_s - self.answers[first].ended_s)


def measure(
    stack: RunningStack, load: Workload, policy: str, turn: int, seed: int, progress: Callable[[str], None]
) -> Trial:
    """Asks all, `clients` at a time. The caller owns the stack."""
    client = RestClient(stack.url, timeout_s=PATIENCE_S)
    answers: list[Answered] = []

    def ask(prompt: list[int]) -> None:
        sent_s = time.monotonic()
        usage, timings = client.complete(
            prompt, max_tokens=load.answer_tokens, temperature=0.0, ignore_eos=True
        )
        ended_s = time.monotonic()
        answers.append(
            Answered(
                took_s=ended_s - sent_s,
                ended_s=ended_s - begun_s,
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                device_tokens=timings["device_tokens"],
                running_s=(timings["total_ms"] - timings["queue_ms"]) / 1000,
                compute_s=timings["prefill_ms"] / 1000,
                load_wait_s=timings["load_wait_ms"] / 1000,
                decode_s=timings["decode_ms"] / 1000,
            )
        )
        progress(f"round {turn + 1}, {policy}: {len(answers)} of {load.requests} requests")

    begun_s, before_s = time.monotonic(), sum(cpu_by_process_s(stack).values())
    with ThreadPoolExecutor(max_workers=load.clients) as pool:
        for asked in [pool.submit(ask, prompt) for prompt in load.prompts(seed)]:
            asked.result()
    answers.sort(key=lambda answer: answer.ended_s)
    return Trial(
        policy=policy,
        round=turn,
        full=max(0, load.requests - load.clients),
        cpu_s=sum(cpu_by_process_s(stack).values()) - before_s,
        answers=answers,
    )


def summarise(title: str, trials: Sequence[Trial]) -> Report:
    """Ratios are of throughput, over FCFS in the same round: their median, and the least and greatest of our
    own policy over FPF; by the clock, and by what the stack's processes computed."""
    if not any(answer.cached_tokens for trial in trials for answer in trial.answers):
        raise Internal("no request found its prefix: is the kvstore up, and large enough?")
    policies = list(dict.fromkeys(trial.policy for trial in trials if trial.round == 0))
    ratios: dict[str, float] = {}
    for name, rate in (("", _rate), (", queue full", _full_rate), (", by CPU seconds", _cpu_rate)):
        rates = {(trial.policy, trial.round): rate(trial) for trial in trials}
        rounds = sorted({trial.round for trial in trials})
        for policy in policies:
            if policy != "fcfs":
                over = [rates[policy, number] / rates["fcfs", number] for number in rounds]
                ratios[f"{policy}{name}"] = median(over)
        if "fpf" in policies and "bounded_fpf" in policies:
            over = [rates["bounded_fpf", number] / rates["fpf", number] for number in rounds]
            ratios[f"bounded_fpf / fpf, least{name}"] = min(over)
            ratios[f"bounded_fpf / fpf, greatest{name}"] = max(over)
    rows = [_row(policy, [trial for trial in trials if trial.policy == policy]) for policy in policies]
    return Report(title=title, ratios=ratios, rows=rows)


def _rate(trial: Trial) -> float:
    return trial.requests_per_s


def _full_rate(trial: Trial) -> float:
    return trial.full_requests_per_s


def _cpu_rate(trial: Trial) -> float:
    return len(trial.answers) / trial.cpu_s


def _row(policy: str, trials: Sequence[Trial]) -> Row:
    """Shares are of the prompts' tokens in all rounds, seconds are sums over the time in which jobs ran."""
    answers = [answer for trial in trials for answer in trial.answers]
    waits_s = [answer.took_s for answer in answers]
    tokens = sum(answer.prompt_tokens for answer in answers)
    device = sum(answer.device_tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    compute_s = sum(answer.compute_s for answer in answers)
    load_wait_s = sum(answer.load_wait_s for answer in answers)
    decode_s = sum(answer.decode_s for answer in answers)
    return {
        "policy": policy,
        "requests": len(answers),
        "requests/s": median(_rate(trial) for trial in trials),
        "requests/s, queue full": median(_full_rate(trial) for trial in trials),
        "from device %": 100 * device / tokens,
        "from the store %": 100 * (cached - device) / tokens,
        "computed %": 100 * (tokens - cached) / tokens,
        "CPU s": sum(trial.cpu_s for trial in trials),
        "compute s": compute_s,
        "waiting for loads s": load_wait_s,
        "decode s": decode_s,
        "rest s": sum(answer.running_s for answer in answers) - compute_s - load_wait_s - decode_s,
        "answer p50 s": p50(waits_s),
        "answer p99 s": p99(waits_s),
        "longest s": max(waits_s),
    }
