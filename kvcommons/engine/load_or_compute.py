"""Load or compute: which is faster for a run of blocks, as measured. Pure: durations are passed in."""

from __future__ import annotations

import math
from bisect import bisect_left
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
    """Keeps current what loading takes, by bytes.

    Until both are known, loading is assumed to win. The first load opens connections and touches memory that
    was never used: it stands for the rate only until there is a second, and is no reason to compute. A
    verdict against loading all is tested again every `retry_every` decisions, for a rate that is never
    measured would never recover.
    """

    def __init__(
        self, compute_seconds: Callable[[range], float], *, smoothing: float = 0.3, retry_every: int = 8
    ) -> None:
        """`compute_seconds`: of these positions of a prompt; 0 until that is known."""
        self.compute_seconds = compute_seconds
        self._smoothing = smoothing
        self._load = Duration(smoothing)
        self._loads = 0
        self._retry_every = retry_every
        self._refusals = 0

    @property
    def load_bytes_per_s(self) -> float:
        """0 until measured."""
        return 1 / self._load.mean if self._load.known else 0.0

    def loaded(self, loaded_bytes: int, seconds: float) -> None:
        self._loads += loaded_bytes > 0
        if self._loads == 2:
            self._load = Duration(self._smoothing)
        self._load.add(loaded_bytes, seconds)

    def load_seconds(self, load_bytes: int) -> float:
        """0 until measured."""
        return self._load.seconds(load_bytes)

    def blocks_to_load(self, blocks: int, *, block_bytes: int, block_tokens: int, positions: range) -> int:
        """How many leading ones of `blocks` stored blocks to load; the rest of `positions`, which begin with
        them, is computed.

        Layers are loaded while earlier ones compute, so both together take as long as the longer of the two.
        """
        whole_s = self.load_seconds(blocks * block_bytes)
        if self._loads < 2 or not self.compute_seconds(positions) or whole_s <= SHORT_LOAD_S:
            return blocks
        best, best_s = _divide(
            blocks,
            lambda loaded: self.load_seconds(loaded * block_bytes),
            lambda loaded: self.compute_seconds(positions[loaded * block_tokens :]),
        )
        all_s = max(whole_s, self.compute_seconds(positions[blocks * block_tokens :]))
        if best_s > (1 - _WORTH_SHARE) * all_s:
            self._refusals = 0
            return blocks
        self._refusals += 1
        if self._refusals < self._retry_every:
            return best
        self._refusals = 0
        return blocks

    def patience_s(self, *, positions: range, waited_s: float, pace_s: float, layers_left: int) -> float:
        """How much longer to wait for a load's next layer before `positions` are computed instead; 0: not at
        all.

        A load that comes a layer each `pace_s` (0: none has come) and would need far longer than computing is
        hopeless. Any other is waited for as long as computing takes, so that both together are at most twice
        the shorter one, whatever becomes of the load.
        """
        compute_s = self.compute_seconds(positions)
        if not compute_s:
            return max(0.0, PATIENCE_S_UNKNOWN - waited_s)
        limit_s = max(compute_s, PATIENCE_S_MIN)
        if pace_s * layers_left > _HOPELESS * limit_s:
            return 0.0
        return max(0.0, limit_s - waited_s)

    def blocks_to_keep(
        self, blocks: int, *, block_tokens: int, positions: range, pace_s: float, layers_left: int
    ) -> int:
        """How many leading blocks of a load that is given up to go on with: the layers that it lacks, at its
        pace, while the rest of `positions`, which begin with them, is computed. 0 where no layer has come;
        half of them at most, so that a load which falls behind again and again ends."""
        all_s = self.compute_seconds(positions)
        if not pace_s or not all_s:
            return 0
        rest_s = pace_s * layers_left / blocks
        best, best_s = _divide(
            blocks // 2,
            lambda kept: kept * rest_s,
            lambda kept: self.compute_seconds(positions[kept * block_tokens :]),
        )
        return best if best_s < (1 - _WORTH_SHARE) * all_s else 0


class AlwaysLoad(LoadOrCompute):
    """Loads all that is stored, however long it takes: where processors are dearer than time, and to compare
    with."""

    def blocks_to_load(self, blocks: int, *, block_bytes: int, block_tokens: int, positions: range) -> int:
        return blocks

    def patience_s(self, *, positions: range, waited_s: float, pace_s: float, layers_left: int) -> float:
        return math.inf


def _divide(
    blocks: int, load_s: Callable[[int], float], compute_s: Callable[[int], float]
) -> tuple[int, float]:
    """How many of so many blocks to load while the others are computed, and what both together take: about
    where loading begins to take longer."""
    longer = bisect_left(range(blocks), True, key=lambda loaded: load_s(loaded) >= compute_s(loaded))
    able = (0, max(longer - 1, 0), longer, blocks)
    return min(
        ((loaded, max(load_s(loaded), compute_s(loaded))) for loaded in able),
        key=lambda one: (one[1], -one[0]),
    )
