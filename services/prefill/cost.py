"""Load or compute: which is faster for a run of blocks, by measured rates. Pure: durations are passed in."""

from __future__ import annotations

# A load estimated to be shorter than this is made anyway: what computing could save is within the noise of a
# turn, rates of such short work are mostly fixed costs, and what is computed has to be saved again.
SHORT_LOAD_S = 0.02


class LoadOrCompute:
    """Keeps bytes/s of loading and tokens/s of computing current, as moving averages.

    Until both rates are known, loading is assumed to win. A verdict against loading is tested again every
    `retry_every` decisions, for a rate that is never measured would never recover.
    """

    def __init__(self, *, smoothing: float = 0.3, retry_every: int = 8) -> None:
        self._smoothing = smoothing
        self._retry_every = retry_every
        self._refusals = 0
        self._load_bytes_per_s = 0.0
        self._compute_tokens_per_s = 0.0

    @property
    def load_bytes_per_s(self) -> float:
        """0 until measured."""
        return self._load_bytes_per_s

    @property
    def compute_tokens_per_s(self) -> float:
        """0 until measured."""
        return self._compute_tokens_per_s

    def loaded(self, loaded_bytes: int, seconds: float) -> None:
        self._load_bytes_per_s = self._average(self._load_bytes_per_s, loaded_bytes, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        self._compute_tokens_per_s = self._average(self._compute_tokens_per_s, tokens, seconds)

    def load_seconds(self, load_bytes: int) -> float:
        """0 while the rate is unknown."""
        return load_bytes / self._load_bytes_per_s if self._load_bytes_per_s else 0.0

    def worth_loading(self, load_bytes: int, tokens: int) -> bool:
        """Whether loading `load_bytes`, the KV of `tokens`, is expected to be no slower than computing
        them."""
        if not self._load_bytes_per_s or not self._compute_tokens_per_s:
            return True
        if self.load_seconds(load_bytes) <= max(SHORT_LOAD_S, tokens / self._compute_tokens_per_s):
            self._refusals = 0
            return True
        self._refusals += 1
        if self._refusals < self._retry_every:
            return False
        self._refusals = 0
        return True

    def _average(self, before: float, amount: int, seconds: float) -> float:
        if amount <= 0 or seconds <= 0:
            return before
        rate = amount / seconds
        return rate if not before else before + self._smoothing * (rate - before)
