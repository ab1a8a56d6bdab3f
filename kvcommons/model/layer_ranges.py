"""Which layers a pipeline stage has (Mnemosyne, section 4.3): a model's layers divided by the time that they
take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvcommons.errors import InvalidInput
from kvcommons.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """What an iteration takes in each part of a model, in any one unit: measured, or estimated."""

    layers: tuple[float, ...]
    embedding: float = 0.0  # before the first layer
    head: float = 0.0  # after the last one, the final norm included

    @classmethod
    def estimate(cls, spec: ModelSpec, *, rows: int, sampled: int, context: int = 0) -> LayerTimes:
        """Multiplications of an iteration of so many rows at a context of so many tokens, after `sampled` of
        which a token is sampled: all of them where sequences generate, the last one of a prompt."""
        dim, heads, kv_heads = spec.head_dim, spec.query_heads, spec.kv_heads
        projections = spec.hidden * dim * (2 * heads + 2 * kv_heads) + 3 * spec.hidden * spec.mlp
        seen = [context if window is None else min(context, window) for window in spec.windows]
        return cls(
            layers=tuple(float(rows * (projections + 2 * tokens * heads * dim)) for tokens in seen),
            head=float(sampled * spec.vocab_size * spec.hidden),
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
        count = len(self.layers)
        check_stages(count, stages)
        # best[end]: the slowest of `stage` stages over the layers before `end`, then the sum of squares, by
        # which they are equal; and where the last of them begins.
        before = [0.0, *accumulate(self.layers)]
        best: list[tuple[float, float, int] | None] = [(0.0, 0.0, 0)] + [None] * count
        begins: list[list[int]] = []
        for stage in range(1, stages + 1):
            following: list[tuple[float, float, int] | None] = [None] * (count + 1)
            for end in range(stage, count - (stages - stage) + 1):
                options = []
                for start in range(stage - 1, end):
                    reached = best[start]
                    if reached is None:
                        continue
                    mine = before[end] - before[start]
                    mine += self.embedding if start == 0 else 0.0
                    mine += self.head if end == count else 0.0
                    options.append((max(reached[0], mine), reached[1] + mine * mine, start))
                following[end] = min(options, default=None)
            best = following
            begins.append([one[2] if one is not None else 0 for one in best])
        borders = [count]
        for starts in reversed(begins):
            borders.append(starts[borders[-1]])
        return ranges_between(borders[::-1])


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
