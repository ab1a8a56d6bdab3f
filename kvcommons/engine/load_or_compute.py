"""Load or compute: which is faster for a run of blocks, by measured rates. Pure: durations are passed in."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvcommons.engine.regression import Regression

# A load estimated to be shorter than this is made anyway: what computing could save is within the noise of a
# turn, and what is computed has to be saved again.
SHORT_LOAD_S = 0.02
# Loading all is given up for loading a part only where that saves such a share of the time: computing keeps a
# processor busy that others could use.
_WORTH_SHARE = 0.1
# A load that waits is given at least this long: on a busy machine pauses as short as this say nothing.
PATIENCE_S_MIN = 0.3
# What a load is given while nothing is known of how long computing takes.
PATIENCE_S_UNKNOWN = 1.0
# A measurement counts as at most so many times what was expected: one pause is no trend, and a trend is
# followed within a few.
_SURPRISE = 4.0
_SPREAD = 0.1  # of amounts around their mean, that says something of what a unit adds
# A load whose pace says that its rest takes so many times as long as computing everything is given up at
# once.
_HOPELESS = 2.0


class Duration:
    """Seconds of an amount: a fixed part and one for each unit."""

    def __init__(self, smoothing: float) -> None:
        self._fit = Regression(kept=1.0 - smoothing)

    @property
    def known(self) -> bool:
        return bool(self._fit)

    @property
    def mean(self) -> float:
        """Seconds a unit, the fixed part spread over it; 0 until measured."""
        return self._fit.proportional_s

    def add(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        if self.known:
            seconds = min(seconds, _SURPRISE * self.seconds(amount))
        self._fit.observe(amount, seconds)

    def seconds(self, amount: float) -> float:
        """0 for nothing, and until measured."""
        if amount <= 0 or not self.known:
            return 0.0
        slope = self._fit.slope_s(spread=_SPREAD)
        # Noise must not make large amounts free.
        slope = self.mean if slope is None else min(max(slope, 0.1 * self.mean), self.mean)
        return self._fit.at(amount, slope)


class LoadOrCompute:
    """Keeps current what loading (by bytes) and computing (by tokens) take.

    Until both are known, loading is assumed to win. The first load opens connections and touches memory that
    was never used: it stands for the rate only until there is a second, and is no reason to compute. A
    verdict against loading all is tested again every `retry_every` decisions, for a rate that is never
    measured would never recover.
    """

    def __init__(self, *, smoothing: float = 0.3, retry_every: int = 8) -> None:
        self._smoothing = smoothing
        self._load = Duration(smoothing)
        self._loads = 0
        self._compute = Duration(smoothing)
        self._retry_every = retry_every
        self._refusals = 0

    @property
    def load_bytes_per_s(self) -> float:
        """0 until measured."""
        return 1 / self._load.mean if self._load.known else 0.0

    @property
    def compute_tokens_per_s(self) -> float:
        """0 until measured."""
        return 1 / self._compute.mean if self._compute.known else 0.0

    def loaded(self, loaded_bytes: int, seconds: float) -> None:
        self._loads += loaded_bytes > 0
        if self._loads == 2:
            self._load = Duration(self._smoothing)
        self._load.add(loaded_bytes, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        self._compute.add(tokens, seconds)

    def load_seconds(self, load_bytes: int) -> float:
        """0 until measured."""
        return self._load.seconds(load_bytes)

    def compute_seconds(self, tokens: int) -> float:
        """0 until measured."""
        return self._compute.seconds(tokens)

    def blocks_to_load(self, blocks: int, *, block_bytes: int, block_tokens: int, new_tokens: int) -> int:
        """How many leading ones of `blocks` stored blocks to load; the others are computed, with
        `new_tokens`.

        Layers are loaded while earlier ones compute, so both together take as long as the longer of the two.
        """
        whole_s = self.load_seconds(blocks * block_bytes)
        if self._loads < 2 or not self._compute.known or whole_s <= SHORT_LOAD_S:
            return blocks

        def takes_s(loaded: int) -> float:
            computed_s = self.compute_seconds((blocks - loaded) * block_tokens + new_tokens)
            return max(self.load_seconds(loaded * block_bytes), computed_s)

        best = _least(takes_s, blocks)
        if takes_s(best) > (1 - _WORTH_SHARE) * takes_s(blocks):
            self._refusals = 0
            return blocks
        self._refusals += 1
        if self._refusals < self._retry_every:
            return best
        self._refusals = 0
        return blocks

    def patience_s(self, *, tokens: int, waited_s: float, pace_s: float, layers_left: int) -> float:
        """How much longer to wait for a load's next layer before its `tokens` are computed instead; 0: not at
        all.

        A load that comes a layer each `pace_s` (0: none has come) and would need far longer than computing is
        hopeless. Any other is waited for as long as computing takes, so that both together are at most twice
        the shorter one, whatever becomes of the load.
        """
        if not self._compute.known:
            return max(0.0, PATIENCE_S_UNKNOWN - waited_s)
        limit_s = max(self.compute_seconds(tokens), PATIENCE_S_MIN)
        if pace_s * layers_left > _HOPELESS * limit_s:
            return 0.0
        return max(0.0, limit_s - waited_s)

    def blocks_to_keep(
        self, blocks: int, *, block_tokens: int, new_tokens: int, pace_s: float, layers_left: int
    ) -> int:
        """How many leading blocks of a load that is given up to go on with: the layers that it lacks, at its
        pace, while the other blocks are computed. 0 where no layer has come; half of them at most, so that a
        load which falls behind again and again ends."""
        if not pace_s or not self._compute.known:
            return 0
        rest_s = pace_s * layers_left / blocks

        def takes_s(kept: int) -> float:
            return max(kept * rest_s, self.compute_seconds((blocks - kept) * block_tokens + new_tokens))

        best = min(_least(takes_s, blocks), blocks // 2)
        return best if takes_s(best) < (1 - _WORTH_SHARE) * takes_s(0) else 0


class AlwaysLoad(LoadOrCompute):
    """Loads all that is stored, however long it takes: where processors are dearer than time, and to compare
    with."""

    def blocks_to_load(self, blocks: int, *, block_bytes: int, block_tokens: int, new_tokens: int) -> int:
        return blocks

    def patience_s(self, *, tokens: int, waited_s: float, pace_s: float, layers_left: int) -> float:
        return math.inf


def _least(takes_s: Callable[[int], float], blocks: int) -> int:
    """Where it takes least, of 0 … blocks: it falls up to one place, and rises from there."""
    low, high = 0, blocks
    while low < high:
        middle = (low + high) // 2
        if takes_s(middle) <= takes_s(middle + 1):
            high = middle
        else:
            low = middle + 1
    return min((0, low, blocks), key=lambda count: (takes_s(count), -count))
