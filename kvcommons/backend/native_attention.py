"""Attention on the CPU: one row a sequence by the compiled kernel, which reads blocks in place; chunks, and
what the kernel has no form for, by what torch has quickest there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcommons.attention.native import exchange, library
from kvcommons.attention.native.exchange import Library
from kvcommons.attention.native.library import Kernel
from kvcommons.backend.fused import fused
from kvcommons.backend.host_device import HostDevice
from kvcommons.backend.interface import BatchPlan, Partial
from kvcommons.backend.torch_attention import TorchAttention


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

    def merge(self, partials: Sequence[Partial]) -> Partial:
        if self.kernel is None or len(partials) == 1:
            return super().merge(partials)
        return self.kernel.merge(partials)
