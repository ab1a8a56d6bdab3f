"""One policy on one trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.replay.hierarchy import Capacity, Hierarchy
from benchmarks.replay.optimum import Belady
from benchmarks.replay.trace import Job, Trace
from services.kvstore.policies.base import Policy
from services.kvstore.policies.catalogue import CATALOGUE, PolicyEntry, policy_entry

OPTIMA = {"belady": False, "belady-prefix": True}
POLICIES = (*CATALOGUE, *OPTIMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`look_ahead`: requests known after the one that is served; None: those that have arrived by then.
    The first `warm_up` requests fill the store and are not counted."""

    capacity: Capacity
    look_ahead: int | None = None
    ttl_s: float | None = None
    warm_up: int = 0
    block_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rates are shares of all blocks asked for; a hit is one in a contiguous run from the first block."""

    policy: str
    ttl_s: float | None
    requests: int
    blocks: int
    block_hit_rate: float
    dram_hit_rate: float
    disk_hit_rate: float
    miss_rate: float
    reuse_hit_rate: float  # of the blocks that had come before, in a run from the first
    request_hit_rate: float  # requests that found all of those, where there were any, of all requests
    dram_share_of_hits: float
    token_hit_rate: float
    token_dram_rate: float
    token_disk_rate: float
    misses: int
    fetched_bytes: int
    loaded_bytes: int
    demoted_bytes: int
    dropped_blocks: int
    expired_blocks: int
    seconds: float

    @property
    def label(self) -> str:
        """For a table's row."""
        return self.policy if self.ttl_s is None else f"{self.policy}, {self.ttl_s:,.0f} s"


def replay(trace: Trace, policy: str, setting: Setting) -> Outcome:
    """Raises InvalidInput for an unknown policy."""
    began = time.perf_counter()
    chosen, make = _maker(trace, policy)
    hierarchy: Hierarchy[int] = Hierarchy(
        setting.capacity,
        make,
        fetches=chosen.looks_ahead,
        paper_window=chosen.paper_window,
        ttl_s=setting.ttl_s,
    )
    tally = _Tally(trace.block_tokens)
    jobs = trace.jobs
    known = 0
    for number, job in enumerate(jobs):
        if chosen.looks_ahead:
            end = _known_end(trace, number, known, setting.look_ahead)
            for ahead in range(max(known, number), end):
                hierarchy.expect(ahead, jobs[ahead].run)
            known = max(known, end)
        served = hierarchy.serve(number, job.run, job.start_s)
        tally.add(job, served.dram, served.disk, counts=number >= setting.warm_up)
        if number + 1 == setting.warm_up:
            hierarchy.moves = type(hierarchy.moves)()
    moves, size = hierarchy.moves, setting.block_bytes
    return Outcome(
        policy=policy,
        ttl_s=setting.ttl_s,
        requests=tally.requests,
        blocks=tally.blocks,
        **tally.rates(),
        misses=tally.blocks - tally.dram - tally.disk,
        fetched_bytes=moves.fetched * size,
        loaded_bytes=moves.loaded * size,
        demoted_bytes=moves.demoted * size,
        dropped_blocks=moves.dropped,
        expired_blocks=moves.expired,
        seconds=round(time.perf_counter() - began, 3),
    )


def _maker(trace: Trace, policy: str) -> tuple[PolicyEntry, Callable[[], Policy[int]]]:
    if policy in OPTIMA:
        uses: dict[int, list[int]] = {}
        for number, job in enumerate(trace.jobs):
            for block in job.run:
                uses.setdefault(block, []).append(number)
        deepest_first = OPTIMA[policy]
        return PolicyEntry(make=_unused, looks_ahead=True), lambda: Belady(uses, deepest_first=deepest_first)
    chosen = policy_entry(policy)
    return chosen, chosen.make


def _unused() -> Policy[int]:
    raise AssertionError("the optimum is made from the trace")


def _known_end(trace: Trace, number: int, known: int, look_ahead: int | None) -> int:
    """The first job that is not known when this one is served."""
    jobs = trace.jobs
    if look_ahead is not None:
        limit = min(len(jobs), number + look_ahead + 1)
    else:
        limit = len(jobs) if trace.queued else number
    if not trace.queued:
        return limit
    end = max(known, number)
    while end < limit and jobs[end].arrive_s <= jobs[number].start_s:
        end += 1
    return end


class _Tally:
    def __init__(self, block_tokens: int) -> None:
        self.requests = self.blocks = self.dram = self.disk = 0
        self._block_tokens = block_tokens
        self._found_all = 0
        self._reusable = self._tokens = self._dram_tokens = self._disk_tokens = 0
        self._seen: set[int] = set()

    def add(self, job: Job, dram: int, disk: int, *, counts: bool) -> None:
        run = job.run
        if counts:
            self.requests += 1
            self.blocks += len(run)
            self.dram += dram
            self.disk += disk
            reusable = _leading(run, self._seen)
            self._reusable += reusable
            self._found_all += 0 < reusable <= dram + disk
            self._tokens += job.tokens
            # Of a run that ends in a block that is not full, that one counts for what is in it.
            hit_tokens = min(job.tokens, (dram + disk) * self._block_tokens)
            disk_tokens = min(hit_tokens, disk * self._block_tokens)
            self._disk_tokens += disk_tokens
            self._dram_tokens += hit_tokens - disk_tokens
        self._seen.update(run)

    def rates(self) -> dict[str, float]:
        hits = self.dram + self.disk
        tokens = self._dram_tokens + self._disk_tokens
        return {
            "block_hit_rate": _rate(hits, self.blocks),
            "dram_hit_rate": _rate(self.dram, self.blocks),
            "disk_hit_rate": _rate(self.disk, self.blocks),
            "miss_rate": _rate(self.blocks - hits, self.blocks),
            "reuse_hit_rate": _rate(hits, self._reusable),
            "request_hit_rate": _rate(self._found_all, self.requests),
            "dram_share_of_hits": _rate(self.dram, hits),
            "token_hit_rate": _rate(tokens, self._tokens),
            "token_dram_rate": _rate(self._dram_tokens, self._tokens),
            "token_disk_rate": _rate(self._disk_tokens, self._tokens),
        }


def _leading(run: Sequence[int], seen: set[int]) -> int:
    for depth, block in enumerate(run):
        if block not in seen:
            return depth
    return len(run)


def _rate(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0
