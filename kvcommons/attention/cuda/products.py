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
_DEPTH = 1024  # bytes of a weight's row that are read at a time, by each of them


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] of up to ROWS_MAX rows, weight [out, in] contiguous, bias [out]: [rows, out], of x's
    dtype. A row's result is the same whatever the others are."""
    x = x.contiguous()
    rows, size = x.shape
    outputs = len(weight)
    depth = _DEPTH // x.element_size()
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows:
        with beside(x):
            _multiply_outputs[(triton.cdiv(outputs, _OUTPUTS),)](
                x, weight, x if bias is None else bias, out, rows, outputs, SIZE=size,
                ROWS=ROWS_MAX, OUTPUTS=_OUTPUTS, DEPTH=depth, BIASED=bias is not None,
                EVEN=size % depth == 0 and outputs % _OUTPUTS == 0, num_warps=2, num_stages=3,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _multiply_outputs(
    x, weight, bias, out, rows, outputs, SIZE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """EVEN: the weight is whole tiles of OUTPUTS x DEPTH."""
    row = tl.arange(0, ROWS)[:, None]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    of_weight = weight + output.to(tl.int64)[:, None] * SIZE
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, SIZE, DEPTH):
        depth = (start + tl.arange(0, DEPTH))[None, :]
        # Nobody reads a weight twice in a step.
        if EVEN:
            some = tl.load(x + row * SIZE + depth, mask=row < rows, other=0.0)
            weights = tl.load(of_weight + depth, eviction_policy="evict_first")
        else:
            some = tl.load(x + row * SIZE + depth, mask=(row < rows) & (depth < SIZE), other=0.0)
            there = (output < outputs)[:, None] & (depth < SIZE)
            weights = tl.load(of_weight + depth, mask=there, other=0.0, eviction_policy="evict_first")
        sums += dot(some, tl.trans(weights))
    if BIASED:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    target = out + row * outputs + output[None, :]
    tl.store(target, rounded(sums, out.dtype.element_ty), mask=(row < rows) & (output < outputs)[None, :])
