"""The checker of histories finds what must never be."""

from __future__ import annotations

from tests.fault.histories import Commit, Read, violations


def commit(token: int, began_s: float, ended_s: float, version: int | None) -> Commit:
    return Commit(token=token, began_s=began_s, ended_s=ended_s, version=version)


def read(tokens: list[int], began_s: float, ended_s: float) -> Read:
    return Read(tokens=tokens, began_s=began_s, ended_s=ended_s)


ONE, TWO = commit(1, 0, 1, 1), commit(2, 2, 3, 2)


def test_what_may_be() -> None:
    assert violations([ONE, TWO], [], [1, 2]) == []
    # Beside a turn, both are seen, the longer one later.
    assert violations([ONE, TWO], [read([1], 2, 3), read([1, 2], 2.5, 2.6), read([1, 2], 4, 5)], [1, 2]) == []
    # Nobody heard of it: it may be there or not, and come late.
    lost = commit(3, 4, 5, None)
    assert violations([ONE, TWO, lost], [], [1, 2]) == []
    assert violations([ONE, TWO, lost], [read([1, 2], 6, 7)], [1, 2, 3]) == []


def test_what_must_not() -> None:
    assert violations([ONE, TWO], [], [1])  # lost
    assert violations([ONE, TWO], [], [1, 2, 2])  # twice
    assert violations([ONE, TWO], [], [1, 2, 9])  # from nowhere
    assert violations([ONE, TWO], [], [2, 1])  # the versions say otherwise
    assert violations([ONE, TWO], [read([2], 4, 5)], [1, 2])  # what never was
    assert violations([ONE, TWO], [read([1], 4, 5)], [1, 2])  # stale: the second turn had been acknowledged
    assert violations([ONE, TWO], [read([], 1.5, 1.6)], [1, 2])
    # A read that sees a turn which nobody has begun yet.
    assert violations([ONE, TWO], [read([1, 2], 1.2, 1.5)], [1, 2])
    # Of two reads one after the other, the later one sees less.
    lost = commit(3, 4, 5, None)
    assert violations([ONE, TWO, lost], [read([1, 2, 3], 6, 7), read([1, 2], 8, 9)], [1, 2, 3])
    # Two turns nobody heard of, in an order that their times forbid.
    first, second = commit(1, 0, 1, None), commit(2, 2, 3, None)
    assert violations([first, second], [read([1], 0.5, 1.5), read([1], 1.6, 1.7)], [1, 2]) == []
    assert violations([first, second], [read([2], 0.5, 1.5)], [2, 1])
