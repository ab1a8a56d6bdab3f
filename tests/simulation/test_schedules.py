"""A few hundred schedules of a fixed seed; `make simulate` runs thousands of fresh ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.schedules import replay

FIRST = 20_261
BATCH = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # the store speaks of every fault
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(FIRST, FIRST + 4 * BATCH, BATCH))
def test_nothing_that_must_never_happen_does(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            replay(seed)
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed}: {error}") from error


def test_stages_lose_no_block_and_compute_with_the_right_ones() -> None:
    for seed in range(FIRST, FIRST + 8 * BATCH):
        try:
            replay(seed, "stages")
        except Exception as error:
            raise AssertionError(
                f"python -m tests.simulation --kind stages --seed {seed}: {error}"
            ) from error
