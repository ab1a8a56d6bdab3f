"""AttentionStore's evaluation in its table forms (§4.3.1, §4.3.5, §4.3.6).

What depends on room is told by a replay: the store's own policies on a virtual clock, with ShareGPT's
statistics, the paper's machine, its models' KV sizes, and its warm-up of 10,000 turns that are not counted.
What depends on time is measured on real stacks, whose first turns are not counted either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.replay.hierarchy import Capacity
from benchmarks.replay.replay import Setting, replay
from benchmarks.replay.sharegpt import ShareGpt, generate, session_of
from benchmarks.replay.trace import Job, Trace
from benchmarks.report import Report, Row, p50, p99
from benchmarks.sessions import Pair, Writer, prefill_rate
from devstack.rest import RestClient, Turn

Progress = Callable[[str], None]

SESSIONS, WARM_UP = 9000, 10_000  # the paper's, the latter in turns
TTL_S = 3600.0  # the paper's, and the time in which distinct sessions are counted
DEVICE_BYTES, DRAM_BYTES, DISK_BYTES = 10 << 30, 128 << 30, 10 << 40
SATURATED, SERVED = 0.5, 6.0  # turns a second that a server manages, where 5.75 come


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`paper_hits`: of figure 24, with the device alone, with DRAM and with the disk; 0.0 is "nearly 0"."""

    name: str
    token_bytes: int
    window_tokens: int
    paper_hits: tuple[float, float, float]


# K and V at two bytes a number: of all heads, or of the groups that share them.
MODELS = (
    Model(
        name="LLaMA-13B",
        token_bytes=2 * 40 * 5120 * 2,
        window_tokens=4096,
        paper_hits=(0.0, 0.034, 0.86),
    ),
    Model(
        name="LLaMA-65B",
        token_bytes=2 * 80 * 8192 * 2,
        window_tokens=2048,
        paper_hits=(0.0, 0.017, 0.71),
    ),
    Model(
        name="LLaMA-70B",
        token_bytes=2 * 80 * 8 * 128 * 2,
        window_tokens=4096,
        paper_hits=(0.0, 0.077, 0.89),
    ),
    Model(
        name="Falcon-40B",
        token_bytes=2 * 60 * 8 * 64 * 2,
        window_tokens=2048,
        paper_hits=(0.0, 0.191, 0.90),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What replays have in common. With fewer sessions than the paper's everything is smaller in proportion:
    arrivals, the machine, and the warm-up."""

    sessions: int
    block_tokens: int
    policies: Sequence[str]
    think_s: float

    @property
    def part(self) -> float:
        return self.sessions / SESSIONS

    @property
    def warm_up(self) -> int:
        """Turns that are not counted."""
        return int(WARM_UP * self.part)

    def trace(self, model: Model, turns_per_s: float) -> Trace:
        return generate(
            ShareGpt(
                sessions=self.sessions,
                sessions_per_s=self.part,
                turns_per_s=turns_per_s * self.part,
                think_s=self.think_s,
                block_tokens=self.block_tokens,
                context_tokens=model.window_tokens,
            )
        )

    def blocks(self, size_bytes: int, model: Model) -> int:
        return int(size_bytes * self.part) // (self.block_tokens * model.token_bytes)


def ratios(by_ratio: Mapping[str, Sequence[Pair]], label: str) -> Report:
    """§4.3.1: one length, several shares of it in the store. Times are those of prefill."""
    rows: list[Row] = []
    found: dict[str, float] = {}
    for ratio, pairs in by_ratio.items():
        gain = p50([prefill_rate(pair.reuse) / prefill_rate(pair.compute) for pair in pairs])
        found[f"prefill_{ratio.replace('/', '_')}"] = gain
        rows.append(
            {
                "history/new": ratio,
                "pairs": len(pairs),
                "recompute ms": p50([_prefill_ms(pair.compute) for pair in pairs]),
                "reuse ms": p50([_prefill_ms(pair.reuse) for pair in pairs]),
                "of it waiting ms": p50([pair.reuse.timings["load_wait_ms"] for pair in pairs]),
                "tokens computed": round(
                    p50([pair.reuse.prompt_tokens - pair.reuse.cached_tokens for pair in pairs])
                ),
                "times as fast": gain,
                "TTFT reuse / recompute": p50([pair.reuse.ttft_s / pair.compute.ttft_s for pair in pairs]),
            }
        )
    return Report(title=f"{label}: prefill, KV reused against recomputed", ratios=found, rows=rows)


def _prefill_ms(turn: Turn) -> float:
    prefill_ms: float = turn.timings["prefill_ms"] + turn.timings["load_wait_ms"]
    return prefill_ms


def capacity(setting: Replayed, shares: Sequence[float], progress: Progress) -> Report:
    """§4.3.5: hit rate by RCC/CCpUT, the room over what the distinct sessions of an hour could take up.

    Hits are of the blocks that had come before ("if not considering the newly arrived conversations").
    """
    model = MODELS[0]
    trace = setting.trace(model, SERVED)
    distinct = distinct_sessions(trace.jobs, TTL_S)
    whole = distinct * (model.window_tokens // setting.block_tokens)  # CCpUT, in blocks
    block_bytes = setting.block_tokens * model.token_bytes
    dram = setting.blocks(DRAM_BYTES, model)
    rows: list[Row] = []
    found: dict[str, float] = {}
    for policy in setting.policies:
        for share in shares:
            progress(f"{policy}, {share} of {whole * block_bytes / 2**40:.1f} TiB")
            blocks = int(share * whole)
            capacity = Capacity(dram_blocks=min(dram, blocks), disk_blocks=max(0, blocks - dram))
            outcome = replay(trace, policy, Setting(capacity=capacity, ttl_s=TTL_S, warm_up=setting.warm_up))
            found[f"hits_{policy}_{share:g}"] = outcome.reuse_hit_rate
            rows.append(
                {
                    "RCC/CCpUT": f"{share:g}",
                    "policy": policy,
                    "TiB": blocks * block_bytes / 2**40,
                    "hits %": 100 * outcome.reuse_hit_rate,
                    "from DRAM %": 100 * outcome.dram_share_of_hits,
                    "hits of all %": 100 * outcome.block_hit_rate,
                    "prompt tokens a computed one": 1 / (1 - outcome.token_hit_rate),
                }
            )
    return Report(
        title=f"{model.name}: {distinct:,} sessions an hour, {whole * block_bytes / 2**40:.1f} TiB at most",
        ratios=found,
        rows=rows,
    )


def distinct_sessions(jobs: Sequence[Job], within_s: float) -> int:
    """The most sessions that are served within such a time: the paper's DSpUT."""
    served: Counter[int] = Counter()
    most = oldest = 0
    for job in jobs:
        served[session_of(job)] += 1
        while jobs[oldest].start_s <= job.start_s - within_s:
            gone = session_of(jobs[oldest])
            served[gone] -= 1
            if not served[gone]:
                del served[gone]
            oldest += 1
        most = max(most, len(served))
    return most


def mediums(setting: Replayed, models: Sequence[Model], progress: Progress) -> Report:
    """§4.3.6: turns that found all of their history, with the device's 10 GB alone, with 128 GB of DRAM, and
    with 10 TB of disk."""
    rows: list[Row] = []
    found: dict[str, float] = {}
    for model in models:
        trace = setting.trace(model, SATURATED)
        device, both, disk = (
            setting.blocks(size, model) for size in (DEVICE_BYTES, DEVICE_BYTES + DRAM_BYTES, DISK_BYTES)
        )
        capacities = {
            "device": Capacity(dram_blocks=device),
            "+ DRAM": Capacity(dram_blocks=both),
            "+ disk": Capacity(dram_blocks=both, disk_blocks=disk),
        }
        for policy in setting.policies:
            row: dict[str, str | int | float] = {"model": model.name, "policy": policy}
            for (medium, capacity), paper in zip(capacities.items(), model.paper_hits, strict=True):
                progress(f"{model.name}, {policy}: {medium}")
                outcome = replay(trace, policy, Setting(capacity=capacity, warm_up=setting.warm_up))
                found[f"hits_{model.name}_{policy}_{medium.removeprefix('+ ')}"] = outcome.request_hit_rate
                row[f"{medium} %"] = 100 * outcome.request_hit_rate
                row[f"{medium}, paper %"] = 100 * paper
            rows.append(row)
    return Report(
        title="Turns that found their history, by what there is to keep KV in", ratios=found, rows=rows
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Sessions with ShareGPT's statistics in little: `scale` tokens of theirs are one here. The turns come in
    the order in which a saturated server takes them; the first `warm_up` are not counted."""

    sessions: int
    scale: int
    answer_tokens: int
    warm_up: int
    seed: int = 1

    def turns(self) -> list[tuple[int, int]]:
        """(session, tokens that it grows by, the answer's included), in order."""
        jobs = generate(ShareGpt(sessions=self.sessions, block_tokens=16, seed=self.seed)).jobs
        length: dict[int, int] = {}
        found = []
        for job in jobs:
            session = session_of(job)
            tokens = job.tokens - length.get(session, 0)
            length[session] = job.tokens
            found.append((session, max(2 * self.answer_tokens, tokens // self.scale)))
        return found

    def longest(self) -> int:
        """Tokens of the longest session at its end."""
        return max(self.lengths().values())

    def lengths(self) -> dict[int, int]:
        total: Counter[int] = Counter()
        for session, tokens in self.turns():
            total[session] += tokens
        return dict(total)


def chat(client: RestClient, load: Chat, write: Writer, progress: Progress) -> list[Turn]:
    """The turns that count."""
    turns = load.turns()
    samples = []
    for number, (session, tokens) in enumerate(turns):
        progress(f"turn {number + 1} of {len(turns)}")
        message = write(number, tokens - load.answer_tokens)
        samples.append(
            client.say(
                message,
                f"chat-{session}",
                max_tokens=load.answer_tokens,
                ignore_eos=True,
                temperature=0.0,
            )
        )
    return samples[load.warm_up :]


def measured_mediums(title: str, by_medium: Mapping[str, Sequence[Turn]]) -> Report:
    """§4.3.6 on real stacks. Ratios are prefill times over the first medium's."""
    rows: list[Row] = []
    prefill_s = {medium: sum(map(_prefill_ms, turns)) / 1000 for medium, turns in by_medium.items()}
    alone = next(iter(prefill_s))
    for medium, turns in by_medium.items():
        prompt = sum(turn.prompt_tokens for turn in turns)
        cached = sum(turn.cached_tokens for turn in turns)
        device = sum(turn.timings["device_tokens"] for turn in turns)
        ttft_ms = [turn.ttft_s * 1000 for turn in turns]
        rows.append(
            {
                "KV kept in": medium,
                "turns": len(turns),
                "tokens from cache %": 100 * cached / prompt,
                "of them the device's %": 100 * device / cached if cached else 0.0,
                "prefill s": prefill_s[medium],
                "prefill tokens/s": prompt / prefill_s[medium],
                "TTFT p50 ms": p50(ttft_ms),
                "TTFT p99 ms": p99(ttft_ms),
            }
        )
    return Report(
        title=title,
        ratios={
            f"prefill_{medium.removeprefix('+ ')}": prefill_s[medium] / prefill_s[alone]
            for medium in prefill_s
        },
        rows=rows,
    )
