"""Holders of borrowed KV, and all around them, are killed and paused at random: every stream is exact or a
clear error, every block comes back, and what the processes wrote down is a history without a fault.

A minute of it; `KVCOMMONS_TEST_CHAOS_S=600` makes it ten, with 60 faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fault.commons_chaos import run
from tests.machine import scaled

SECONDS = float(os.environ.get("KVCOMMONS_TEST_CHAOS_S", "60"))
SEED = int(os.environ.get("KVCOMMONS_TEST_SEED", "20261122"))
FAULT_EVERY_S = 10.0


@pytest.mark.slow
@pytest.mark.timeout(int(SECONDS) + 300)
def test_streams_are_exact_and_blocks_come_back_whoever_dies(tmp_path: Path) -> None:
    print(f"replay with KVCOMMONS_TEST_SEED={SEED}")
    chaos = run(tmp_path, faults=max(10, int(SECONDS / FAULT_EVERY_S)), seconds=scaled(SECONDS), seed=SEED)
    print(chaos.reported())
    assert chaos.wrong() == []
    # It was about borrowed blocks, that moved.
    assert min(chaos.history.seen[event] for event in ("borrow", "switch", "trim")) > 0
