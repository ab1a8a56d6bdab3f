"""Where the last tokens of a text have come before: the match finder of LZ77, over token ids. Pure.

What is drafted next is what followed the longest match. A text is indexed by chains, as in zlib: a table has,
by a hash of two neighbouring tokens, where such a pair came last, and each place knows the one before it.
Both take four bytes a token. A token is added in constant time, and a look-up compares with the newest
`_CHAIN_MAX` places.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MATCH_MIN = 2  # tokens: what is hashed
MATCH_MAX = 32  # a longer match says no more than this
_CHAIN_MAX = 32
_ENOUGH = 12  # a match of so many tokens is taken before others are looked at
_BITS_MIN, _BITS_MAX = 10, 17  # of the table's size
_ODD, _OTHER = 40503, 30011


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The last `length` tokens end at index `end` of the text, too."""

    end: int
    length: int


NO_MATCH = Match(end=0, length=0)


class DraftIndex:
    """Of one list of tokens that only grows. The list is its owner's, who passes it in."""

    def __init__(self, tokens: Sequence[int], most: int = 0) -> None:
        """Takes about 40 nanoseconds a token. `most`: to which the text will grow, as far as that is
        known."""
        bits = min(max(max(len(tokens), most).bit_length(), _BITS_MIN), _BITS_MAX)
        self._mask = (1 << bits) - 1
        self._last, self._before = self._chains(tokens)
        self._tokens = len(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text has grown to these."""
        last, before, mask = self._last, self._before, self._mask
        for place in range(self._tokens, len(tokens)):
            if not place:
                before.append(-1)
                continue
            bucket = (tokens[place - 1] * _ODD ^ tokens[place] * _OTHER) & mask
            before.append(last[bucket])
            last[bucket] = place
        self._tokens = len(tokens)

    def longest(self, text: Sequence[int], tail: Sequence[int] | None = None) -> Match:
        """The longest match in `text`, which is what is indexed, of the last tokens of `tail`; None: of the
        text itself. Of several the newest."""
        own = tail is None
        tail = text if tail is None else tail
        if len(tail) < MATCH_MIN or self._tokens < MATCH_MIN:
            return NO_MATCH
        bucket = (tail[-2] * _ODD ^ tail[-1] * _OTHER) & self._mask
        place, best = self._last[bucket], NO_MATCH
        if own:
            place = self._before[place]  # the text's end itself
        for _ in range(_CHAIN_MAX):
            if place < 1:
                break
            length = matching(text, place, tail)
            if length > best.length:
                best = Match(end=place + 1, length=length)
                if length >= _ENOUGH:
                    break
            place = self._before[place]
        return best if best.length >= MATCH_MIN else NO_MATCH

    def _chains(self, tokens: Sequence[int]) -> tuple[array[int], array[int]]:
        """By bucket the last place of a pair's second token, and by place the one before it in its bucket;
        -1 where there is none."""
        last = np.full(self._mask + 1, -1, dtype=np.int32)
        before = np.full(len(tokens), -1, dtype=np.int32)
        if len(tokens) >= MATCH_MIN:
            ids = np.array(tokens, dtype=np.int64)
            buckets = ((ids[:-1] * _ODD ^ ids[1:] * _OTHER) & self._mask).astype(np.int32)
            order = np.argsort(buckets, kind="stable").astype(np.int32)
            same = buckets[order[1:]] == buckets[order[:-1]]
            before[order[1:][same] + 1] = order[:-1][same] + 1
            ends = np.append(~same, True)
            last[buckets[order[ends]]] = order[ends] + 1
        return array("i", last.tobytes()), array("i", before.tobytes())


def copied(text: Sequence[int], match: Match, count: int) -> list[int]:
    """What followed the match: so many tokens, which go on with themselves where the text ends, as what
    repeats does."""
    found = list(text[match.end : match.end + count])
    period = len(found)
    while found and len(found) < count:
        found.append(found[len(found) - period])
    return found


def matching(text: Sequence[int], place: int, tail: Sequence[int]) -> int:
    """How many tokens that end with the one at `place` are the last ones of `tail`."""
    most = min(place + 1, len(tail), MATCH_MAX)
    length = 0
    while length < most and text[place - length] == tail[-1 - length]:
        length += 1
    return length
