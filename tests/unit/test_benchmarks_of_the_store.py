from __future__ import annotations

import os
import threading
import time

import pytest

from benchmarks import hits, store_cost
from benchmarks.hits import Trial
from benchmarks.store_cost import Cost, CostPair
from devstack.rest import Turn
from kvcommons.errors import Internal


def turn(ttft_s: float, cached_tokens: int = 0, device_tokens: int = 0) -> Turn:
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
        timings={"device_tokens": device_tokens, "prefill_ms": 1.0, "load_wait_ms": 0.0},
    )


def trial(source: str, hit: Turn, computed_s: float, loaded: Turn) -> Trial:
    return Trial(source=source, hit=hit, computed=turn(computed_s), loaded=loaded)


def test_hits_are_compared_with_the_better_way_trial_by_trial() -> None:
    def timed(source: str, hit_s: float, computed_s: float, loaded_s: float) -> Trial:
        return trial(source, turn(hit_s, 64), computed_s, turn(loaded_s, 64))

    report = hits.summarise(
        "hits",
        {
            64: [timed("dram", 1.0, 2.0, 4.0), timed("dram", 9.0, 10.0, 20.0), timed("dram", 1.0, 1.25, 2.5)],
            256: [timed("disk", 3.0, 9.0, 2.0)],
        },
    )
    assert report.ratios == pytest.approx({"ttft_dram_64": 0.8, "ttft_disk_256": 1.5, "ttft_worst": 1.5})
    assert report.rows[0]["hit / loaded"] == pytest.approx(0.4)


def test_a_hit_that_was_none_is_no_figure() -> None:
    hits.check([trial("dram", turn(1.0), 1.0, turn(1.0, 64, 4))])
    with pytest.raises(Internal, match="reports no cached token"):
        hits.check([trial("dram", turn(1.0, 64), 1.0, turn(1.0))])
    with pytest.raises(Internal, match="on the device"):
        hits.check([trial("dram", turn(1.0, 64, 48), 1.0, turn(1.0, 64))])


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


def test_what_a_process_used_is_read_from_its_clock() -> None:
    """With threads that have ended, and in finer steps than the ticks of /proc/PID/stat."""

    def use() -> None:
        give_up_s = time.thread_time() + 0.003
        while time.thread_time() < give_up_s:
            pass

    began_s = store_cost.cpu_clock_s(os.getpid())
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    before_s, clock_s, after_s = time.process_time(), store_cost.cpu_clock_s(os.getpid()), time.process_time()
    assert before_s <= clock_s <= after_s
    assert clock_s - began_s >= 0.003
    with pytest.raises(OSError):
        store_cost.cpu_clock_s(2**22 + 1)  # more than the system gives out
