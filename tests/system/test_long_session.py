"""A long session at 64K tokens; `python -m tests.system.long_session` takes a million."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.system.long_session import BLOCK, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_long_session_over_two_deaths_of_everything(tmp_path: Path) -> None:
    figures = run(tmp_path, 65536)
    assert figures.tokens > 60_000
    assert figures.resumed_at_tokens >= 0.5 * figures.killed_at_tokens > 0
    assert figures.cached_tokens > 0.99 * (figures.tokens - 10 * BLOCK)
    assert math.isfinite(figures.over_disk)
