"""BlockMemory: objects as bytes, tokens by slot."""

from __future__ import annotations

import pytest
import torch

from kvcommons.backend.choice import choose
from kvcommons.backend.memory import BlockMemory
from kvcommons.rblock.layout import Layout

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def layout(dtype: str = "bfloat16") -> Layout:
    return Layout(layers=3, kv_heads=2, block_tokens=4, head_dim=8, kv_dtype=dtype, query_heads=4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_found_in_the_objects_bytes(device: str, dtype: str) -> None:
    memory = BlockMemory(layout(dtype), 5, choose(device))
    k = torch.randn(3, 2, 8, device=device).to(memory.tensor.dtype)
    v = torch.randn(3, 2, 8, device=device).to(memory.tensor.dtype)
    memory.write_tokens(1, torch.tensor([4 * 4 + 3, 2 * 4, 2 * 4 + 1]), k, v)
    assert torch.equal(memory.layer(1)[4, 0, :, 3], k[0])
    assert torch.equal(memory.layer(1)[2, 1, :, 1], v[2])
    (buffer,) = memory.read_buffers(1, [2])
    assert len(buffer) == memory.layout.object_bytes
    read = torch.frombuffer(bytearray(buffer), dtype=memory.tensor.dtype).view(memory.layout.object_shape)
    assert torch.equal(read[0, :, :2], k[1:].transpose(0, 1).cpu())
    assert memory.tensor.count_nonzero() == memory.layer(1)[[2, 4]].count_nonzero()


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_written_are_the_blocks(device: str) -> None:
    source, target = (BlockMemory(layout(), blocks, choose(device)) for blocks in (4, 6))
    source.tensor.copy_(torch.randn(source.tensor.shape))
    with target.write_buffers(2, [5, 0]) as buffers:
        for buffer, data in zip(buffers, source.read_buffers(2, [1, 3]), strict=True):
            buffer[:] = data
    assert torch.equal(target.layer(2)[[5, 0]], source.layer(2)[[1, 3]])
    assert target.tensor.count_nonzero() == target.layer(2)[[5, 0]].count_nonzero()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, which computes on when a call has returned"
)
def test_what_is_saved_does_not_wait_for_what_is_computed() -> None:
    memory = BlockMemory(layout(), 5, choose("cuda"))
    memory.read_buffers(2, [1, 3])  # kernels are loaded
    torch.cuda._sleep(10**9)
    computed = torch.cuda.current_stream().record_event()
    objects, event = memory.begin_read(2, [1, 3])
    assert not computed.query()
    event.wait()
    assert computed.query()
    assert len(objects) == 2


def test_read_buffers_are_views_on_the_cpu() -> None:
    memory = BlockMemory(layout(), 2)
    (buffer,) = memory.read_buffers(0, [1])
    memory.layer(0)[1].fill_(1.0)
    assert any(buffer)


def test_a_block_outside_the_memory_is_refused() -> None:
    memory = BlockMemory(layout(), 2)
    with pytest.raises(IndexError, match="outside the memory"):
        memory.read_buffers(0, [2])


def test_a_memory_without_blocks_is_allowed() -> None:
    assert BlockMemory(layout(), 0).tensor.numel() == 0
