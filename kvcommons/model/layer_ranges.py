"""Which layers a pipeline stage has (Mnemosyne, section 4.3): a model's layers divided by the time that they
take. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from kvcommons.errors import InvalidInput
from kvcommons.model.spec import ModelSpec

UNEVEN = 0.05  # of the slowest stage's time: what another division has to save


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """What an iteration takes in each part of a model, in any one unit: measured, or estimated."""

    layers: tuple[float, ...]
    embedding: float = 0.0  # before the first layer
    head: float = 0.0  # after the last one, the final norm included

    @classmethod
    def estimate(cls, spec: ModelSpec, *, rows: int, sampled: int, context: int = 0) -> LayerTimes:
        """Multiplications of an iteration of so many rows at a context of so many tokens, after `sampled` of
        which a token is sampled: all of them where sequences generate, the last one of a prompt. Of the last
        layer the others need K and V only."""
        dim, heads, kv_heads = spec.head_dim, spec.query_heads, spec.kv_heads
        opening = spec.hidden * dim * (heads + 2 * kv_heads)
        closing = spec.hidden * dim * heads + 3 * spec.hidden * spec.mlp
        seen = [context if window is None else min(context, window) for window in spec.windows]
        closed = [*[rows] * (spec.layers - 1), sampled]
        return cls(
            layers=tuple(
                float(rows * opening + needed * (2 * tokens * heads * dim + closing))
                for tokens, needed in zip(seen, closed, strict=True)
            ),
            head=float(sampled * spec.vocab_size * spec.hidden),
        )

    def corrected(self, ranges: Sequence[range], seconds: Sequence[float]) -> LayerTimes:
        """By what each stage of a division took in some iterations: all that a stage has took as much more or
        less than it was said to. The same where one of them took nothing: it has not said it."""
        expected = [self.of(layers) for layers in ranges]
        if not all(seconds):
            return self
        all_of_them = sum(expected) / sum(seconds)
        longer = [took / due * all_of_them for took, due in zip(seconds, expected, strict=True)]
        return replace(
            self,
            layers=tuple(
                self.layers[layer] * times
                for layers, times in zip(ranges, longer, strict=True)
                for layer in layers
            ),
            embedding=self.embedding * longer[0],
            head=self.head * longer[-1],
        )

    def of(self, layers: range) -> float:
        """Of a stage that has these layers."""
        seconds = sum(self.layers[layers.start : layers.stop])
        seconds += self.embedding if layers.start == 0 else 0.0
        return seconds + (self.head if layers.stop == len(self.layers) else 0.0)

    def divide(self, stages: int) -> tuple[range, ...]:
        """Consecutive layers for each stage, at least one, so that the slowest stage, by which a pipeline
        goes, takes as little as it can, and the others are as equal as they can be. Raises InvalidInput for
        more stages than layers."""
        check_stages(len(self.layers), stages)
        slowest, _ = self._best(stages, math.inf, max)
        _, borders = self._best(stages, slowest * (1 + 1e-9), lambda others, mine: others + mine * mine)
        return ranges_between(borders)

    def division(self, stages: int, standing: Sequence[int] = ()) -> tuple[range, ...]:
        """As `divide`; the `standing` one, so many layers for each stage, where it is one and the slowest
        stage would not take less by UNEVEN: stages that are loaded need not be again."""
        best = self.divide(stages)
        if len(standing) != stages or sum(standing) != len(self.layers):
            return best
        known = ranges_of(standing, len(self.layers))
        return best if self.gain(known, best) > UNEVEN else known

    def gain(self, ranges: Sequence[range], better: Sequence[range]) -> float:
        """How much less the slowest stage takes in the second division: a share of what it takes in the
        first."""
        slowest = max(map(self.of, ranges))
        return 1 - max(map(self.of, better)) / slowest if slowest else 0.0

    def _best(
        self, stages: int, limit: float, join: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        """The least that stages' times, none above `limit`, can be joined to, and the borders between them:
        the last stage may begin anywhere, behind the best of the others."""
        count, before = len(self.layers), [0.0, *accumulate(self.layers)]

        def took(start: int, end: int) -> float:
            edges = (self.embedding if start == 0 else 0.0) + (self.head if end == count else 0.0)
            return before[end] - before[start] + edges

        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
        for _ in range(stages):
            reached: dict[int, tuple[float, list[int]]] = {}
            for start, (others, borders) in best.items():
                for end in range(start + 1, count + 1):
                    mine = took(start, end)
                    if mine > limit:
                        continue
                    joined = join(others, mine)
                    if end not in reached or joined < reached[end][0]:
                        reached[end] = joined, [*borders, end]
            best = reached
        return best[count]


def check_stages(layers: int, stages: int) -> None:
    """Raises InvalidInput where a stage would have no layer."""
    if not 1 <= stages <= layers:
        raise InvalidInput(
            f"stages = {stages}, and the model has {layers} layers: each stage needs at least one; "
            f"set stages to 1 … {layers}",
            param="stages",
        )


def ranges_of(counts: Sequence[int], layers: int) -> tuple[range, ...]:
    """So many layers for each stage, as a setting says. Raises InvalidInput where these are not the
    model's."""
    check_stages(layers, len(counts))
    if min(counts) < 1 or sum(counts) != layers:
        raise InvalidInput(
            f"stage_layers = {list(counts)} has {sum(counts)} layers, and the model {layers}: name at least "
            "one for each stage, and all of the model's, or leave it out",
            param="stage_layers",
        )
    return ranges_between([0, *accumulate(counts)])


def ranges_between(borders: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(borders))
