"""Which kinds of schedules there are; a seed decides which one it makes."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.commons_schedule import CommonsSchedule
from tests.simulation.session_schedule import SessionSchedule
from tests.simulation.stage_schedule import StageSchedule
from tests.simulation.store_schedule import StoreSchedule

KINDS: dict[str, Callable[[int], None]] = {
    "block store": lambda seed: StoreSchedule(seed).run(),
    "sessions": lambda seed: SessionSchedule(seed).run(),
    "commons": lambda seed: CommonsSchedule(seed).run(),
    "stages": lambda seed: StageSchedule(seed).run(),
}

# By the seed's last digit.
_TURNS = (
    "block store",
    "sessions",
    "commons",
    "sessions",
    "block store",
    "commons",
    "block store",
    "commons",
    "commons",
    "sessions",
)


def replay(seed: int, kind: str = "") -> None:
    """Runs the schedule of this seed, the same one every time; `kind`: of that kind, whatever the seed."""
    KINDS[kind or _TURNS[seed % len(_TURNS)]](seed)
