"""The index of a text finds what came before, and the chances that are learnt of it."""

from __future__ import annotations

import random

import pytest

from kvcommons.engine.drafts.acceptance import Acceptance
from kvcommons.engine.drafts.index import _CHAIN_MAX, _ENOUGH, MATCH_MAX, MATCH_MIN, DraftIndex, copied


def longest(text: list[int], tail: list[int]) -> int:
    """By comparing with all of the text."""
    own = tail is text
    best = 0
    for end in range(1, len(text) + (not own)):
        length = 0
        while length < min(end, len(tail), MATCH_MAX) and text[end - 1 - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= MATCH_MIN else 0


@pytest.mark.parametrize("seed", range(20))
def test_a_match_is_the_longest_one(seed: int) -> None:
    """Whether the text was there at once or came token by token. Of many places the newest are looked at, and
    a long match is enough."""
    draw = random.Random(seed)
    text = [draw.randrange(6) for _ in range(draw.randrange(60))]
    at_once, grown = DraftIndex(text), DraftIndex([])
    for end in range(len(text)):
        grown.extend(text[: end + 1])
    for _ in range(30):
        best = longest(text, text)
        for index in (at_once, grown):
            match = index.longest(text)
            assert min(match.length, _ENOUGH) == min(best, _ENOUGH)
            if match.length:
                assert text[match.end - match.length : match.end] == text[-match.length :]
                assert match.end < len(text)
        text.append(draw.randrange(6))
        at_once.extend(text)
        grown.extend(text)


def test_another_text_is_found_in_an_index() -> None:
    known = list(range(100, 160))
    index = DraftIndex(known)
    match = index.longest(known, [7, 8, 120, 121, 122])
    assert (match.end, match.length) == (23, 3)
    assert copied(known, match, 4) == [123, 124, 125, 126]
    assert index.longest(known, [120, 122]).length == 0
    assert index.longest(known, [120]).length == 0
    assert DraftIndex([]).longest([], [1, 2]).length == 0


def test_what_repeats_goes_on_repeating() -> None:
    text = [9, 1, 2, 3, 1, 2, 3]
    match = DraftIndex(text).longest(text)
    assert (match.end, match.length) == (4, 3)
    assert copied(text, match, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_look_up_is_bounded() -> None:
    """A pair that came ten thousand times is compared with a few of its places."""
    text = [1, 2] * 10_000
    compared = 0

    class Counted(list[int]):
        def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
            nonlocal compared
            compared += 1
            return super().__getitem__(place)

    DraftIndex(text).longest(Counted(text))
    assert 0 < compared <= 2 * _CHAIN_MAX * MATCH_MAX


def test_chances_follow_what_came() -> None:
    """A match's length says how likely its token is, and further drafts follow a longer one."""
    learning = Acceptance()
    before = learning.chances(4, 8)
    assert before == sorted(before, reverse=True)
    for _ in range(200):
        learning.learn(4, [5, 6, 7], [5, 6, 8])
    first, second, third = learning.chances(4, 3)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.1
    assert learning.chances(2, 1) == Acceptance().chances(2, 1), "of other lengths nothing was learnt"
    for _ in range(200):
        learning.learn(4, [5], [1])
    assert learning.chances(4, 1)[0] < 0.05, "what was long ago counts less"
