"""Operators as formulas of torch's: the reference, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcommons.backend.interface import Embedding, Forward, Layer, LayerWeights, Matrix
from kvcommons.backend.plain_layer import PlainLayer


class TorchOperators:
    @property
    def multiplies(self) -> str:
        return "torch"

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        return PlainMatrix(weight, bias)

    def pack_tied(self, weight: Tensor) -> tuple[Embedding, Matrix]:
        return partial(F.embedding, weight=weight), self.pack(weight)

    def layer(self, weights: LayerWeights) -> Layer:
        return PlainLayer(self, weights)

    def forward(self, layers: Sequence[Layer]) -> Forward | None:
        return None

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return (scaled * weight).to(x.dtype)

    def add_and_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total = x if added is None else x + added
        return total, self.norm(total, weight, epsilon)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def gate(self, mixed: Tensor) -> Tensor:
        gate, up = mixed.chunk(2, dim=-1)
        return F.silu(gate) * up


class PlainMatrix:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)
