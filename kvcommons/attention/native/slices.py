"""The compiled kernel's part in a slice of the model: what lies between its matrix products, each in one pass
over its rows, where torch's operators take a pass for each sign of the formula.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kvcommons.attention.native.library import Kernel

# Of a register of the plainest instruction set: rows are of whole ones, twice.
_STEP = 8


class _Norm(ctypes.Structure):
    """`kvc_norm` of slices.h."""

    _fields_ = (
        ("x", c_void_p), ("added", c_void_p), ("weight", c_void_p), ("sum", c_void_p), ("out", c_void_p),
        ("parallel", c_void_p), ("rows", c_int64), ("size", c_int64), ("threads", c_int64),
        ("epsilon", c_float), ("is_bf16", c_int32), ("variant", c_int32),
    )  # fmt: skip


class _Rotation(ctypes.Structure):
    """`kvc_rotation` of slices.h."""

    _fields_ = (
        ("x", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("out", c_void_p), ("parallel", c_void_p),
        ("rows", c_int64), ("row", c_int64), ("heads", c_int64), ("dim", c_int64), ("threads", c_int64),
        ("is_bf16", c_int32), ("variant", c_int32),
    )  # fmt: skip


class _Gate(ctypes.Structure):
    """`kvc_gate` of slices.h."""

    _fields_ = (
        ("x", c_void_p), ("out", c_void_p), ("parallel", c_void_p), ("rows", c_int64), ("size", c_int64),
        ("threads", c_int64), ("is_bf16", c_int32), ("variant", c_int32),
    )  # fmt: skip


class _Product(ctypes.Structure):
    """`kvc_product` of slices.h."""

    _fields_ = (
        ("x", c_void_p), ("arranged", c_void_p), ("weight", c_void_p), ("bias", c_void_p), ("out", c_void_p),
        ("parallel", c_void_p), ("count", c_int64), ("rows", c_int64), ("size", c_int64),
        ("threads", c_int64), ("is_bf16", c_int32), ("variant", c_int32),
    )  # fmt: skip


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
    call = _Norm(
        x.data_ptr(), None if added is None else added.data_ptr(), weight.data_ptr(), total.data_ptr(),
        out.data_ptr(), kernel._parallel, rows, size, torch.get_num_threads(), epsilon,
        x.dtype == torch.bfloat16, kernel._index,
    )  # fmt: skip
    kernel._library.kvc_norm_rows(byref(call))
    return total, out


def rotate(kernel: Kernel, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim], each row's heads in one piece; cos, sin [T, 1, head_dim / 2] float32."""
    rows, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1):
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty((rows, heads, dim), dtype=x.dtype)
    call = _Rotation(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), kernel._parallel, rows, x.stride(0),
        heads, dim, torch.get_num_threads(), x.dtype == torch.bfloat16, kernel._index,
    )  # fmt: skip
    kernel._library.kvc_rotate_rows(byref(call))
    return out


def gate(kernel: Kernel, mixed: Tensor) -> Tensor:
    """mixed [T, 2 * mlp], gate and up, to silu(gate) * up [T, mlp]."""
    mixed = mixed.contiguous()
    rows, size = mixed.shape[0], mixed.shape[1] // 2
    out = torch.empty((rows, size), dtype=mixed.dtype)
    call = _Gate(
        mixed.data_ptr(), out.data_ptr(), kernel._parallel, rows, size, torch.get_num_threads(),
        mixed.dtype == torch.bfloat16, kernel._index,
    )  # fmt: skip
    kernel._library.kvc_gate_rows(byref(call))
    return out


def multiply(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, size] times the transpose of weight [rows, size], plus bias [rows], all bfloat16: [T, rows].
    For a few rows: weight is read once, as quickly as memory gives it."""
    wide = x.float().contiguous()
    arranged = torch.empty_like(wide)
    out = torch.empty((len(x), len(weight)), dtype=torch.bfloat16)
    call = _Product(
        wide.data_ptr(), arranged.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), kernel._parallel, len(x), len(weight), x.shape[1], torch.get_num_threads(), 1,
        kernel._index,
    )  # fmt: skip
    kernel._library.kvc_multiply_rows(byref(call))
    return out
