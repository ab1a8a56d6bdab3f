"""A holder's pool of physical rBlocks on one device."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvcommons.rblock.layout import Layout

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class BlockMemory:
    """`tensor` [layers, blocks, 2, kv_heads, block_tokens, head_dim] in the KV dtype: the physical blocks.

    On the CPU it is anonymous memory on huge pages (15% faster to read) that costs nothing until it is
    written; transports read and write its objects in place. Which block belongs to whom is not known here:
    callers that write to the same block at the same time are at fault.
    """

    def __init__(self, layout: Layout, blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.blocks = blocks
        self.device = torch.device(device)
        shape = (layout.layers, blocks, *layout.object_shape)
        self._dtype = TORCH_DTYPES[layout.kv_dtype]
        self._map: memoryview | None = None
        if self.device.type == "cpu":
            size = max(blocks * layout.block_bytes, mmap.PAGESIZE)
            area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                area.madvise(mmap.MADV_HUGEPAGE)
            self._map = memoryview(area)
            flat = torch.frombuffer(area, dtype=self._dtype)
            self.tensor = flat[: blocks * layout.block_bytes // self._dtype.itemsize].view(shape)
        else:
            self.tensor = torch.zeros(shape, dtype=self._dtype, device=self.device)
        self._head_rows = torch.arange(2 * layout.kv_heads, device=self.device) * layout.block_tokens

    def layer(self, layer: int) -> Tensor:
        """[blocks, 2, kv_heads, block_tokens, head_dim], a view."""
        return self.tensor[layer]

    def read_buffers(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        """The objects of `blocks` as bytes, one memoryview ("B") each; zero-copy on the CPU."""
        if self._map is not None:
            return [self._object(layer, block) for block in blocks]
        staged = self._stage(len(blocks))
        staged.copy_(self.tensor[layer, self._indices(blocks)])
        return _views(staged)

    @contextmanager
    def write_buffers(self, layer: int, blocks: Sequence[int]) -> Iterator[list[memoryview]]:
        """Writable memoryviews ("B"), one an object; on other devices copied there on exit.

        An exception leaves the blocks' content undefined on the CPU and unchanged elsewhere.
        """
        if self._map is not None:
            yield [self._object(layer, block) for block in blocks]
            return
        staged = self._stage(len(blocks))
        yield _views(staged)
        self.tensor[layer, self._indices(blocks)] = staged.to(self.device)

    def write_tokens(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k, v [T, kv_heads, head_dim] to slots LongTensor [T], block * block_tokens + offset."""
        self.write_rows(layer, self.rows_of(slots), torch.cat((k, v), dim=1))

    def rows_of(self, slots: Tensor) -> Tensor:
        """Where write_rows puts these slots' keys and values: the same in all layers."""
        block_tokens = self.layout.block_tokens
        block = torch.div(slots, block_tokens, rounding_mode="floor")
        # A row is one head of one token: block * (2 * kv_heads * block_tokens) + offset, from slots alone.
        rows = slots + block * ((2 * self.layout.kv_heads - 1) * block_tokens)
        return (rows.unsqueeze(1) + self._head_rows).view(-1)

    def write_rows(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Writes kv [T, 2 * kv_heads, head_dim], keys before values."""
        dim = self.layout.head_dim
        self.tensor[layer].view(-1, dim).index_copy_(0, rows, kv.to(self._dtype).view(-1, dim))

    def copy_block(self, source: int, target: int) -> None:
        """Copies all layers of a block (a shared tail block about to be written by one of its sequences)."""
        self.tensor[:, target].copy_(self.tensor[:, source])

    def _object(self, layer: int, block: int) -> memoryview:
        if not 0 <= block < self.blocks or not 0 <= layer < self.layout.layers:
            raise IndexError(f"block {block} of layer {layer} is outside the memory of {self.blocks} blocks")
        assert self._map is not None
        start = (layer * self.blocks + block) * self.layout.object_bytes
        return self._map[start : start + self.layout.object_bytes]

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(list(blocks), dtype=torch.int64, device=self.device)

    def _stage(self, blocks: int) -> Tensor:
        pinned = self.device.type == "cuda"
        return torch.empty((blocks, *self.layout.object_shape), dtype=self._dtype, pin_memory=pinned)


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _views(staged: Tensor) -> list[memoryview]:
    """One byte view an object of a contiguous CPU tensor [blocks, ...]; the views keep it alive."""
    if not staged.shape[0]:
        return []
    whole = byte_view(staged)
    size = len(whole) // staged.shape[0]
    return [whole[i * size : (i + 1) * size] for i in range(staged.shape[0])]
