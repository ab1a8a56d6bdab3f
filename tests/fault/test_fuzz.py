"""Doors that hold: random calls and bytes at each service, and clients that mean ill, for a minute."""

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
    assert reached == {"prefill", "decode", "attention_pool", "kvstore", "ledger", "rest"}
    for client in ("rest streams that nobody reads", "rest connections that say nothing", "rest bodies 400"):
        assert done.outcomes[client] > 10, client
    asked = sum(count for name, count in done.outcomes.items() if name.startswith("rest honest"))
    assert done.outcomes["rest honest answered"] > asked / 2
    assert done.outcomes.total() > 100
