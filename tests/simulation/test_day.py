"""24 hours of a session's life, in seconds: fetches, evictions and times to live, and no leak."""

from __future__ import annotations

from tests.simulation.day import Day


def test_a_day_of_a_session_leaves_nothing_behind() -> None:
    day = Day(1)
    day.run()
    counters = day.store.stats().counters
    assert day.life_turns > 100
    assert day.life_hits > 0.9 * day.life_turns
    assert 0 < day.most_blocks < 500
    for name in ("prefetched", "evictions_dram", "evictions_disk", "expired", "forgotten"):
        assert getattr(counters, name) > 0, name
