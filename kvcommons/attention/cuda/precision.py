"""How kernels multiply and round: once, for Triton's interpreter has no arithmetic for bfloat16."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# The interpreter computes on the CPU (TRITON_INTERPRET=1): slowly, for tests without a GPU.
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    """a [m, k] times b [k, n], both bfloat16 or both float32: float32. A float32 is never cut to a TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 `x` as `dtype`, to the nearest, and to even between two."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        return tl.where(x == x, nearest >> 16, bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
