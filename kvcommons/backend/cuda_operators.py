"""Operators on an NVIDIA GPU: kernels of ours for a few rows and between products, cuBLAS for many rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from kvcommons.attention.cuda import products, slices
from kvcommons.backend.cuda_forward import GraphedForward
from kvcommons.backend.interface import Forward, Layer, LayerWeights, Matrix
from kvcommons.backend.slice_graphs import Capture, GraphedLayer, SliceGraphs
from kvcommons.backend.torch_operators import PlainMatrix, TorchOperators


class CudaOperators(TorchOperators):
    def __init__(self, capture: Capture | None = None) -> None:
        """`capture`: how slices, and layers at once, become graphs; None: they do not."""
        self._capture = capture
        self._graphs = None if capture is None else SliceGraphs(capture)
        self._layers = itertools.count()

    @property
    def multiplies(self) -> str:
        return f"triton, from {products.ROWS_MAX + 1} rows on cublas"

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        return CudaMatrix(weight.contiguous(), bias)

    def layer(self, weights: LayerWeights) -> Layer:
        if self._graphs is None:
            return super().layer(weights)
        return GraphedLayer(self, weights, self._graphs, next(self._layers))

    def forward(self, layers: Sequence[Layer]) -> Forward | None:
        return None if self._capture is None else GraphedForward.of(layers, self._capture)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return slices.norm(x, weight, epsilon)

    def add_and_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        return slices.add_and_norm(x, added, weight, epsilon)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return slices.rotate(x, cos, sin)

    def gate(self, mixed: Tensor) -> Tensor:
        return slices.gate(mixed)


class CudaMatrix(PlainMatrix):
    """One copy of the weight for any number of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > products.ROWS_MAX:
            return super().__call__(x)
        return products.multiply(x, self._weight, self._bias)
