"""How likely it is that a draft is the token that comes. Pure.

A match is looked for before each token, whether or not its drafts are verified then: what comes next shows
whether they would have been right. So a sequence in which they do not pay costs a look-up a token and no row
of an iteration, and yet it is known at once when they begin to. A draft model is asked where it pays alone:
elsewhere what is known of it fades.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kvcommons.engine.drafts.index import MATCH_MAX

# Lengths of matches that are told apart, and how often the token behind such a match is expected to come
# before anything was seen of a sequence: a guess, which a few tokens of each length replace.
_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24)
_EXPECTED = (0.20, 0.35, 0.45, 0.55, 0.65, 0.75, 0.80, 0.85)
_EXPECTED_WEIGHT = 3.0  # of observations
_KEPT = 0.97  # of an observation's weight, by the next one of its length
_BUCKETS = tuple(max(bisect_right(_LENGTHS, length) - 1, 0) for length in range(MATCH_MAX + 1))


class Acceptance:
    """Of one sequence's drafts that were found in a text, by the length of the match that they follow. Each
    further draft follows a match that is one token longer."""

    def __init__(self) -> None:
        self._right = [_EXPECTED_WEIGHT * share for share in _EXPECTED]
        self._seen = [_EXPECTED_WEIGHT] * len(_EXPECTED)

    def learn(self, length: int, drafts: Sequence[int], came: Sequence[int]) -> None:
        """`drafts` were what followed a match of `length` tokens; `came` is what came then, up to now."""
        for depth, (draft, token) in enumerate(zip(drafts, came, strict=False)):
            bucket = _BUCKETS[min(length + depth, MATCH_MAX)]
            self._right[bucket] = _KEPT * self._right[bucket] + (draft == token)
            self._seen[bucket] = _KEPT * self._seen[bucket] + 1.0
            if draft != token:
                return

    def chances(self, length: int, count: int) -> list[float]:
        """Of each of so many drafts behind a match of `length` tokens: how likely it and all before it are
        right."""
        chances, chance = [], 1.0
        for depth in range(count):
            bucket = _BUCKETS[min(length + depth, MATCH_MAX)]
            chance *= self._right[bucket] / self._seen[bucket]
            chances.append(chance)
        return chances


_AGREES = 0.6  # how often a draft model is expected to be right before anything was seen: a guess
FADES = 0.998  # of what it has shown, with each token for which it was not asked


class Agreement:
    """How often what a draft model samples is what comes, of one sequence or of all."""

    def __init__(self, *, kept: float, expected: float = _AGREES) -> None:
        """`kept`: of an observation's weight, by the next one. `expected` counts as a few observations, and
        as all of them once they have faded: a model that was not worth asking is asked again."""
        self._kept, self._expected = kept, expected
        self._right = self._seen = 0.0

    @property
    def share(self) -> float:
        return (self._right + _EXPECTED_WEIGHT * self._expected) / (self._seen + _EXPECTED_WEIGHT)

    def learn(self, drafts: Sequence[int], came: Sequence[int]) -> None:
        """`came` is what came where it had sampled `drafts`, up to now."""
        for draft, token in zip(drafts, came, strict=False):
            self._right = self._kept * self._right + (draft == token)
            self._seen = self._kept * self._seen + 1.0
            if draft != token:
                return

    def fade(self) -> None:
        self._right, self._seen = FADES * self._right, FADES * self._seen
