"""The compiled kernel's part in a slice of the model: what lies between its matrix products, each in one pass
over its rows, where torch's operators take a pass for each sign of the formula.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from kvcommons.attention.native.library import Kernel
from kvcommons.attention.native.structures import STRUCTURES

# Of a register of the plainest instruction set: rows are of whole ones, twice.
_STEP = 8


def has_whole_registers(size: int) -> bool:
    """Whether the kernel can compute with rows of such a size; else torch's operators have to."""
    return size % _STEP == 0


def norm(
    kernel: Kernel, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """x [T, size] plus `added` (None: nothing) of its shape and dtype, and the RMSNorm of that, times weight
    [size] float32."""
    x, added = x.contiguous(), None if added is None else added.contiguous()
    total = x if added is None else torch.empty_like(x)
    out = torch.empty_like(x)
    rows, size = x.shape
    call = STRUCTURES["kvc_norm"](
        x=x.data_ptr(), added=None if added is None else added.data_ptr(), weight=weight.data_ptr(),
        sum=total.data_ptr(), out=out.data_ptr(), rows=rows, size=size,
        threads=torch.get_num_threads(), epsilon=epsilon, is_bf16=x.dtype == torch.bfloat16,
        variant=kernel._index,
    )  # fmt: skip
    kernel._library.kvc_norm_rows(byref(call))
    return total, out


def rotate(
    kernel: Kernel, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, epsilon: float = 0.0
) -> Tensor:
    """x [T, heads, head_dim] rotated by cos, sin [T, 1, head_dim / 2] float32. With a weight [heads,
    head_dim] float32 the RMSNorm of each head, times that, takes its place in x before, whose heads lie in
    one piece in each row then."""
    rows, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1):
        assert weight is None
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty((rows, heads, dim), dtype=x.dtype)
    call = STRUCTURES["kvc_rotation"](
        x=x.data_ptr(), weight=None if weight is None else weight.data_ptr(), cos=cos.data_ptr(),
        sin=sin.data_ptr(), out=out.data_ptr(), rows=rows, row=x.stride(0),
        heads=heads, dim=dim, threads=torch.get_num_threads(), epsilon=epsilon,
        is_bf16=x.dtype == torch.bfloat16, variant=kernel._index,
    )  # fmt: skip
    kernel._library.kvc_rotate_rows(byref(call))
    return out


def gate(kernel: Kernel, mixed: Tensor) -> Tensor:
    """mixed [T, 2 * mlp], gate and up, to silu(gate) * up [T, mlp]."""
    mixed = mixed.contiguous()
    rows, size = mixed.shape[0], mixed.shape[1] // 2
    out = torch.empty((rows, size), dtype=mixed.dtype)
    call = STRUCTURES["kvc_gate"](
        x=mixed.data_ptr(), out=out.data_ptr(), rows=rows, size=size,
        threads=torch.get_num_threads(), is_bf16=mixed.dtype == torch.bfloat16, variant=kernel._index,
    )  # fmt: skip
    kernel._library.kvc_gate_rows(byref(call))
    return out
