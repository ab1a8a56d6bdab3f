"""Doors that hold: random calls and bytes at each service, for a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.fuzz import fuzz
from tests.machine import scaled


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_breaks(seed: int, tmp_path: Path) -> None:
    done = fuzz(seed, scaled(60.0), tmp_path)
    reached = {name.split(" ")[0] for name in done.outcomes}
    assert reached == {"prefill", "decode", "attention_pool", "kvstore", "ledger"}
    assert done.outcomes.total() > 100
