"""A holder's pool of physical rBlocks on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Backend, DeviceEvent
from kvcommons.rblock.heads import HeadPart
from kvcommons.rblock.layout import Layout

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class BlockMemory:
    """`tensor` [layers, blocks, 2, kv_heads, block_tokens, head_dim] in the KV dtype: the physical blocks, of
    `layers`. A layer is called by its number in the model, whichever of them are here.

    On the host transports read and write its objects in place; elsewhere they are staged. Which block belongs
    to whom is not known here: callers that write to the same block at the same time are at fault.
    """

    def __init__(
        self, layout: Layout, blocks: int, backend: Backend | None = None, layers: range | None = None
    ) -> None:
        """`backend`: what attends over them; None: the CPU. `layers`: None: all of the layout's."""
        self.layout = layout
        self.layers = layers or range(layout.layers)
        self.blocks = blocks
        self.backend = backend or choose()
        self._device, self._attention = self.backend.device, self.backend.attention
        dtype = TORCH_DTYPES[layout.kv_dtype]
        self.tensor = self._device.allocate((len(self.layers), blocks, *layout.object_shape), dtype)
        self._bytes = byte_view(self.tensor) if self._device.host else None
        self._head_rows = torch.arange(2 * layout.kv_heads) * layout.block_tokens

    def touch(self) -> None:
        """Has the system give all of it now, by writing zeros: not once there is something in it."""
        self.tensor.zero_()

    def layer(self, layer: int) -> Tensor:
        """[blocks, 2, kv_heads, block_tokens, head_dim], a view."""
        return self.tensor[self.layers.index(layer)]

    def begin_read(self, layer: int, blocks: Sequence[int]) -> tuple[list[memoryview], DeviceEvent]:
        """The objects of `blocks` as bytes, one memoryview ("B") each, and the event after which they may be
        read. On the host they are the blocks themselves."""
        if self._bytes is not None:
            return [self._object(layer, block) for block in blocks], self._device.record()
        staged, event = self._device.download(self.layer(layer)[self._device.longs(blocks)])
        return _views(staged), event

    def read_buffers(self, layer: int, blocks: Sequence[int]) -> list[memoryview]:
        """As `begin_read`, waited for."""
        objects, event = self.begin_read(layer, blocks)
        event.wait()
        return objects

    @contextmanager
    def write_buffers(
        self, layer: int, blocks: Sequence[int], part: HeadPart | None = None
    ) -> Iterator[list[memoryview]]:
        """Writable memoryviews ("B"), one an object; of a part of the heads two, its K and its V. On the host
        they are the blocks themselves; else they are copied there on exit, before anything that the device is
        given after it.

        An exception leaves the blocks' content undefined on the host and unchanged elsewhere. Raises
        InvalidInput for a part that the heads cannot be divided into.
        """
        heads = slice(None) if part is None else part.kv_heads(self.layout)
        own = self.layout if part is None else part.layout(self.layout)
        if self._bytes is not None:
            objects = [self._object(layer, block) for block in blocks]
            yield objects if part is None else part.pieces(objects)
            return
        staged = self._device.buffer((len(blocks), *own.object_shape), self.tensor.dtype)
        yield _views(staged)
        self.layer(layer)[self._device.longs(blocks), :, heads] = self._device.upload(staged)

    def write_tokens(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k, v [T, kv_heads, head_dim] to slots LongTensor [T] in host memory, block * block_tokens +
        offset."""
        self.write_rows(layer, self.rows_of(slots), torch.cat((k, v), dim=1))

    def rows_of(self, slots: Tensor) -> Tensor:
        """Where write_rows puts the keys and values of slots LongTensor [T] in host memory: on the device,
        and the same in all layers."""
        block_tokens = self.layout.block_tokens
        block = torch.div(slots, block_tokens, rounding_mode="floor")
        # A row is one head of one token: block * (2 * kv_heads * block_tokens) + offset, from slots alone.
        rows = slots + block * ((2 * self.layout.kv_heads - 1) * block_tokens)
        return self._device.upload((rows.unsqueeze(1) + self._head_rows).view(-1))

    def write_rows(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Writes kv [T, 2 * kv_heads, head_dim], keys before values."""
        self._attention.append(self.layer(layer), rows, kv)

    def _object(self, layer: int, block: int) -> memoryview:
        if not 0 <= block < self.blocks or layer not in self.layers:
            raise IndexError(f"block {block} of layer {layer} is outside the memory of {self.blocks} blocks")
        assert self._bytes is not None
        start = (self.layers.index(layer) * self.blocks + block) * self.layout.object_bytes
        return self._bytes[start : start + self.layout.object_bytes]


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, in place."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _views(staged: Tensor) -> list[memoryview]:
    """One byte view an object of a contiguous tensor [blocks, ...] in host memory, which they keep alive."""
    if not staged.shape[0]:
        return []
    whole = byte_view(staged)
    size = len(whole) // staged.shape[0]
    return [whole[i * size : (i + 1) * size] for i in range(staged.shape[0])]
