"""Drafts are verified where that brings more tokens a second, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

from kvcommons.engine.drafts.acceptance import Agreement
from kvcommons.engine.drafts.choice import ROWS_MAX, Candidate, Depth, RowSeconds, choose, draft_depth
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor

FOREVER = float("inf")


def times(row_s: float, *, fixed_s: float = 0.02, steps: dict[int, float] | None = None) -> RowSeconds:
    """Of a machine that was measured: an iteration, and each row of it; `steps`: other times by rows."""
    predictor = Predictor()
    for rows in [*range(1, 33)] * 20:
        predictor.learn(IterationWork(rows=rows), fixed_s + rows * row_s)
    made = RowSeconds(predictor)
    for rows, seconds in (steps or {}).items():
        for _ in range(100):
            made.learn(IterationWork(rows=rows), seconds)
    return made


def candidate(*chances: float) -> Candidate:
    return Candidate(chances=chances, read_bytes=0)


ONE = IterationWork(rows=1)


def test_likely_drafts_are_verified_and_unlikely_ones_are_not() -> None:
    cheap = times(0.001)
    assert choose({7: candidate(0.9, 0.8, 0.7, 0.6)}, ONE, cheap, objective_s=FOREVER) == {7: 4}
    assert choose({7: candidate(0.9, 0.8, 0.01, 0.001)}, ONE, cheap, objective_s=FOREVER) == {7: 2}
    assert choose({7: candidate(0.02)}, ONE, cheap, objective_s=FOREVER) == {}
    dear = times(0.02, fixed_s=0.0)
    assert choose({7: candidate(0.9, 0.8)}, ONE, dear, objective_s=FOREVER) == {}


def test_a_choice_ends_where_nothing_can_come_of_it() -> None:
    """Hundreds of drafts behind short matches cost a token no hundreds of estimates."""
    asked: list[float] = []

    class Counted(RowSeconds):
        def seconds(self, work: IterationWork) -> float:
            asked.append(work.rows)
            return super().seconds(work)

    predictor = Predictor()
    for rows in [*range(1, 33)] * 20:
        predictor.learn(IterationWork(rows=rows), 0.02 + rows * 0.001)
    short = {key: candidate(*[0.2 * 0.4**depth for depth in range(16)]) for key in range(8)}
    eight = IterationWork(rows=8)
    assert choose(short, eight, Counted(predictor), objective_s=FOREVER) == {}
    assert len(asked) < 12
    likely = short | {3: candidate(*[0.98**depth for depth in range(1, 17)])}
    assert choose(likely, eight, Counted(predictor), objective_s=FOREVER)[3] == 16


def test_nothing_is_verified_before_anything_was_measured() -> None:
    assert choose({7: candidate(0.9)}, ONE, RowSeconds(Predictor()), objective_s=FOREVER) == {}


def test_a_step_in_what_rows_cost_is_passed_over_or_kept_below() -> None:
    """Two rows take twice as long as one, and four hardly longer than two."""
    steps = {2: 0.04, 3: 0.041, 4: 0.042, 5: 0.1}
    stepped = times(0.0, steps=steps)
    assert choose({7: candidate(0.95, 0.9, 0.85, 0.8)}, ONE, stepped, objective_s=FOREVER) == {7: 3}
    assert choose({7: candidate(0.5, 0.1)}, ONE, stepped, objective_s=FOREVER) == {}


def test_rows_go_to_whoever_makes_most_of_them() -> None:
    both = {1: candidate(0.9, 0.81, 0.73), 2: candidate(0.5, 0.1)}
    chosen = choose(both, IterationWork(rows=2), times(0.003), objective_s=FOREVER)
    assert chosen == {1: 3, 2: 1}
    assert choose(both, IterationWork(rows=2), times(0.012), objective_s=FOREVER) == {1: 3}


def test_an_iteration_keeps_its_objective_and_its_room() -> None:
    likely = {key: candidate(*[0.99] * 16) for key in range(1, 9)}
    base, cheap = IterationWork(rows=8), times(0.001)
    chosen = choose(likely, base, cheap, objective_s=0.035)
    assert sum(chosen.values()) <= 7
    assert chosen
    assert sum(choose(likely, base, cheap, objective_s=FOREVER).values()) == ROWS_MAX
    assert sum(choose(likely, base, cheap, objective_s=0.01).values()) == ROWS_MAX, "which is missed anyway"


def test_long_contexts_cost_what_each_row_reads() -> None:
    predictor = Predictor()
    for rows in [*range(1, 33)] * 20:
        for size in (1 << 20, 1 << 26):
            work = IterationWork(rows=rows, read_bytes=rows * size)
            predictor.learn(work, 0.02 + rows * (0.0005 + size * 1e-9 / 2))
    reading = RowSeconds(predictor)
    for size, verified in ((1 << 20, True), (1 << 26, False)):
        one = {7: Candidate(chances=(0.5,), read_bytes=size)}
        base = IterationWork(rows=1, read_bytes=size)
        assert bool(choose(one, base, reading, objective_s=FOREVER)) is verified


def test_a_slow_moment_is_forgotten() -> None:
    """What was dear once is tried again in the end, however rarely."""
    one = {7: candidate(0.6)}
    known = times(0.001, steps={2: 0.06})
    assert choose(one, ONE, known, objective_s=FOREVER) == {}
    tried = 0
    for _ in range(20_000):
        if choose(one, ONE, known, objective_s=FOREVER):
            tried += 1
            known.learn(replace(ONE, rows=2), 0.06)
        known.learn(ONE, 0.021)
    assert 0 < tried < 200, "less than one iteration of a hundred"


def depth_of(*chances: float, step_s: float, row_s: float = 0.0005, objective_s: float = FOREVER) -> Depth:
    base = IterationWork(rows=len(chances))
    known = times(row_s)
    return draft_depth(chances, 0, base, known, step_s=step_s, most=16, objective_s=objective_s)


def test_a_draft_model_is_asked_for_as_many_as_pay_for_its_steps() -> None:
    sure, likely, rarely = (depth_of(chance, step_s=0.002) for chance in (0.97, 0.7, 0.15))
    assert sure.drafts > likely.drafts > rarely.drafts == 0
    assert sure.saved_s > likely.saved_s > rarely.saved_s == 0.0
    assert depth_of(0.7, step_s=0.02).drafts == 0, "it takes as long as the model itself"
    assert depth_of(1.0, step_s=0.0).drafts == 16
    by_hand = (0.0205 + 0.0025 * 1) / 1.7
    assert depth_of(0.7, step_s=0.002).saved_s >= 0.0205 - by_hand > 0


def test_a_draft_model_is_asked_for_no_more_rows_than_there_are() -> None:
    for sequences in (1, 8, 32, 40):
        asked = depth_of(*[0.99] * sequences, step_s=0.0001, row_s=0.00001).drafts
        assert asked * sequences <= ROWS_MAX
        assert (asked > 0) == (sequences <= ROWS_MAX)


def test_a_draft_model_keeps_the_objective() -> None:
    asked = depth_of(0.95, step_s=0.002, objective_s=0.03).drafts
    assert 0 < asked <= 3
    assert depth_of(0.95, step_s=0.002, objective_s=0.01).drafts > 3, "which is missed anyway"
    assert draft_depth([], 0, ONE, times(0.001), step_s=0.0, most=4, objective_s=1.0) == Depth()
    unknown = RowSeconds(Predictor())
    assert draft_depth([1.0], 0, ONE, unknown, step_s=0.0, most=4, objective_s=1.0) == Depth()


def test_what_a_draft_model_has_shown_counts_until_it_fades() -> None:
    made = Agreement(kept=0.97, expected=0.5)
    assert made.share == 0.5
    made.learn([1, 2, 3], [1, 2, 4, 5])
    assert made.share == (1.5 + 0.97 + 0.97**2) / (3 + 1 + 0.97 + 0.97**2)
    for _ in range(100):
        made.learn([1], [2])
    assert made.share < 0.1
    for _ in range(200):
        made.fade()
    low = made.share
    assert low < 0.12
    for _ in range(4000):
        made.fade()
    assert 0.49 < made.share < 0.5
