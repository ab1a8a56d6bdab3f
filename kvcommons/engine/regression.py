"""Seconds over an amount, learnt from what was measured. Pure."""

from __future__ import annotations


class Regression:
    """Least squares in which older observations count exponentially less."""

    def __init__(self, *, kept: float, empty: tuple[float, float] = (0.0, 0.0)) -> None:
        """`kept`: of an observation's weight, by the next one. `empty`: (weight, seconds) of an observation
        of nothing, which keeps its weight: a line needs two ends."""
        self._kept = kept
        self._empty_weight, empty_s = empty
        self._empty_y = self._empty_weight * empty_s
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def __bool__(self) -> bool:
        """Whether anything was observed."""
        return self._n > 0

    def observe(self, amount: float, seconds: float) -> None:
        kept = self._kept
        self._n = kept * self._n + 1.0
        self._x = kept * self._x + amount
        self._y = kept * self._y + seconds
        self._xx = kept * self._xx + amount * amount
        self._xy = kept * self._xy + amount * seconds

    @property
    def mean_amount(self) -> float:
        return self._x / (self._n + self._empty_weight)

    @property
    def mean_s(self) -> float:
        return (self._y + self._empty_y) / (self._n + self._empty_weight)

    @property
    def proportional_s(self) -> float:
        """Seconds a unit where a unit is all that costs: the line through zero. 0 until measured."""
        return self._y / self._x if self._x > 0 else 0.0

    def slope_s(self, *, spread: float = 0.0) -> float | None:
        """What a unit adds; None where that is not known, for all amounts are alike: they deviate by no more
        than `spread` of their mean."""
        weight, mean = self._n + self._empty_weight, self.mean_amount
        variance = self._xx / weight - mean * mean
        if variance <= (spread * mean) ** 2:
            return None
        return (self._xy / weight - mean * self.mean_s) / variance

    def at(self, amount: float, slope_s: float) -> float:
        """On the line of that slope."""
        return self.mean_s + slope_s * (amount - self.mean_amount)
