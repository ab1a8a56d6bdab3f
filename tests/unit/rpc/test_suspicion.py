from __future__ import annotations

from kvcommons.rpc.suspicion import STALE_NEWS_S, SUSPECT_S, Suspicions


def test_a_suspicion_lapses() -> None:
    suspicions = Suspicions()
    suspicions.suspect("a", 100.0)
    assert suspicions.holds("a", 100.0)
    assert suspicions.holds("a", 100.0 + SUSPECT_S - 0.01)
    assert not suspicions.holds("a", 100.0 + SUSPECT_S)
    assert not suspicions.holds("b", 100.0)


def test_only_news_from_after_the_failure_clear_it() -> None:
    suspicions = Suspicions()
    suspicions.suspect("a", 100.0)
    suspicions.heard("a", 100.0 + STALE_NEWS_S - 0.01)
    assert suspicions.holds("a", 102.0)
    suspicions.heard("a", 100.0 + STALE_NEWS_S)
    assert not suspicions.holds("a", 102.0)


def test_the_table_does_not_grow_with_the_dead() -> None:
    suspicions = Suspicions()
    for index in range(1000):
        suspicions.suspect(f"dead-{index}", float(index))
    suspicions.forget_all_but({"dead-3"}, 2000.0)
    assert len(suspicions._since) == 1
