"""The compiled kernel's way through several layers, with attention between them: one call, without Python
between two layers."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_void_p, sizeof
from typing import Any

import torch
from torch import Tensor

from kvcommons.attention.native.advance import NativeSlice
from kvcommons.attention.native.library import Kernel, PagedBatch, PagedChunk
from kvcommons.attention.native.structures import STRUCTURES
from kvcommons.backend.interface import PagedRows, Partial

_POINTER = sizeof(c_void_p)


class NativeForward:
    """Through layers of one shape, whose keys and values lie in one tensor. Thread-safe."""

    def __init__(self, kernel: Kernel, layers: Sequence[NativeSlice], epsilon: float) -> None:
        self._kernel = kernel
        self._layers = layers  # they stay where they are
        self._epsilon = epsilon
        pointers = c_void_p * len(layers)
        self._closings = pointers(*[addressof(one.closing) for one in layers])
        self._openings = pointers(*[addressof(one.opening) for one in layers])

    def run(
        self,
        layers: range,
        hidden: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
        rows: PagedRows,
        plans: Sequence[PagedBatch | PagedChunk],
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """From hidden [T, hidden] and q, k, v [T, its heads, head_dim] of the first of `layers`, of which the
        last has a successor, to the residual stream [T, hidden], qkv [T, all heads * head_dim], and q and k
        of it rotated [T, rotated_heads, head_dim] of that successor; and the seconds that attention took.

        KV of the `rows` is of hidden's dtype; `plans` are theirs for each of `layers`."""
        kv = rows.kv
        q, k, v = map(_in_one_piece, qkv)
        hidden, cos, sin, slots = (one.contiguous() for one in (hidden, *rotation, rows.slots))
        (count, heads, dim), dtype, behind = q.shape, hidden.dtype, self._layers[layers.stop].weights
        is_bf16, threads = dtype == torch.bfloat16, torch.get_num_threads()
        total = torch.empty_like(hidden)
        projected = torch.empty((count, behind.qkv.rows), dtype=dtype)
        rotated = torch.empty((count, behind.rotated_heads, dim), dtype=dtype)
        attended = torch.empty((count, heads * dim), dtype=dtype)
        partial = Partial(out=torch.empty((count, heads, dim)), lse=torch.empty((count, heads)))
        attentions = (c_void_p * len(plans))()
        for index, plan in enumerate(plans):
            attention = plan.prepare(rows.scale, partial)
            attention.q_head, attention.q_is_bf16, attention.kv_is_bf16 = dim, is_bf16, is_bf16
            attentions[index] = addressof(attention)
        form = "chunks" if isinstance(plans[0], PagedChunk) else "batches"
        first = self._layers[layers.start]
        space = first.space(
            STRUCTURES["kvc_advance"](closing=addressof(first.closing), count=count, is_bf16=is_bf16)
        )
        call: Any = STRUCTURES["kvc_forward"](
            closings=addressof(self._closings) + layers.start * _POINTER,
            openings=addressof(self._openings) + (layers.start + 1) * _POINTER,
            **{form: addressof(attentions)}, kv=kv[layers.start].data_ptr(), slots=slots.data_ptr(),
            hidden=hidden.data_ptr(), q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), cos=cos.data_ptr(),
            sin=sin.data_ptr(), sum=total.data_ptr(), qkv=projected.data_ptr(), rotated=rotated.data_ptr(),
            attended=attended.data_ptr(), space=space.data_ptr(),
            q_row=q.stride(0), k_row=k.stride(0), v_row=v.stride(0), layers=len(layers),
            layer_bytes=kv.stride(0) * kv.element_size(), count=count, threads=threads,
            epsilon=self._epsilon, is_bf16=is_bf16, variant=self._kernel._index,
        )  # fmt: skip
        self._kernel._library.kvc_forward_layers(byref(call))
        return total, projected, rotated, call.attention_ns / 1e9


def _in_one_piece(heads: Tensor) -> Tensor:
    """[T, heads, head_dim], with the heads of each row beside each other."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
