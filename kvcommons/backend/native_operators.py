"""Operators on the CPU: the compiled kernel's, where there is one, with its matrix products or oneDNN's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcommons.attention.native import slices
from kvcommons.attention.native.library import Kernel
from kvcommons.backend.interface import Embedding, Forward, Layer, LayerWeights, Matrix
from kvcommons.backend.native_layer import NativeLayer, PagedForward
from kvcommons.backend.products import NativePacker, Products, packed
from kvcommons.backend.torch_operators import TorchOperators


class NativeOperators(TorchOperators):
    """What the kernel has no form for is torch's."""

    def __init__(self, kernel: Kernel | None, products: Products = Products.NATIVE) -> None:
        """None: it could not be compiled, or is not to be taken."""
        self._kernel = kernel
        native = products is Products.NATIVE
        self._packer = NativePacker(kernel) if kernel is not None and native else None

    @property
    def multiplies(self) -> str:
        if self._kernel is None or self._packer is None:
            return Products.ONEDNN.value
        return f"{Products.NATIVE.value} {self._kernel.variant}"

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        matrix = None if self._packer is None else self._packer.pack(weight, bias)
        return packed(weight, bias) if matrix is None else matrix

    def pack_tied(self, weight: Tensor) -> tuple[Embedding, Matrix]:
        matrix = None if self._packer is None else self._packer.pack(weight, None)
        return super().pack_tied(weight) if matrix is None else (matrix.packed.weight_rows, matrix)

    def layer(self, weights: LayerWeights) -> Layer:
        if self._kernel is None:
            return super().layer(weights)
        return NativeLayer.of(self._kernel, self, weights)

    def forward(self, layers: Sequence[Layer]) -> Forward | None:
        return None if self._kernel is None else PagedForward.of(self._kernel, layers)

    def add_and_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        if self._kernel is None or not slices.has_whole_registers(x.shape[-1]):
            return super().add_and_norm(x, added, weight, epsilon)
        return slices.norm(self._kernel, x, added, weight, epsilon)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self._kernel is None or not slices.has_whole_registers(x.shape[-1] // 2):
            return super().rotate(x, cos, sin)
        return slices.rotate(self._kernel, x, cos, sin)

    def gate(self, mixed: Tensor) -> Tensor:
        if self._kernel is None or not slices.has_whole_registers(mixed.shape[-1] // 2):
            return super().gate(mixed)
        return slices.gate(self._kernel, mixed)
