from __future__ import annotations

import pytest

from kvcommons.engine.regression import Regression


def test_a_line_is_found_again() -> None:
    fit = Regression(kept=0.9)
    assert not fit
    for amount in (1.0, 5.0, 2.0, 8.0, 3.0):
        fit.observe(amount, 0.5 + 2.0 * amount)
    slope = fit.slope_s()
    assert slope == pytest.approx(2.0)
    assert slope is not None
    assert fit.at(10.0, slope) == pytest.approx(20.5)


def test_amounts_that_are_alike_say_nothing_of_the_slope() -> None:
    fit = Regression(kept=0.9)
    for amount in (100.0, 101.0, 99.0):
        fit.observe(amount, 4.0)
    assert fit.slope_s(spread=0.05) is None
    assert fit.slope_s() == pytest.approx(0.0, abs=1e-9)
    assert fit.proportional_s == pytest.approx(0.04, rel=1e-2)


def test_what_was_observed_first_is_forgotten() -> None:
    fit = Regression(kept=0.5)
    for _ in range(20):
        fit.observe(1.0, 10.0)
    for _ in range(20):
        fit.observe(1.0, 2.0)
    assert fit.mean_s == pytest.approx(2.0, abs=1e-4)


def test_an_empty_observation_keeps_its_weight() -> None:
    fit = Regression(kept=0.5, empty=(4.0, 1.0))
    assert fit.mean_s == 1.0
    for _ in range(50):
        fit.observe(10.0, 21.0)
    slope = fit.slope_s()
    assert slope == pytest.approx(2.0)
    assert slope is not None
    assert fit.at(0.0, slope) == pytest.approx(1.0)
