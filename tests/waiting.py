"""Waits of tests: each polls a condition until it holds, with a deadline, and says what did not come true."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tests.machine import scaled

# The next look comes after a twentieth of what was waited so far: a short wait ends at once, and a long one
# takes no core from what it waits for.
POLL_S_MIN, POLL_S_MAX = 0.002, 0.02
WITHIN_S = 20.0
EXPECTED = "what the test waits for"


def wait_until(condition: Callable[[], object], what: str = EXPECTED, *, within_s: float = WITHIN_S) -> float:
    """Seconds until the condition held; `within_s` on a quiet machine. Blocks its thread meanwhile."""
    began_s = time.monotonic()
    while not condition():
        time.sleep(_poll_s(what, began_s, within_s))
    return time.monotonic() - began_s


async def eventually(
    condition: Callable[[], Any], what: str = EXPECTED, *, within_s: float = WITHIN_S
) -> float:
    """The same on an event loop; what the condition returns is awaited where it has to be."""
    began_s = time.monotonic()
    while True:
        held = condition()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return time.monotonic() - began_s
        await asyncio.sleep(_poll_s(what, began_s, within_s))


def _poll_s(what: str, began_s: float, within_s: float) -> float:
    waited_s = time.monotonic() - began_s
    assert waited_s < scaled(within_s), f"not within {scaled(within_s)} s: {what}"
    return min(max(waited_s / 20, POLL_S_MIN), POLL_S_MAX)
