"""Attention on an NVIDIA GPU by kernels that read blocks in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcommons.attention.cuda import attend
from kvcommons.attention.cuda.units import HeadShape, Units, batch_units, chunk_units
from kvcommons.backend.interface import BatchPlan, ChunkPlan, Partial
from kvcommons.backend.torch_attention import TorchAttention


class CudaAttention(TorchAttention):
    """`device`: where tensors are; kernels are launched on torch's current stream there."""

    def plan_batch(
        self,
        kv: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        first_key_positions: Tensor,
        query_positions: Tensor,
        window: int | None = None,
    ) -> BatchPlan:
        queries = query_positions - first_key_positions
        return CudaBatch(
            kv.shape, kv.element_size(), batch_units(self._device, tables, lengths, queries, window)
        )

    def plan_chunk(
        self,
        kv: Tensor,
        query_heads: int,
        table: Tensor,
        length: int,
        *,
        first_key_position: int,
        query_positions: range,
        window: int | None = None,
    ) -> ChunkPlan:
        first = query_positions.start - first_key_position
        queries = range(first, first + len(query_positions))
        shape = head_shape(kv.shape, kv.element_size(), query_heads)
        return CudaPlan(
            kv.shape, kv.element_size(), chunk_units(self._device, table, length, queries, window, shape)
        )

    def merge(self, partials: Sequence[Partial]) -> Partial:
        return partials[0] if len(partials) == 1 else attend.merge(partials)


class CudaPlan:
    """A BatchPlan and a ChunkPlan."""

    def __init__(self, kv_shape: Sequence[int], itemsize: int, units: Units) -> None:
        self._kv_shape, self._itemsize, self.units = kv_shape, itemsize, units

    def attend(self, q: Tensor, kv: Tensor, scale: float, into: Partial | None = None) -> Partial:
        shape = head_shape(self._kv_shape, self._itemsize, q.shape[1])
        return attend.attend(q, kv, self.units, shape, scale, into)


class CudaBatch(CudaPlan):
    """Of one row a sequence."""


def head_shape(kv_shape: Sequence[int], itemsize: int, query_heads: int) -> HeadShape:
    """For a layer's KV of this shape."""
    _, _, kv_heads, block_tokens, head_dim = kv_shape
    return HeadShape(
        kv_heads=kv_heads, group=query_heads // kv_heads, block_tokens=block_tokens, head_dim=head_dim,
        itemsize=itemsize,
    )  # fmt: skip
