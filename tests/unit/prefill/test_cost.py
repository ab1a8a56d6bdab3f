from __future__ import annotations

import pytest

from services.prefill.cost import LoadOrCompute


def test_loads_until_both_rates_are_known() -> None:
    cost = LoadOrCompute()
    assert cost.worth_loading(10**12, 1)
    cost.loaded(1000, 1.0)
    assert cost.worth_loading(10**12, 1)


def test_the_faster_one_wins() -> None:
    cost = LoadOrCompute()
    cost.loaded(1_000_000, 1.0)
    cost.computed(100, 1.0)
    assert cost.worth_loading(1_000_000, 100)
    assert not cost.worth_loading(1_000_001, 100)
    assert cost.load_seconds(500_000) == pytest.approx(0.5)


def test_rates_follow_what_is_measured() -> None:
    cost = LoadOrCompute(smoothing=0.5)
    cost.loaded(100, 1.0)
    cost.loaded(300, 1.0)
    assert cost.load_bytes_per_s == pytest.approx(200)
    cost.loaded(0, 1.0)
    cost.loaded(100, 0.0)
    assert cost.load_bytes_per_s == pytest.approx(200)


def test_a_verdict_against_loading_is_tested_again() -> None:
    cost = LoadOrCompute(retry_every=3)
    cost.loaded(1, 1.0)
    cost.computed(1000, 1.0)
    assert [cost.worth_loading(100, 1) for _ in range(6)] == [False, False, True, False, False, True]
