"""Matrix products on the CPU by oneDNN, whose kernels are what torch has fastest there.

`F.linear` and `torch.mm` in float32 go to MKL, which runs at half of the speed on processors of other makers
than its own; `F.linear` in bfloat16 goes to oneDNN, but brings the matrix into its order at each call, which
for one row takes longer than the product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_NO_FUSION: tuple[str, list[object], str] = ("none", [], "")


# Not every build of torch has oneDNN.
_AVAILABLE = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] times the transpose of b [m, k], both float32 on the CPU: [n, m]."""
    if not _AVAILABLE:
        return torch.mm(a, b.t())
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, *_NO_FUSION)
    return product


class Matrix:
    """A weight [out, in] and its bias [out], for rows to be multiplied with."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, reordered: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._reordered = reordered

    @classmethod
    def packed(cls, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """In the order in which oneDNN reads it, where that serves the device and dtype. A copy: let go of
        `weight`."""
        if not _AVAILABLE or weight.device.type != "cpu" or not _supported(weight.dtype):
            return cls(weight, bias)
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight), bias, reordered=True)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        if not self._reordered:
            return F.linear(x, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, *_NO_FUSION)
        return product


def _supported(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
