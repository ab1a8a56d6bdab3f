"""Matrix products on the CPU by oneDNN, whose kernels are what torch has fastest there.

`F.linear` and `torch.mm` in float32 go to MKL, which runs at half of the speed on processors of other makers
than its own; `F.linear` in bfloat16 goes to oneDNN, but brings the matrix into its order at each call, which
for one row takes longer than the product.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor

from kvcommons.attention.native import slices
from kvcommons.attention.native.library import Kernel
from kvcommons.backend.interface import Matrix
from kvcommons.backend.torch_operators import PlainMatrix

_NO_FUSION: tuple[str, list[object], str] = ("none", [], "")


# Rows that the compiled kernel multiplies a widened matrix with: with more of them tiles are quicker.
_FEW_ROWS = 32
_TILE_ELEMENTS = 1 << 18  # 1 MiB in float32
# Not every build of torch has oneDNN.
_AVAILABLE = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times the transpose of b [m, k], both float32 on the CPU: [n, m]."""
    if not _AVAILABLE:
        return torch.mm(a, b.t())
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, *_NO_FUSION)
    return product


def packed(weight: Tensor, bias: Tensor | None, kernel: Kernel | None) -> Matrix:
    """weight [out, in] and bias [out], in the form that is quickest on this processor. The kernel, if there
    is one, multiplies few rows where the processor has no products of bfloat16."""
    if not _AVAILABLE:
        return PlainMatrix(weight, bias)
    if weight.dtype == torch.bfloat16 and not multiplies_bfloat16():
        return WidenedMatrix(weight, bias, kernel)
    return ReorderedMatrix(weight, bias)


class ReorderedMatrix:
    """In an order of oneDNN's, which is a copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, *_NO_FUSION)
        return product


class WidenedMatrix:
    """A bfloat16 matrix for a processor without instructions for products of bfloat16, which oneDNN would
    emulate: at 512 rows three times as slow as float32.

    Its elements are widened as they are read: a few rows are multiplied while they are in registers, more of
    them with float32 tiles that stay in the cache. The weights' memory is that of bfloat16, and one tile.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: Kernel | None) -> None:
        self._weight = weight
        self._bias = bias
        rows, columns = weight.shape
        self._kernel = kernel if slices.has_whole_registers(columns) else None
        self._tile_rows = min(max(_TILE_ELEMENTS // columns, 1), rows)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is not None and len(x) <= _FEW_ROWS and x.dtype == torch.bfloat16:
            return slices.multiply(self._kernel, x, self._weight, self._bias)
        wide = x.float()
        out = torch.empty((len(x), len(self._weight)))
        tile = torch.empty((self._tile_rows, x.shape[1]))
        for first in range(0, len(self._weight), self._tile_rows):
            part = self._weight[first : first + self._tile_rows]
            widened = tile[: len(part)].copy_(part)
            out[:, first : first + len(part)] = multiply_transposed(wide, widened)
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16. oneDNN says yes wherever it can
    emulate them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
