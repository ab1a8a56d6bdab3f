"""The compiled kernel's products of rows with a weight."""

from __future__ import annotations

import mmap
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from kvcommons.attention.native import structures
from kvcommons.attention.native.library import Kernel
from kvcommons.attention.native.structures import STRUCTURES

_ALIGNMENT = 64  # a line of a cache, and a register
_CHUNK_BYTES = 64 << 20


class WeightMemory:
    """Memory for weights on huge pages, which is 15 to 30% faster to read: in pieces far larger than a page,
    so that what rounding costs is one page for all weights, and not one for each. Not thread-safe."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """So many bytes, of which a tensor keeps its piece alive."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._left):
            area = mmap.mmap(
                -1, max(size, _CHUNK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )  # costs nothing until it is written
            if hasattr(mmap, "MADV_HUGEPAGE"):
                area.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(area, dtype=torch.uint8)
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def serves(weight: Tensor) -> bool:
    """Whether the kernel can multiply with weight [out, in], in host memory."""
    if weight.dtype == torch.bfloat16:
        return weight.shape[1] % 2 == 0
    return weight.dtype == torch.float32


class PackedWeight:
    """A weight that the kernel `serves`, in the order in which rows of any number are multiplied with it: as
    large as it was, but for the last panel, and a copy."""

    def __init__(self, kernel: Kernel, memory: WeightMemory, weight: Tensor, bias: Tensor | None) -> None:
        """weight [out, in] and bias [out] of one dtype."""
        weight = weight.contiguous()
        self._kernel = kernel
        self._bias = None if bias is None else bias.contiguous()
        self.dtype = weight.dtype
        self.rows, self.size = weight.shape
        self._is_bf16 = int(weight.dtype == torch.bfloat16)
        library = kernel._library
        size = library.kvc_packed_bytes(self.rows, self.size, self._is_bf16, kernel._index)
        self._packed = memory.take(size)[:size]
        call = STRUCTURES["kvc_packing"](
            weight=weight.data_ptr(), packed=self._packed.data_ptr(),
            rows=self.rows, size=self.size, threads=torch.get_num_threads(), is_bf16=self._is_bf16,
            variant=kernel._index,
        )  # fmt: skip
        library.kvc_pack_weight(byref(call))

    def fill(self, matrix: Any) -> None:
        """A structure kvc_matrix, which is worth something as long as this weight is there."""
        structures.fill(matrix, packed=self._packed, rows=self.rows, size=self.size, bias=self._bias)

    def multiply(self, x: Tensor) -> Tensor:
        """x [T, in] of the weight's dtype -> [T, out]. A row has the same bits in every T."""
        x, count = x.contiguous(), len(x)
        out = torch.empty((count, self.rows), dtype=self.dtype)
        if count == 0:
            return out
        library = self._kernel._library
        arranged = torch.empty(library.kvc_arranged_bytes(count, self.size), dtype=torch.uint8)
        call = STRUCTURES["kvc_product"](
            x=x.data_ptr(), packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(), out=out.data_ptr(),
            arranged=arranged.data_ptr(), count=count, rows=self.rows,
            size=self.size, threads=torch.get_num_threads(), is_bf16=self._is_bf16,
            variant=self._kernel._index,
        )  # fmt: skip
        library.kvc_multiply(byref(call))
        return out

    def weight_rows(self, numbers: Tensor) -> Tensor:
        """Rows of the weight as it was: numbers LongTensor [T] -> [T, in]."""
        panel = self._kernel._library.kvc_panel(self._kernel._index)
        per_word = 2 if self._is_bf16 else 1
        words = self._packed.view(self.dtype).view(-1, self.size // per_word, panel, per_word)
        return words[numbers // panel, :, numbers % panel].reshape(len(numbers), self.size)
