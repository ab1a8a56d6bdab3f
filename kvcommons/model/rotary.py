"""Rotary frequencies from a config, in float64 (no torch).

In float32 an angle is off by 3.6e-2 at position 1,000,000. Frequencies that depend on the length of the
text are refused: KV that was stored at one length would be wrong at another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcommons.errors import InvalidInput

_THETA = 10_000.0
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Angle of pair i at position p is p * frequencies[i]; cos and sin are multiplied by `attention_factor`.

    `context_factor`: how much longer than the config says texts may be, by the scaling.
    """

    frequencies: tuple[float, ...]  # [head_dim / 2], radians a position
    attention_factor: float = 1.0
    context_factor: float = 1.0

    @classmethod
    def of(cls, config: Mapping[str, Any], head_dim: int) -> Rotary:
        """From `rope_scaling` and `rope_theta` (older folders) or `rope_parameters` (newer ones).

        Raises InvalidInput for scalings that are not served.
        """
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
            raise InvalidInput(
                "rotary parameters that differ between layer types are not served", param="model"
            )
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise InvalidInput(f"partial_rotary_factor {partial} is not served, only 1", param="model")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = _number({**config, **scaling}, "rope_theta", _THETA)
        plain = tuple(theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2))
        if kind == "default":
            return cls(frequencies=plain)
        if kind in _LENGTH_DEPENDENT:
            raise InvalidInput(
                f"rotary scaling {kind!r} is not served: its frequencies change with the length of the text, "
                "so KV stored at one length would be wrong at another; linear, llama3 and yarn are served",
                param="model",
            )
        window = _number(config, "max_position_embeddings", None)
        name = "original_max_position_embeddings"
        trained_length = float(config.get(name) or scaling.get(name) or window)
        if kind == "linear":
            factor = _number(scaling, "factor", None)
            return cls(frequencies=tuple(f / factor for f in plain), context_factor=factor)
        if kind == "llama3":
            return cls(frequencies=_llama3(plain, scaling, trained_length))
        if kind == "yarn":
            factor = _number(scaling, "factor", window / trained_length)
            return cls(
                frequencies=_yarn(plain, scaling, theta, trained_length, factor),
                attention_factor=_yarn_attention_factor(scaling, factor),
                context_factor=max(factor * trained_length / window, 1.0),
            )
        raise InvalidInput(
            f"rotary scaling {kind!r} is not served; linear, llama3 and yarn are", param="model"
        )


def _number(values: Mapping[str, Any], name: str, default: float | None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidInput(
            f"the rotary parameter {name} must be a positive number, not {value!r}", param="model"
        )
    return float(value)


def _llama3(plain: tuple[float, ...], scaling: Mapping[str, Any], trained_length: float) -> tuple[float, ...]:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    factor = _number(scaling, "factor", None)
    low = _number(scaling, "low_freq_factor", None)
    high = _number(scaling, "high_freq_factor", None)
    scaled = []
    for frequency in plain:
        turns = trained_length * frequency / (2 * math.pi)  # within the trained length
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append((1 - kept) * frequency / factor + kept * frequency)
    return tuple(scaled)


def _yarn(
    plain: tuple[float, ...], scaling: Mapping[str, Any], theta: float, trained_length: float, factor: float
) -> tuple[float, ...]:
    """YaRN: pairs that turn often within the trained length are kept, those that hardly turn are
    stretched.
    """
    dim = 2 * len(plain)

    def pair_turning(turns: float) -> float:
        return dim * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(_number(scaling, "beta_fast", 32.0))
    high = pair_turning(_number(scaling, "beta_slow", 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    scaled = []
    for pair, frequency in enumerate(plain):
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency / factor * stretched + frequency * (1 - stretched))
    return tuple(scaled)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", None)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)
