"""Matrix products on the CPU: the compiled kernel's, or oneDNN's.

`F.linear` and `torch.mm` in float32 go to MKL, which runs at half of the speed on processors of other makers
than its own; `F.linear` in bfloat16 goes to oneDNN, but brings the matrix into its order at each call, which
for one row takes longer than the product.
"""

from __future__ import annotations

import functools
import platform
from enum import Enum

import torch
from torch import Tensor

from kvcommons.attention.native.library import Kernel
from kvcommons.attention.native.products import PackedWeight, WeightMemory, serves
from kvcommons.backend.interface import Matrix
from kvcommons.backend.torch_operators import PlainMatrix

_NO_FUSION: tuple[str, list[object], str] = ("none", [], "")


_TILE_ELEMENTS = 1 << 18  # 1 MiB in float32
# Not every build of torch has oneDNN.
_AVAILABLE = hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Products(Enum):
    """Who multiplies with a model's matrices: with all of them, and any number of rows, for a matrix is kept
    in one form."""

    NATIVE = "native"  # the compiled kernel
    ONEDNN = "onednn"  # and what torch has for the rest, where it has no oneDNN


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times the transpose of b [m, k], both float32 on the CPU: [n, m]."""
    if not _AVAILABLE:
        return torch.mm(a, b.t())
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, *_NO_FUSION)
    return product


def packed(weight: Tensor, bias: Tensor | None) -> Matrix:
    """weight [out, in] and bias [out], in the form that is quickest on this processor without the kernel."""
    if not _AVAILABLE:
        return PlainMatrix(weight, bias)
    if weight.dtype == torch.bfloat16 and not multiplies_bfloat16():
        return WidenedMatrix(weight, bias)
    return ReorderedMatrix(weight, bias)


class NativePacker:
    """Brings weights into the kernel's form, where it has one for them."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._memory = WeightMemory()

    def pack(self, weight: Tensor, bias: Tensor | None) -> NativeMatrix | None:
        if not serves(weight) or (bias is not None and bias.dtype != weight.dtype):
            return None
        return NativeMatrix(PackedWeight(self._kernel, self._memory, weight, bias))


class NativeMatrix:
    """In the kernel's order, which is a copy."""

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed.multiply(x)


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

    Its elements are widened as they are read, to float32 tiles that stay in the cache. The weights' memory is
    that of bfloat16, and one tile.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        rows, columns = weight.shape
        self._tile_rows = min(max(_TILE_ELEMENTS // columns, 1), rows)

    def __call__(self, x: Tensor) -> Tensor:
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
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False  # it may be held to other instructions than the processor has
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
