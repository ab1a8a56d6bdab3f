"""How long a line of stages takes: its longest path, and by the first stage's own scheduler."""

from __future__ import annotations

import random

import pytest

from benchmarks.stages import pipeline_seconds, simulated_seconds


def test_a_line_takes_its_filling_and_the_slowest_stage() -> None:
    assert pipeline_seconds([[1.0, 1.0, 1.0]] * 10, 0.0) == 12.0
    assert pipeline_seconds([[1.0, 3.0]] * 10, 0.5) == pytest.approx(1.0 + 0.5 + 30.0)
    assert pipeline_seconds([[2.0]] * 4, 9.0) == 8.0


@pytest.mark.parametrize("stages", [1, 2, 4, 16])
def test_the_scheduler_keeps_the_line_full(stages: int) -> None:
    """The bound on what is under way costs nothing where stages take about as long as each other."""
    chunks = [range(first, first + 64) for first in range(0, 64 * 40, 64)]

    def seconds(chunk: range, stage: int) -> float:
        return 1.0 + chunk.start / 1e4

    longest = pipeline_seconds([[seconds(chunk, stage) for stage in range(stages)] for chunk in chunks], 0.01)
    simulated = simulated_seconds([64 * 40], stages, 64, seconds, 0.01)
    assert longest <= simulated * (1 + 1e-9)
    assert simulated < longest * 1.03


def test_short_prompts_pass_a_long_one_and_all_are_computed() -> None:
    draw, computed = random.Random(1), list[range]()

    def seconds(chunk: range, stage: int) -> float:
        if stage == 0:
            computed.append(chunk)
        return len(chunk) / 64

    prompts = [6400, *(draw.randrange(1, 200) for _ in range(6))]
    simulated_seconds(prompts, 2, 64, seconds, 0.0)
    assert sum(map(len, computed)) == sum(prompts)
    assert sum(chunk.start == 0 for chunk in computed[: len(computed) // 2]) == len(prompts)
