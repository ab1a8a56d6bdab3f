"""The compiled kernel's way from a layer's attention to the next layer's queries, keys and values: one call,
not one for each matrix, norm and rotation."""

from __future__ import annotations

from ctypes import addressof, byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcommons.attention.native import slices, structures
from kvcommons.attention.native.library import Kernel
from kvcommons.attention.native.products import PackedWeight
from kvcommons.attention.native.structures import STRUCTURES

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeWeights:
    """A layer's, of one dtype; norms are float32."""

    attention_norm: Tensor
    qkv: PackedWeight
    qk_norm: Tensor | None
    output: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    head_dim: int
    rotated_heads: int

    @property
    def served(self) -> bool:
        """Whether the kernel can compute with rows of such sizes."""
        sizes = (self.output.rows, self.down.size, self.head_dim // 2)
        return all(slices.has_whole_registers(size) for size in sizes)


class NativeSlice:
    """What a layer's weights are to the kernel. Thread-safe."""

    def __init__(self, kernel: Kernel, weights: NativeWeights) -> None:
        self._kernel = kernel
        self.weights = weights  # they stay where they are
        self.closing = STRUCTURES["kvc_closing"]()
        self.opening = STRUCTURES["kvc_opening"](rotated_heads=weights.rotated_heads, dim=weights.head_dim)
        for structure, name in (
            (self.closing, "output"),
            (self.closing, "gate_up"),
            (self.closing, "down"),
            (self.opening, "qkv"),
        ):
            packed: PackedWeight = getattr(weights, name)
            packed.fill(getattr(structure, name))
        structures.fill(self.closing, norm=weights.mlp_norm)
        structures.fill(self.opening, norm=weights.attention_norm, qk_norm=weights.qk_norm)

    def rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor, epsilon: float) -> Tensor:
        """qkv [T, all heads * head_dim] -> q and k of it, which are normed in place where the model does so,
        rotated [T, rotated_heads, head_dim]."""
        weights = self.weights
        heads = qkv.view(len(qkv), -1, weights.head_dim)[:, : weights.rotated_heads]
        return slices.rotate(self._kernel, heads, cos, sin, weights.qk_norm, epsilon)

    def advance(
        self,
        next_layer: NativeSlice,
        hidden: Tensor,
        attended: Tensor,
        cos: Tensor,
        sin: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, hidden] and attended [T, query_heads * head_dim] of the weights' dtype -> the residual
        stream [T, hidden], qkv [T, all heads * head_dim] with q and k as `rotate` leaves them, and what it
        returns."""
        hidden, attended, cos, sin = (one.contiguous() for one in (hidden, attended, cos, sin))
        opens, dtype, count = next_layer.weights, hidden.dtype, len(hidden)
        total = torch.empty_like(hidden)
        qkv = torch.empty((count, opens.qkv.rows), dtype=dtype)
        rotated = torch.empty((count, opens.rotated_heads, opens.head_dim), dtype=dtype)
        call: Any = STRUCTURES["kvc_advance"](
            closing=addressof(self.closing), opening=addressof(next_layer.opening),
            hidden=hidden.data_ptr(), attended=attended.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
            sum=total.data_ptr(), qkv=qkv.data_ptr(), rotated=rotated.data_ptr(),
            count=count, threads=torch.get_num_threads(), epsilon=epsilon,
            is_bf16=dtype == torch.bfloat16, variant=self._kernel._index,
        )  # fmt: skip
        space = self.space(call)
        call.space = space.data_ptr()
        self._kernel._library.kvc_advance_rows(byref(call))
        return total, qkv, rotated

    def space(self, call: Any) -> Tensor:
        """Memory for the `space` of a kvc_advance, of which it takes the closing, the count and the type."""
        size = self._kernel._library.kvc_advance_bytes(byref(call))
        space = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        return space[-space.data_ptr() % _ALIGNMENT :]
