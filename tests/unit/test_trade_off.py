"""Iterations over several holders, put together from what one process takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.trade_off import HoldersCosts, dominated, iterations
from kvcommons.engine.iteration_costs import IterationCosts, IterationWork

COSTS = IterationCosts.of({"iterations": 0.01, "few_rows": 1e-4, "more_rows": 1e-4, "pairs": 1e-8})
ONE = HoldersCosts(costs=COSTS, asked_s=0.005, rows=2, rows_bytes=0, holders=1)
CONTEXT = 10_000


def test_attention_is_divided_and_the_rest_stays() -> None:
    """Equation 10."""
    work = ONE.beside.beside(IterationWork.of_chunk(range(5000, 5100)))
    attention_s, rest_s = 1e-8 * work.pairs, 0.01 + 1e-4 * 102
    for holders, asked_s in ((1, 0.0), (2, 0.005), (4, 0.005)):
        over = replace(ONE, holders=holders)
        assert over.seconds(work) == pytest.approx(rest_s + asked_s + attention_s / holders)


def test_chunks_cover_the_prompt_and_keep_an_objective() -> None:
    fixed = iterations(ONE, CONTEXT, 512)
    assert [stop for stop, _ in fixed] == [*range(512, CONTEXT, 512), CONTEXT]
    adaptive = iterations(ONE, CONTEXT, 4096, 0.04)
    assert adaptive[-1][0] == CONTEXT
    sizes = [stop - before for (stop, _), (before, _) in zip(adaptive[1:-1], adaptive, strict=False)]
    assert sizes == sorted(sizes, reverse=True), "smaller as the context grows"
    assert max(seconds for _, seconds in adaptive) <= 0.04


def test_holders_join_as_the_prompt_grows() -> None:
    joining = replace(ONE, holders=4, share=2500)
    assert [joining.at(tokens) for tokens in (1, 2500, 2501, 7500, 10_000, 20_000)] == [1, 1, 2, 3, 4, 4]
    made, alone = (iterations(over, CONTEXT, 500) for over in (joining, ONE))
    assert made[:5] == alone[:5]
    assert made[-1][1] == pytest.approx(iterations(replace(ONE, holders=4), CONTEXT, 500)[-1][1])


def test_what_is_worse_in_one_regard_and_better_in_none_is_dominated() -> None:
    assert dominated([(1.0, 5.0), (2.0, 5.0), (2.0, 4.0), (3.0, 4.5)]) == [False, True, False, True]
