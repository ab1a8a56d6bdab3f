from __future__ import annotations

import pytest

from benchmarks import hits, store_cost
from benchmarks.sessions import Pair
from benchmarks.store_cost import Cost, CostPair
from devstack.rest import Turn


def turn(ttft_s: float, cached_tokens: int = 0) -> Turn:
    return Turn(
        text="",
        session_id="s",
        model="m",
        finish_reason="length",
        prompt_tokens=100,
        cached_tokens=cached_tokens,
        completion_tokens=1,
        ttft_s=ttft_s,
        total_s=ttft_s,
        timings={},
    )


def test_hits_are_compared_pair_by_pair() -> None:
    def pair(source: str, hit_s: float, computed_s: float) -> Pair:
        return Pair(source=source, reuse=turn(hit_s, 64), compute=turn(computed_s))

    report = hits.summarise(
        "hits",
        {
            64: [pair("dram", 1.0, 2.0), pair("dram", 9.0, 10.0), pair("dram", 1.0, 1.25)],
            256: [pair("disk", 3.0, 2.0)],
        },
    )
    assert report.ratios == pytest.approx({"ttft_dram_64": 0.8, "ttft_disk_256": 1.5, "ttft_worst": 1.5})


def test_costs_are_those_of_all_processes() -> None:
    def cost(prefill_s: float, kvstore_s: float, wall_s: float) -> Cost:
        return Cost(cpu_by_process_s={"prefill": prefill_s, "kvstore": kvstore_s}, wall_s=wall_s)

    pairs = [
        CostPair(with_store=cost(2.0, 0.1, 1.1), without=cost(2.0, 0.0, 1.0)),
        CostPair(with_store=cost(4.0, 0.0, 2.0), without=cost(4.0, 0.0, 2.0)),
        CostPair(with_store=cost(1.0, 0.2, 3.0), without=cost(1.0, 0.0, 1.0)),
    ]
    report = store_cost.summarise("cost", pairs)
    assert report.ratios == pytest.approx({"cpu": 1.05, "wall": 1.1})
    assert report.rows[0]["CPU ms of kvstore"] == pytest.approx(100)
    assert report.rows[1]["CPU ms of kvstore"] == 0
