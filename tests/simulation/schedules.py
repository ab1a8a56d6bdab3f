"""Which kinds of schedules there are; a seed decides which one it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.simulation.session_schedule import SessionSchedule
from tests.simulation.store_schedule import StoreSchedule


class Schedule(Protocol):
    def run(self) -> None:
        """Lives it through. Raises Violation, or whatever a bug raises."""


KINDS: dict[str, Callable[[int], Schedule]] = {"block store": StoreSchedule, "sessions": SessionSchedule}


def replay(seed: int) -> None:
    """Runs the schedule of this seed, the same one every time."""
    kinds = list(KINDS.values())
    kinds[seed % len(kinds)](seed).run()
