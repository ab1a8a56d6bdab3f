"""New keys and values to their places in blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvcommons.attention.cuda.launch import beside
from kvcommons.attention.cuda.precision import rounded

NOWHERE = -1  # the place of what is not written


def append(kv: Tensor, places: Tensor, k: Tensor, v: Tensor) -> None:
    """k, v [T, kv_heads, D], of any strides but the last, to `places`, LongTensor [T * 2 * kv_heads], keys
    before values: each a head of a token in kv seen as [heads of all tokens, D], or NOWHERE."""
    rows, heads, dim = k.shape
    if rows:
        with beside(kv):
            _append_head[(rows, 2 * heads)](
                kv, places, k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                KV_HEADS=heads, DIM=dim, PADDED=triton.next_power_of_2(dim), num_warps=1,
            )  # fmt: skip


@triton.jit
def _append_head(
    kv, places, k, v, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, head, dims = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    place = tl.load(places + row * (2 * KV_HEADS) + head)
    if place >= 0:
        source = k + row * k_row_stride + head * k_head_stride
        if head >= KV_HEADS:
            source = v + row * v_row_stride + (head - KV_HEADS) * v_head_stride
        there = dims < DIM
        new = tl.load(source + dims, mask=there, other=0.0).to(tl.float32)
        tl.store(kv + place * DIM + dims, rounded(new, kv.dtype.element_ty), mask=there)
