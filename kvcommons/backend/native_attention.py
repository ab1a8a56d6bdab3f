"""Attention on the CPU by the compiled kernel, which reads blocks in place; what it has no form for, by what
torch has quickest there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.attention.native import exchange, library
from kvcommons.attention.native.exchange import Library
from kvcommons.attention.native.library import Kernel
from kvcommons.backend.fused import fused
from kvcommons.backend.host_device import HostDevice
from kvcommons.backend.interface import BatchPlan, ChunkPlan, Partial
from kvcommons.backend.torch_attention import TorchAttention

# Rows of a chunk that are quicker each by itself, for what is brought into order once for all of them.
_SINGLE_ROWS_MAX = 2


class NativeAttention(TorchAttention):
    def __init__(self, kernel: Kernel | None) -> None:
        """None: it could not be compiled, or is not to be taken."""
        super().__init__(HostDevice(), fused)
        self.kernel = kernel
        self._exchange = None if kernel is None else exchange.of(kernel)

    @property
    def native_exchange(self) -> Library | None:
        return self._exchange

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
        if self.kernel is None or not library.serves(kv):
            return super().plan_batch(
                kv, tables, lengths,
                first_key_positions=first_key_positions, query_positions=query_positions, window=window,
            )  # fmt: skip
        return library.PagedBatch(
            self.kernel, kv.shape, tables, lengths, first_key_positions, query_positions, window
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
        if self.kernel is None or not library.serves(kv):
            return super().plan_chunk(
                kv, query_heads, table, length,
                first_key_position=first_key_position, query_positions=query_positions, window=window,
            )  # fmt: skip
        rows = len(query_positions)
        if rows <= _SINGLE_ROWS_MAX:
            firsts = torch.full((rows,), first_key_position)
            return self.plan_batch(
                kv, table.expand(rows, -1), torch.full((rows,), length), first_key_positions=firsts,
                query_positions=torch.arange(query_positions.start, query_positions.stop), window=window,
            )  # fmt: skip
        first = query_positions.start - first_key_position
        return library.PagedChunk(self.kernel, kv.shape, query_heads, table, length, first, rows, window)

    def merge(self, partials: Sequence[Partial]) -> Partial:
        if self.kernel is None or len(partials) == 1:
            return super().merge(partials)
        return self.kernel.merge(partials)
