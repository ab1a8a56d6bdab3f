"""Which kinds of schedules there are; a seed decides which one it makes."""

from __future__ import annotations

from tests.simulation.session_schedule import SessionSchedule
from tests.simulation.shard_schedule import ShardSchedule
from tests.simulation.store_schedule import StoreSchedule

KINDS = ("block store", "sessions", "shards")


SHARDS_EVERY = 10  # they live long


def replay(seed: int) -> None:
    """Runs the schedule of this seed, the same one every time."""
    if seed % SHARDS_EVERY == SHARDS_EVERY - 1:
        ShardSchedule(seed).run()
    elif seed % 2:
        SessionSchedule(seed).run()
    else:
        StoreSchedule(seed).run()
