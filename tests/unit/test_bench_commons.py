"""What the benchmarks of shared memory make of what they measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.long_context import _ratios as ratios
from benchmarks.long_context import together
from benchmarks.report import Report, Row
from benchmarks.settlement import MODES, Load, compare, thirds
from benchmarks.streams import Stream, prompt


def stream(times_s: Sequence[float]) -> Stream:
    return Stream(
        times_s=list(times_s), sent_s=0.0, first_s=times_s[0], ended_s=times_s[-1], tokens=len(times_s)
    )


def test_throughput_is_counted_while_all_run() -> None:
    early = stream([0, 1, 2, 3, 4])
    late = stream([2, 2.5, 3, 3.5, 4, 4.5, 5])
    assert together([early, late]) == pytest.approx(3.0)  # from 2 to 4: two of one, four of the other


def test_throughput_of_requests_that_never_met_is_of_all_their_time() -> None:
    assert together([stream([0, 1]), stream([3, 4])]) == pytest.approx(3 / 4)


def test_gaps_lie_between_neighbours() -> None:
    assert stream([1, 1.5, 3]).gaps_s() == [0.5, 1.5]


def test_prompts_are_the_same_for_the_same_seed_only() -> None:
    assert prompt(1, 50) == prompt(1, 50)
    assert prompt(1, 50)[:5] != prompt(2, 50)[:5]


def test_ratios_are_of_the_two_ways_of_one_case() -> None:
    rows: list[Row] = [
        {"part": "migration", "how": "memory of others", "delay s": 0.1},
        {"part": "migration", "how": "a larger instance", "delay s": 5.0},
        {"part": "contexts", "how": "two that share", "context": 8, "tokens/s": 30.0},
        {"part": "contexts", "how": "two that share", "context": 9, "tokens/s": 20.0},
        {"part": "contexts", "how": "one large", "context": 8, "tokens/s": 60.0},
    ]
    assert ratios(rows) == {
        "migration, delay s": pytest.approx(0.02),
        "contexts 8, tokens/s": pytest.approx(0.5),
    }


def test_the_window_that_fills_the_memory_is_no_part_of_the_first_third() -> None:
    assert thirds([100, 2, 2, 2, 5, 5, 3, 3, 3]) == pytest.approx(3 / 2)


def test_settlement_brings_kv_home_and_costs_no_throughput() -> None:
    report: Report = compare(
        Load(requests_per_minute=200.0), minutes=6, windows=6, threshold=8, seeds=[1, 2],
        progress=lambda text: None,
    )  # fmt: skip
    without, _, settled = MODES
    last = report.rows[-1]
    assert float(last[f"remote %, {settled}"]) < float(last[f"remote %, {without}"])
    assert report.ratios[f"{settled} over {without}"] > 1
