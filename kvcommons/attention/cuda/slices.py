"""What lies between matrix products, one pass over memory each: sums and norms, rotation, gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcommons.attention.cuda.launch import beside
from kvcommons.attention.cuda.precision import rounded

_GATES = 1024  # that a program computes


def add_and_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x [rows, size], `added` of its shape or None, weight [size] float32: their sum, and its RMSNorm."""
    x = x.contiguous()
    total = x if added is None else torch.empty_like(x)
    return total, _norm(x.unsqueeze(1), None if added is None else added.contiguous(), total, weight, epsilon)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [rows, size] and weight [size], or x [rows, heads, size], of any strides but the last, and weight
    [size] or [heads, size]; float32 weights."""
    wide = x if x.dim() == 3 else x.unsqueeze(1)
    return _norm(wide, None, None, weight, epsilon).view(x.shape)


def _norm(x: Tensor, added: Tensor | None, total: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    rows, heads, size = x.shape
    out = torch.empty((rows, heads, size), dtype=x.dtype, device=x.device)
    if rows:
        with beside(x):
            _norm_row[(rows * heads,)](
                x, x if added is None else added, x if total is None else total, weight, out, epsilon,
                x.stride(0), x.stride(1), HEADS=heads, WEIGHTS=weight.numel() // size, SIZE=size,
                PADDED=triton.next_power_of_2(size), ADDED=added is not None,
                num_warps=8 if size > 2048 else 4,
            )  # fmt: skip
    return out if heads > 1 else out.squeeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, head_dim], of any strides but the last; cos, sin [rows, 1, head_dim / 2] float32."""
    rows, heads, dim = x.shape
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    if rows:
        with beside(x):
            _rotate_head[(rows, heads)](
                x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0),
                HEADS=heads, HALF=dim // 2, PADDED=triton.next_power_of_2(dim // 2), num_warps=1,
            )  # fmt: skip
    return out


def gate(mixed: Tensor) -> Tensor:
    """mixed [rows, 2 * mlp] contiguous -> [rows, mlp]."""
    rows, size = len(mixed), mixed.shape[1] // 2
    out = torch.empty((rows, size), dtype=mixed.dtype, device=mixed.device)
    if rows:
        with beside(mixed):
            _gate_row[(rows, triton.cdiv(size, _GATES))](mixed.contiguous(), out, size, GATES=_GATES)
    return out


@triton.jit
def _norm_row(
    x, added, total, weight, out, epsilon, row_stride, head_stride,
    HEADS: tl.constexpr, WEIGHTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    row, head, at = number // HEADS, number % HEADS, tl.arange(0, PADDED)
    there = at < SIZE
    target = number.to(tl.int64) * SIZE + at
    source = row.to(tl.int64) * row_stride + head * head_stride + at
    values = tl.load(x + source, mask=there, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(added + target, mask=there, other=0.0).to(tl.float32)
        kept = rounded(values, total.dtype.element_ty)
        tl.store(total + target, kept, mask=there)
        values = kept.to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    values *= tl.load(weight + (head % WEIGHTS) * SIZE + at, mask=there, other=0.0)
    tl.store(out + target, rounded(values, out.dtype.element_ty), mask=there)


@triton.jit
def _rotate_head(
    x, cos, sin, out, row_stride, head_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    there = at < HALF
    source = x + row * row_stride + head * head_stride + at
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + row * cos_stride + at, mask=there, other=0.0)
    s = tl.load(sin + row * sin_stride + at, mask=there, other=0.0)
    target = out + (row * HEADS + head) * (2 * HALF) + at
    dtype = out.dtype.element_ty
    tl.store(target, rounded(first * c - second * s, dtype), mask=there)
    tl.store(target + HALF, rounded(second * c + first * s, dtype), mask=there)


@triton.jit
def _gate_row(mixed, out, size, GATES: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * GATES + tl.arange(0, GATES)
    there = at < size
    opened = tl.load(mixed + row * 2 * size + at, mask=there, other=0.0).to(tl.float32)
    values = tl.load(mixed + row * 2 * size + size + at, mask=there, other=0.0).to(tl.float32)
    opened = opened / (1.0 + tl.exp(-opened))
    tl.store(out + row * size + at, rounded(opened * values, out.dtype.element_ty), mask=there)
