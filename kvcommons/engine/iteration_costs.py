"""What is in an iteration, and what one of each amount of it costs. Pure; needs no numpy: routers reckon with
what instances say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, truediv

# Rows up to here cost more each, or less, than those beyond: few wait for weights, many for arithmetic.
_FEW_ROWS = 32
# What an amount is counted in. Where observations do not tell amounts apart, an iteration's time is put down
# to those of which it has most.
UNITS = {
    "iterations": 1.0,
    "few_rows": 64.0,
    "more_rows": 64.0,
    "pairs": float(1 << 18),
    "read_bytes": float(1 << 24),
    "exchanges": 1.0,
    "away_bytes": float(1 << 24),
    "away_pairs": float(1 << 18),
}
_PLACES = {name: place for place, name in enumerate(UNITS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationWork:
    """What is in an iteration, or in a part of one."""

    rows: float = 0  # through the matrices
    pairs: float = 0  # of chunks: a token, and one that it attends to
    read_bytes: int = 0  # KV of sequences that generate, here
    exchanges: int = 0  # 1: other holders are asked in each layer
    away_bytes: int = 0  # KV that the slowest of them reads, of sequences that generate
    away_pairs: float = 0  # of chunks, that the slowest of them attends over

    @classmethod
    def of_chunk(cls, positions: range, *, elsewhere: int = 0, most: int = 0) -> IterationWork:
        """Each row attends to all before it, and to itself. So many of the tokens before them lie
        `elsewhere`, of which one holder has the `most`."""
        pairs = len(positions) * (positions.start + positions.stop + 1) // 2
        return cls(
            rows=len(positions),
            pairs=pairs - len(positions) * elsewhere,
            exchanges=int(elsewhere > 0),
            away_pairs=len(positions) * most,
        )

    def beside(self, other: IterationWork) -> IterationWork:
        """Both in one iteration."""
        return IterationWork(
            rows=self.rows + other.rows,
            pairs=self.pairs + other.pairs,
            read_bytes=self.read_bytes + other.read_bytes,
            exchanges=max(self.exchanges, other.exchanges),
            away_bytes=max(self.away_bytes, other.away_bytes),
            away_pairs=max(self.away_pairs, other.away_pairs),
        )

    def at_least(self, other: IterationWork) -> IterationWork:
        """Of each amount the larger one."""
        return IterationWork(
            **{name: max(getattr(self, name), getattr(other, name)) for name in self.__slots__}
        )

    def within(self, other: IterationWork, times: float) -> bool:
        """Whether no amount is larger than so many times the other's."""
        return all(mine <= times * its for mine, its in zip(_counts(self), _counts(other), strict=True))


_counts = attrgetter(*IterationWork.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCosts:
    """Seconds of an iteration: a sum over its amounts, of which none costs less than nothing."""

    of_units: tuple[float, ...] = (0.0,) * len(UNITS)  # in the order of UNITS
    chunks: bool = False  # whether one was measured

    @classmethod
    def of(cls, costs: Mapping[str, float]) -> IterationCosts:
        """The reverse of `by_name`; of names that it does not know nothing is known."""
        return cls(
            of_units=tuple(costs.get(name, 0.0) * unit for name, unit in UNITS.items()),
            chunks="pairs" in costs,
        )

    @property
    def by_name(self) -> dict[str, float]:
        """Seconds of one of each amount; without that of pairs where no chunk was measured, and nothing where
        nothing was."""
        if not any(self.of_units):
            return {}
        named = zip(UNITS.items(), self.of_units, strict=True)
        return {name: cost / unit for (name, unit), cost in named if self.chunks or name != "pairs"}

    def of_one(self, amount: str) -> float:
        """Seconds of one of it, by its name in UNITS."""
        return self.of_units[_PLACES[amount]] / UNITS[amount]

    def seconds(self, work: IterationWork) -> float:
        """0 until anything was measured."""
        return sum(cost * amount for cost, amount in zip(self.of_units, amounts(work), strict=True))

    def prompt_seconds(self, positions: range, chunk_tokens: int, stages: int = 1) -> float:
        """Of these of a prompt, in as many chunks as they take, each of which enters a line of so many stages
        as soon as the one before has left the first (Mnemosyne, equation 8); 0 until a chunk was
        measured."""
        if not positions or not self.chunks:
            return 0.0
        chunks, whole = -(-len(positions) // chunk_tokens), IterationWork.of_chunk(positions)
        chunk_s = self.seconds(replace(whole, rows=whole.rows / chunks, pairs=whole.pairs / chunks))
        return (chunks + stages - 1) * chunk_s / stages


def amounts(work: IterationWork) -> tuple[float, ...]:
    """In their units."""
    few = min(work.rows, _FEW_ROWS)
    more = work.rows - few
    here = (1, few, more, work.pairs, work.read_bytes)
    return tuple(map(truediv, (*here, work.exchanges, work.away_bytes, work.away_pairs), UNITS.values()))
