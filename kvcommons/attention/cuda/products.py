"""A few rows times a weight, at the speed at which the weight is read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcommons.attention.cuda.launch import beside
from kvcommons.attention.cuda.precision import dot, rounded

ROWS_MAX = 16  # that one product takes: for one they cost no more than for all
_OUTPUTS = 16  # of a program: few, so that a small matrix has enough of them for a GPU
_DEPTH = 256  # bytes of a weight's row that are read at a time, by each of them


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] of up to ROWS_MAX rows, weight [out, in] contiguous, bias [out]: [rows, out], of x's
    dtype. A row's result is the same whatever the others are."""
    x = x.contiguous()
    rows, size = x.shape
    outputs = len(weight)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows:
        with beside(x):
            _multiply_outputs[(triton.cdiv(outputs, _OUTPUTS),)](
                x, weight, x if bias is None else bias, out, rows, outputs, SIZE=size,
                ROWS=ROWS_MAX, OUTPUTS=_OUTPUTS, DEPTH=_DEPTH // x.element_size(), BIASED=bias is not None,
                num_warps=4, num_stages=4,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _multiply_outputs(
    x, weight, bias, out, rows, outputs, SIZE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    of_weight = weight + output.to(tl.int64)[:, None] * SIZE
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, SIZE, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        inside = (depth < SIZE)[None, :]
        some = tl.load(
            x + row[:, None] * SIZE + depth[None, :], mask=inside & (row < rows)[:, None], other=0.0
        )
        weights = tl.load(of_weight + depth[None, :], mask=inside & (output < outputs)[:, None], other=0.0)
        sums += dot(some, tl.trans(weights))
    if BIASED:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None] * outputs + output[None, :]
    kept = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(target, rounded(sums, out.dtype.element_ty), mask=kept)
