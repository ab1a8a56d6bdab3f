"""Partials over paged blocks against plain softmax attention in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvcommons.attention import kernel, partial
from kvcommons.attention.memory import BlockMemory
from kvcommons.attention.native import library
from kvcommons.attention.partial import BatchPlan, Partial, attend_batch, attend_chunk, merge
from kvcommons.rblock.layout import Layout

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SCALE = 0.3


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["torch", ""], ids=["torch", "kernel"])
def computing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By torch's operators, and by what is taken where nobody says anything."""
    monkeypatch.setenv(library.VARIABLE, request.param)
    return str(request.param)


def paged(
    sequences: list[tuple[Tensor, Tensor]], block_tokens: int, dtype: str, device: str
) -> tuple[BlockMemory, Tensor]:
    """Writes each (k, v) [T, heads, D] to shuffled blocks of one layer; the rest of memory is NaN."""
    heads, dim = sequences[0][0].shape[1:]
    layout = Layout(
        layers=1, kv_heads=heads, block_tokens=block_tokens, head_dim=dim, kv_dtype=dtype, query_heads=heads
    )
    need = [-(-k.shape[0] // block_tokens) for k, _ in sequences]
    memory = BlockMemory(layout, sum(need) + 1, device)
    memory.tensor.fill_(torch.nan)
    free = list(range(memory.blocks))
    random.Random(1).shuffle(free)
    table = torch.zeros(len(sequences), max(need), dtype=torch.int64)
    for row, ((k, v), count) in enumerate(zip(sequences, need, strict=True)):
        table[row] = free[-1]
        for block in range(count):
            table[row, block] = free.pop()
        tokens = torch.arange(k.shape[0])
        slots = table[row, tokens // block_tokens] * block_tokens + tokens % block_tokens
        memory.write_tokens(0, slots.to(device), k.to(device), v.to(device))
    return memory, table.to(device)


def reference(
    q: Tensor, k: Tensor, v: Tensor, first: int, positions: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,lhd->thl", q, k) * SCALE
    keys = torch.arange(k.shape[0]) + first
    seen = keys[None] <= positions[:, None]
    if window is not None:
        seen &= keys[None] > positions[:, None] - window
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]))
    return torch.einsum("thl,lhd->thd", weights, v), lse


def close(part: Partial, out: Tensor, lse: Tensor, tolerance: float) -> None:
    assert part.out.dtype == part.lse.dtype == torch.float32
    torch.testing.assert_close(part.out.cpu().double(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part.lse.cpu().double(), lse, rtol=tolerance, atol=tolerance)


def tensors(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(("length", "rows"), [(5, 5), (64, 1), (150, 33), (200, 64), (700, 300)])
def test_chunk_equals_plain_attention(
    device: str, dtype: torch.dtype, block_tokens: int, window: int | None, length: int, rows: int
) -> None:
    k, v, q = (tensors(i, dtype, n, h, 32) for i, (n, h) in enumerate([(length, 2), (length, 2), (rows, 6)]))
    memory, table = paged([(k, v)], block_tokens, str(dtype)[6:], device)
    positions = torch.arange(length - rows, length) + 100
    part = attend_chunk(
        q.to(device), memory.layer(0), table[0], length,
        first_key_position=100, query_positions=positions.to(device), scale=SCALE, window=window,
    )  # fmt: skip
    close(part, *reference(q, k, v, 100, positions, window), TOLERANCE[dtype])


@pytest.mark.parametrize("masked", [False, True])
def test_tiles_of_a_large_chunk_give_what_the_plain_kernel_gives(masked: bool) -> None:
    """In bfloat16 nearer to it than rounded weights would be; the last tile has fewer rows."""
    q, k, v = (tensors(i, torch.bfloat16, 1, 2, n, 32) for i, n in enumerate([900, 1200, 1200]))
    mask = None
    if masked:
        hidden = torch.arange(1200)[None] > torch.arange(900)[:, None] + 300
        mask = kernel.Mask.of(hidden[None, None])
    out, lse = kernel.tiled(q, k, v, mask, SCALE)
    expected = kernel.dense(q, k, v, mask, SCALE)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_batch_of_unequal_lengths_equals_plain_attention(
    device: str, dtype: torch.dtype, window: int | None, computing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "SPAN_TOKENS", 64)  # the long ones are read in spans
    lengths = [1, 16, 17, 200, 40, 41, 43, 300, 0]
    kvs = [
        (tensors(2 * i, dtype, n, 2, 32), tensors(2 * i + 1, dtype, n, 2, 32)) for i, n in enumerate(lengths)
    ]
    memory, tables = paged(kvs, 16, str(dtype)[6:], device)
    q = tensors(99, dtype, len(lengths), 4, 32)
    firsts = torch.arange(len(lengths)) * 10
    positions = firsts + torch.tensor(lengths) + 2
    part = attend_batch(
        q.to(device), memory.layer(0), tables, torch.tensor(lengths, device=device), scale=SCALE,
        first_key_positions=firsts.to(device), query_positions=positions.to(device), window=window,
    )  # fmt: skip
    for row, (k, v) in enumerate(kvs):
        one = Partial(out=part.out[row : row + 1], lse=part.lse[row : row + 1])
        expected = reference(q[row : row + 1], k, v, int(firsts[row]), positions[row : row + 1], window)
        close(one, *expected, TOLERANCE[dtype])


def test_batch_masks_keys_after_the_query(device: str, computing: str) -> None:
    k, v, q = (tensors(i, torch.float32, n, 1, 16) for i, n in enumerate([50, 50, 2]))
    memory, table = paged([(k, v)], 16, "float32", device)
    positions, firsts = torch.tensor([20, 5]), torch.tensor([0, 10])
    part = attend_batch(
        q.to(device), memory.layer(0), table.expand(2, -1), torch.tensor([50, 50], device=device),
        first_key_positions=firsts.to(device), query_positions=positions.to(device), scale=SCALE,
    )  # fmt: skip
    close(Partial(out=part.out[:1], lse=part.lse[:1]), *reference(q[:1], k, v, 0, positions[:1], None), 2e-5)
    assert part.lse[1].isneginf().all()
    assert (part.out[1] == 0).all()


def test_a_far_window_sees_nothing(device: str) -> None:
    k = tensors(0, torch.float32, 40, 1, 16)
    memory, table = paged([(k, k)], 16, "float32", device)
    positions = torch.arange(90, 93)
    part = attend_chunk(
        tensors(1, torch.float32, 3, 2, 16).to(device), memory.layer(0), table[0], 40,
        first_key_position=0, query_positions=positions.to(device), scale=SCALE, window=52,
    )  # fmt: skip
    assert not part.lse[0].isneginf().any()  # position 39 is 51 away
    assert part.lse[1:].isneginf().all()
    assert (part.out[1:] == 0).all()


@pytest.mark.parametrize("cut", [0, 16, 48, 100])
def test_parts_merge_to_the_whole(device: str, cut: int, computing: str) -> None:
    k, v, q = (tensors(i, torch.float32, n, h, 32) for i, (n, h) in enumerate([(100, 2), (100, 2), (9, 4)]))
    positions = torch.arange(91, 100)
    parts = []
    for first, last in ((0, cut), (cut, 100)):
        memory, table = paged([(k[first:last], v[first:last])], 16, "float32", device)
        part = attend_chunk(
            q.to(device), memory.layer(0), table[0], last - first,
            first_key_position=first, query_positions=positions.to(device), scale=SCALE,
        )  # fmt: skip
        parts.append(part)
    close(merge(parts), *reference(q, k, v, 0, positions, None), 2e-5)


def test_merge_of_empty_parts_is_empty(device: str, computing: str) -> None:
    empty = Partial.empty(torch.zeros(2, 3, 4, device=device))
    merged = merge([empty, empty])
    assert merged.lse.isneginf().all()
    assert (merged.out == 0).all()
    full = Partial(out=torch.ones(2, 3, 4, device=device), lse=torch.full((2, 3), -80.0, device=device))
    torch.testing.assert_close(merge([empty, full, empty]).out, full.out)
    torch.testing.assert_close(merge([empty, full]).lse, full.lse)


def test_fused_and_dense_kernels_agree(device: str) -> None:
    q, k, v = (tensors(i, torch.float32, 2, 3, n, 16).to(device) for i, n in enumerate([5, 600, 600]))
    hidden = torch.zeros(2, 1, 5, 600, dtype=torch.bool, device=device)
    hidden[0, :, 1, :] = True
    hidden[1, :, 2, :599] = True
    mask = kernel.Mask.of(hidden)
    out, lse = kernel.attend(q, k, v, mask, SCALE)
    want_out, want_lse = kernel.dense(q, k, v, mask, SCALE)
    torch.testing.assert_close(out, want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    assert lse[0, :, 1].isneginf().all()


def test_a_batch_into_memory_of_the_callers(computing: str) -> None:
    source = torch.Generator().manual_seed(7)
    kv = torch.randn(6, 2, 2, 4, 8, generator=source)
    plan = BatchPlan(
        kv.shape, torch.tensor([[5, 1], [2, 0]]), torch.tensor([7, 3]),
        first_key_positions=torch.zeros(2, dtype=torch.long), query_positions=torch.tensor([6, 2]),
    )  # fmt: skip
    q = torch.randn(2, 4, 8, generator=source)
    expected = plan.attend(q, kv, 0.3)
    into = Partial(out=torch.full((2, 4, 8), torch.nan), lse=torch.full((2, 4), torch.nan))
    assert plan.attend(q, kv, 0.3, into) is into
    assert torch.equal(into.out, expected.out)
    assert torch.equal(into.lse, expected.lse)
