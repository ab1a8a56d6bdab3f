"""How far a document is, how fast it goes on, and how much of it is computed next. Pure."""

from __future__ import annotations

from math import sqrt

# Parts begin small, for nobody knows yet how long a token takes here, and grow at most so much at a time.
_FIRST_TOKENS = 1024
_GROWTH = 4
# Measured times of former parts count so much less with each further one.
_KEPT = 0.9


class DocumentProgress:
    """Of the first `tokens` positions of a context, `before` belong to its session's history and the others
    to the document. Those up to `computed` have KV.

    A token attends to all before it, so a part's seconds are `a` for each of its tokens and `b` for each pair
    of a token and one before it, by least squares that forget; neither is below zero.
    """

    def __init__(self, *, before: int, tokens: int, block_tokens: int, part_s: float) -> None:
        """`part_s`: how long the computation of a part is to take."""
        self.before = before
        self.tokens = tokens
        self.computed = before
        self._block_tokens = block_tokens
        self._part_s = part_s
        self._largest = _FIRST_TOKENS
        self._xx = self._xp = self._pp = self._xs = self._ps = 0.0  # sums over parts: tokens, pairs, seconds

    @property
    def done(self) -> bool:
        return self.computed >= self.tokens

    @property
    def document_tokens(self) -> int:
        return self.tokens - self.before

    @property
    def computed_tokens(self) -> int:
        """Of the document."""
        return self.computed - self.before

    @property
    def tokens_per_s(self) -> float:
        """Where it stands now; 0 until measured."""
        seconds = self._seconds(max(self.computed - 1, 0), 1)
        return 1 / seconds if seconds > 0 else 0.0

    @property
    def left_s(self) -> float:
        """Until all is computed; 0 until measured."""
        return self._seconds(self.computed, self.tokens - self.computed)

    def found(self, tokens: int) -> None:
        """So many leading tokens of the context have KV already."""
        self.computed = min(max(tokens, self.computed), self.tokens)

    def next_end(self) -> int:
        """Where the next part ends: a block's border, or the end."""
        left = self.tokens - self.computed
        size = min(max(self._within(self._part_s), self._block_tokens), self._largest, left)
        end = self.computed + size
        return self.tokens if size == left else max(end - end % self._block_tokens, self.computed + 1)

    def part_done(self, end: int, seconds: float, *, cached: int | None) -> None:
        """The context is computed up to `end`. `cached`: of its leading tokens, those whose KV was found;
        None where nobody knows."""
        if cached is not None and cached < end:
            tokens, pairs = end - cached, _pairs(cached, end - cached)
            self._xx = _KEPT * self._xx + tokens * tokens
            self._xp = _KEPT * self._xp + tokens * pairs
            self._pp = _KEPT * self._pp + pairs * pairs
            self._xs = _KEPT * self._xs + tokens * seconds
            self._ps = _KEPT * self._ps + pairs * seconds
        self._largest = max(self._largest, _GROWTH * (end - self.computed))
        self.computed = end

    def part_failed(self) -> None:
        """The next one is smaller."""
        self._largest = max(self._largest // 2, self._block_tokens)

    def _seconds(self, first: int, tokens: int) -> float:
        """Of so many tokens from position `first` on; 0 until measured."""
        each, pair = self._costs()
        return each * tokens + pair * _pairs(first, tokens)

    def _within(self, seconds: float) -> int:
        """How many of the next tokens take so long: the root of `_seconds` less that."""
        each, pair = self._costs()
        first = each + pair * (self.computed + 0.5)
        return (
            int(2 * seconds / (first + sqrt(first * first + 2 * pair * seconds))) if first else self._largest
        )

    def _costs(self) -> tuple[float, float]:
        """Seconds a token, and a pair."""
        if not self._xx:
            return 0.0, 0.0
        alone = self._xs / self._xx, 0.0
        determinant = self._xx * self._pp - self._xp * self._xp
        if determinant <= 1e-6 * self._xx * self._pp:  # all parts are alike
            return alone
        each = (self._xs * self._pp - self._ps * self._xp) / determinant
        pair = (self._ps * self._xx - self._xs * self._xp) / determinant
        if pair < 0:
            return alone
        return (each, pair) if each >= 0 else (0.0, self._ps / self._pp)


def percent_of(computed_tokens: int, tokens: int) -> float:
    """To a tenth; 100 only where all are computed."""
    return computed_tokens * 1000 // max(tokens, 1) / 10


def _pairs(first: int, tokens: int) -> float:
    """Of a token and one that it attends to."""
    return tokens * (first + (tokens + 1) / 2)
