"""Who is slow, beside its peers and beside the deadline."""

from __future__ import annotations

from services.decode.borrowing.slowness import ANSWERS_MIN, LOOKS, PROBATION_S, REMEMBERED_S, Slowness


class Watched:
    """An instance's iterations, a second between two looks."""

    def __init__(self, *, layers: int = 4, deadline_s: float = 2.0) -> None:
        self.now_s = 100.0
        self.slowness = Slowness(layers=layers, deadline_s=deadline_s, clock=lambda: self.now_s)
        self.owed: dict[str, int] = {}

    def second(self, answers: int = ANSWERS_MIN, **wait_ms: float) -> list[str]:
        for _ in range(answers):
            for holder, each_ms in wait_ms.items():
                self.slowness.waited(holder, each_ms / 1000, True)
        self.now_s += 1.0
        return self.slowness.look(self.owed)


def test_far_beyond_its_peers_for_longer_than_a_moment() -> None:
    watched = Watched()
    for _ in range(5):
        assert watched.second(a=0.4, b=0.1, c=0.6) == []
    assert watched.second(a=30, b=0.1, c=0.6) == []
    assert watched.second(a=0.4, b=0.1, c=0.6) == []  # it was a moment
    found = [watched.second(a=30, b=0.1, c=0.6) for _ in range(LOOKS)]
    assert found == [[]] * (LOOKS - 1) + [["a"]]
    assert watched.slowness.slow("a")
    assert not watched.slowness.slow("b")


def test_a_little_slower_or_all_alike_is_not_slow() -> None:
    watched = Watched()
    for _ in range(5):
        assert watched.second(a=4, b=0.1) == []
        assert watched.second(a=30, b=20, c=35) == []
        assert watched.second(a=30) == []  # it has no peer


def test_who_has_more_to_read_may_take_longer() -> None:
    watched = Watched()
    watched.owed = {"a": 1000, "b": 10}
    assert [watched.second(a=30, b=0.5) for _ in range(3)] == [[]] * 3
    watched.owed = {"a": 10, "b": 10}
    assert [watched.second(a=30, b=0.5) for _ in range(3)][-1] == ["a"]


def test_a_peer_counts_for_a_while_after_its_last_answer() -> None:
    """Sequences that the slow one does not hold up end earlier."""
    watched = Watched()
    watched.owed = {"a": 10, "b": 10}
    assert watched.second(a=0.5, b=0.5) == []
    watched.owed = {"a": 10}
    assert watched.second(b=0.5) == []  # in this second its sequence has ended
    assert [watched.second(a=30) for _ in range(LOOKS)] == [[]] * (LOOKS - 1) + [["a"]]
    long_ago = Watched()
    assert long_ago.second(a=0.5, b=0.5) == []
    long_ago.now_s += REMEMBERED_S
    assert [long_ago.second(a=30) for _ in range(3)] == [[]] * 3


def test_a_share_of_the_deadline_needs_no_peer() -> None:
    watched = Watched(layers=4, deadline_s=2.0)
    assert [watched.second(answers=2, a=300) for _ in range(3)][-1] == ["a"]


def test_a_missed_deadline_is_enough() -> None:
    watched = Watched()
    watched.slowness.waited("a", 2.0, False)
    assert watched.slowness.slow("a")


def test_it_is_asked_again_after_a_while_and_judged_anew() -> None:
    watched = Watched()
    for _ in range(LOOKS):
        watched.second(a=30, b=0.5)
    watched.now_s += PROBATION_S - 1
    assert watched.second(b=0.5) == []
    assert not watched.slowness.slow("a")
    assert watched.second(a=0.5, b=0.5) == []


def test_few_answers_say_nothing() -> None:
    watched = Watched()
    assert [watched.second(answers=1, a=30, b=0.5) for _ in range(ANSWERS_MIN)] == [[]] * ANSWERS_MIN
