"""What every backend computes (kvcommons.backend.interface), against plain formulas in float64: torch's
reference, the CPU with its kernel and without, a device that does everything late, in memory of its own, and
the kernels for GPUs, on a GPU or by Triton's interpreter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcommons.backend import torch_attention
from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Backend, LayerWeights, Partial
from kvcommons.backend.memory import BlockMemory
from kvcommons.rblock.layout import Layout
from tests.asynchronous import HostAccess, asynchronous
from tests.backends import attend_batch, attend_chunk, reference, without_kernel
from tests.interpreted import interpreted, needs_triton

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": reference,
    "native": choose,
    "native-without-kernel": without_kernel,
    "asynchronous": asynchronous,
}
INTERPRETED = pytest.param(interpreted, id="interpreted", marks=[pytest.mark.slow, needs_triton])
CUDA = pytest.param(lambda: choose("cuda"), id="cuda")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SCALE = 0.3


@pytest.fixture(
    params=[
        *(pytest.param(make, id=name) for name, make in BACKENDS.items()),
        CUDA if torch.cuda.is_available() else INTERPRETED,
    ]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    make: Callable[[], Backend] = request.param
    return make()


@pytest.fixture(params=DTYPES, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


def paged(
    sequences: list[tuple[Tensor, Tensor]], block_tokens: int, backend: Backend
) -> tuple[BlockMemory, Tensor]:
    """Writes each (k, v) [T, heads, D] to shuffled blocks of one layer; the rest of memory is NaN."""
    heads, dim = sequences[0][0].shape[1:]
    dtype = sequences[0][0].dtype
    layout = Layout(
        layers=1, kv_heads=heads, block_tokens=block_tokens, head_dim=dim, kv_dtype=str(dtype)[6:],
        query_heads=heads,
    )  # fmt: skip
    need = [-(-k.shape[0] // block_tokens) for k, _ in sequences]
    memory = BlockMemory(layout, sum(need) + 1, backend)
    memory.tensor.fill_(torch.nan)
    free = list(range(memory.blocks))
    random.Random(1).shuffle(free)
    table = torch.zeros(len(sequences), max(need), dtype=torch.int64)
    upload = backend.device.upload
    for row, ((k, v), count) in enumerate(zip(sequences, need, strict=True)):
        table[row] = free[-1]
        for block in range(count):
            table[row, block] = free.pop()
        tokens = torch.arange(k.shape[0])
        slots = table[row, tokens // block_tokens] * block_tokens + tokens % block_tokens
        memory.write_tokens(0, slots, upload(k), upload(v))
    return memory, table


def expected(
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


def close(backend: Backend, part: Partial, out: Tensor, lse: Tensor, tolerance: float) -> None:
    assert part.out.dtype == part.lse.dtype == torch.float32
    fetch = backend.device.fetch
    torch.testing.assert_close(fetch(part.out).double(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fetch(part.lse).double(), lse, rtol=tolerance, atol=tolerance)


def tensors(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(("length", "rows"), [(5, 5), (64, 1), (150, 33), (200, 64), (700, 300)])
def test_chunk_equals_plain_attention(
    backend: Backend, dtype: torch.dtype, block_tokens: int, window: int | None, length: int, rows: int
) -> None:
    k, v, q = (tensors(i, dtype, n, h, 32) for i, (n, h) in enumerate([(length, 2), (length, 2), (rows, 6)]))
    memory, table = paged([(k, v)], block_tokens, backend)
    positions = torch.arange(length - rows, length) + 100
    part = attend_chunk(
        backend.device.upload(q), memory.layer(0), table[0], length, backend=backend,
        first_key_position=100, query_positions=positions, scale=SCALE, window=window,
    )  # fmt: skip
    close(backend, part, *expected(q, k, v, 100, positions, window), TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [32, 12], ids=["", "uneven"])
@pytest.mark.parametrize("window", [None, 30])
def test_batch_of_unequal_lengths_equals_plain_attention(
    backend: Backend,
    dtype: torch.dtype,
    window: int | None,
    dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_attention, "SPAN_TOKENS", 64)  # the long ones are read in spans
    lengths = [1, 16, 17, 200, 40, 41, 43, 300, 0]
    kvs = [
        (tensors(2 * i, dtype, n, 2, dim), tensors(2 * i + 1, dtype, n, 2, dim))
        for i, n in enumerate(lengths)
    ]
    memory, tables = paged(kvs, 16, backend)
    q = tensors(99, dtype, len(lengths), 4, dim)
    firsts = torch.arange(len(lengths)) * 10
    positions = firsts + torch.tensor(lengths) + 2
    part = attend_batch(
        backend.device.upload(q), memory.layer(0), tables, torch.tensor(lengths), scale=SCALE,
        first_key_positions=firsts, query_positions=positions, window=window, backend=backend,
    )  # fmt: skip
    for row, (k, v) in enumerate(kvs):
        one = Partial(out=part.out[row : row + 1], lse=part.lse[row : row + 1])
        wanted = expected(q[row : row + 1], k, v, int(firsts[row]), positions[row : row + 1], window)
        close(backend, one, *wanted, TOLERANCE[dtype])


def test_batch_masks_keys_after_the_query(backend: Backend) -> None:
    k, v, q = (tensors(i, torch.float32, n, 1, 16) for i, n in enumerate([50, 50, 2]))
    memory, table = paged([(k, v)], 16, backend)
    positions, firsts = torch.tensor([20, 5]), torch.tensor([0, 10])
    part = attend_batch(
        backend.device.upload(q), memory.layer(0), table.expand(2, -1), torch.tensor([50, 50]), scale=SCALE,
        first_key_positions=firsts, query_positions=positions, backend=backend,
    )  # fmt: skip
    one = Partial(out=part.out[:1], lse=part.lse[:1])
    close(backend, one, *expected(q[:1], k, v, 0, positions[:1], None), 2e-5)
    assert backend.device.fetch(part.lse)[1].isneginf().all()
    assert (backend.device.fetch(part.out)[1] == 0).all()


def test_a_far_window_sees_nothing(backend: Backend) -> None:
    k = tensors(0, torch.float32, 40, 1, 16)
    memory, table = paged([(k, k)], 16, backend)
    part = attend_chunk(
        backend.device.upload(tensors(1, torch.float32, 3, 2, 16)), memory.layer(0), table[0], 40,
        first_key_position=0, query_positions=torch.arange(90, 93), scale=SCALE, window=52, backend=backend,
    )  # fmt: skip
    out, lse = backend.device.fetch(part.out), backend.device.fetch(part.lse)
    assert not lse[0].isneginf().any()  # position 39 is 51 away
    assert lse[1:].isneginf().all()
    assert (out[1:] == 0).all()


def test_a_plan_serves_layer_after_layer_whatever_becomes_of_lengths(backend: Backend) -> None:
    k, v, q = (tensors(i, torch.float32, n, h, 16) for i, (n, h) in enumerate([(50, 2), (50, 2), (1, 4)]))
    memory, table = paged([(k, v)], 16, backend)
    lengths, positions = torch.tensor([50]), torch.tensor([49])
    plan = backend.attention.plan_batch(
        memory.layer(0), table, lengths, first_key_positions=torch.tensor([0]), query_positions=positions
    )
    lengths += 1
    positions += 1
    for _ in range(2):
        part = plan.attend(backend.device.upload(q), memory.layer(0), SCALE)
        close(backend, part, *expected(q, k, v, 0, torch.tensor([49]), None), 2e-5)


@pytest.mark.parametrize("cut", [0, 16, 48, 100])
def test_parts_merge_to_the_whole(backend: Backend, cut: int) -> None:
    k, v, q = (tensors(i, torch.float32, n, h, 32) for i, (n, h) in enumerate([(100, 2), (100, 2), (9, 4)]))
    positions = torch.arange(91, 100)
    parts = []
    for first, last in ((0, cut), (cut, 100)):
        memory, table = paged([(k[first:last], v[first:last])], 16, backend)
        part = attend_chunk(
            backend.device.upload(q), memory.layer(0), table[0], last - first, backend=backend,
            first_key_position=first, query_positions=positions, scale=SCALE,
        )  # fmt: skip
        parts.append(part)
    close(backend, backend.attention.merge(parts), *expected(q, k, v, 0, positions, None), 2e-5)


def test_merge_of_empty_parts_is_empty(backend: Backend) -> None:
    upload, fetch, merge = backend.device.upload, backend.device.fetch, backend.attention.merge
    empty = Partial.empty(upload(torch.zeros(2, 3, 4)))
    merged = merge([empty, empty])
    assert fetch(merged.lse).isneginf().all()
    assert (fetch(merged.out) == 0).all()
    full = Partial(out=upload(torch.ones(2, 3, 4)), lse=upload(torch.full((2, 3), -80.0)))
    torch.testing.assert_close(fetch(merge([empty, full, empty]).out), torch.ones(2, 3, 4))
    torch.testing.assert_close(fetch(merge([empty, full]).lse), torch.full((2, 3), -80.0))


def test_a_batch_into_memory_of_the_callers(backend: Backend) -> None:
    upload, fetch = backend.device.upload, backend.device.fetch
    kv, q = upload(tensors(7, torch.float32, 6, 2, 2, 4, 8)), upload(tensors(8, torch.float32, 2, 4, 8))
    plan = backend.attention.plan_batch(
        kv, torch.tensor([[5, 1], [2, 0]]), torch.tensor([7, 3]),
        first_key_positions=torch.zeros(2, dtype=torch.long), query_positions=torch.tensor([6, 2]),
    )  # fmt: skip
    wanted = plan.attend(q, kv, 0.3)
    into = Partial(out=upload(torch.full((2, 4, 8), torch.nan)), lse=upload(torch.full((2, 4), torch.nan)))
    assert plan.attend(q, kv, 0.3, into) is into
    assert torch.equal(fetch(into.out), fetch(wanted.out))
    assert torch.equal(fetch(into.lse), fetch(wanted.lse))


def block_layout(dtype: torch.dtype = torch.float32) -> Layout:
    return Layout(layers=3, kv_heads=2, block_tokens=4, head_dim=8, kv_dtype=str(dtype)[6:], query_heads=4)


def content(backend: Backend, tensor: Tensor) -> Tensor:
    return backend.device.fetch(tensor).clone()


def test_tokens_are_appended_to_their_slots_and_found_in_the_objects_bytes(
    backend: Backend, dtype: torch.dtype
) -> None:
    memory = BlockMemory(block_layout(dtype), 5, backend)
    k, v = tensors(1, dtype, 3, 2, 8), tensors(2, dtype, 3, 2, 8)
    slots = torch.tensor([4 * 4 + 3, 2 * 4, 2 * 4 + 1])
    memory.write_tokens(1, slots, backend.device.upload(k), backend.device.upload(v))
    layer = content(backend, memory.layer(1))
    assert torch.equal(layer[4, 0, :, 3], k[0])
    assert torch.equal(layer[2, 1, :, 1], v[2])
    (buffer,) = memory.read_buffers(1, [2])
    assert len(buffer) == memory.layout.object_bytes
    read = torch.frombuffer(bytearray(buffer), dtype=dtype).view(memory.layout.object_shape)
    assert torch.equal(read[0, :, :2], k[1:].transpose(0, 1))
    assert content(backend, memory.tensor).count_nonzero() == layer[[2, 4]].count_nonzero()


def test_what_is_read_is_what_had_been_written_by_then(backend: Backend) -> None:
    """Even if it is looked at after the next write, where it was copied."""
    memory = BlockMemory(block_layout(), 2, backend)
    upload, slots = backend.device.upload, torch.tensor([4])
    memory.write_tokens(0, slots, upload(torch.ones(1, 2, 8)), upload(torch.ones(1, 2, 8)))
    (buffer,), event = memory.begin_read(0, [1])
    memory.write_tokens(0, slots, upload(torch.zeros(1, 2, 8)), upload(torch.zeros(1, 2, 8)))
    event.wait()
    assert event.done
    assert any(buffer) != backend.device.host


def test_bytes_written_are_the_blocks(backend: Backend) -> None:
    source, target = BlockMemory(block_layout(), 4, backend), BlockMemory(block_layout(), 6, backend)
    source.tensor.copy_(backend.device.upload(tensors(1, torch.float32, *source.tensor.shape)))
    with target.write_buffers(2, [5, 0]) as buffers:
        for buffer, data in zip(buffers, source.read_buffers(2, [1, 3]), strict=True):
            buffer[:] = data
    written = content(backend, target.tensor)
    assert torch.equal(written[2][[5, 0]], content(backend, source.layer(2))[[1, 3]])
    assert written.count_nonzero() == written[2][[5, 0]].count_nonzero()


ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def near(backend: Backend, ours: Tensor, wanted: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    assert ours.dtype == dtype
    bound = ROUNDING[dtype] * scale
    torch.testing.assert_close(backend.device.fetch(ours).double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_packed_weight_multiplies(backend: Backend, dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, x = tensors(1, dtype, 48, 96), tensors(2, dtype, rows, 96)
    bias = tensors(3, dtype, 48) if biased else None
    wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    upload = backend.device.upload
    with torch.inference_mode():
        matrix = backend.operators.pack(upload(weight.clone()), None if bias is None else upload(bias))
        near(backend, matrix(upload(x)), wanted, dtype, 20.0)


def test_a_tied_weight_is_looked_up_in_and_multiplied_with(backend: Backend, dtype: torch.dtype) -> None:
    weight, x = tensors(1, dtype, 75, 96), tensors(2, dtype, 3, 96)
    tokens = torch.tensor([0, 74, 31, 32, 0])
    upload = backend.device.upload
    with torch.inference_mode():
        embedding, matrix = backend.operators.pack_tied(upload(weight.clone()))
        assert torch.equal(backend.device.fetch(embedding(upload(tokens))), weight[tokens])
        near(backend, matrix(upload(x)), x.double() @ weight.double().t(), dtype, 20.0)


@pytest.mark.parametrize("size", [24, 12], ids=["", "uneven"])
@pytest.mark.parametrize("added", [False, True])
def test_sums_and_norms(backend: Backend, dtype: torch.dtype, size: int, added: bool) -> None:
    x, more, weight = tensors(1, dtype, 5, size), tensors(2, dtype, 5, size), torch.rand(size) + 0.5
    upload, total = backend.device.upload, x + more if added else x
    wide = total.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    operators = backend.operators
    summed, normed = operators.add_and_norm(upload(x), upload(more) if added else None, upload(weight), 1e-5)
    assert torch.equal(backend.device.fetch(summed), total)
    near(backend, normed, wanted, dtype)
    near(backend, operators.norm(upload(total), upload(weight), 1e-5), wanted, dtype)


def test_heads_are_normed_by_weights_of_their_own(backend: Backend, dtype: torch.dtype) -> None:
    x, weight = tensors(1, dtype, 5, 3, 16), torch.rand(3, 16) + 0.5
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    upload = backend.device.upload
    near(backend, backend.operators.norm(upload(x), upload(weight), 1e-5), wanted, dtype)


@pytest.mark.parametrize("dim", [48, 12], ids=["", "uneven"])
def test_the_first_heads_of_rows_are_rotated(backend: Backend, dtype: torch.dtype, dim: int) -> None:
    qkv, angles = tensors(1, dtype, 3, 7, dim), torch.rand(3, 1, dim // 2) * 2 * math.pi
    first, second = qkv[:, :5].double().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    wanted = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    upload = backend.device.upload
    near(backend, backend.operators.rotate(upload(qkv)[:, :5], upload(cos), upload(sin)), wanted, dtype, 2.0)


@pytest.mark.parametrize("size", [24, 12], ids=["", "uneven"])
def test_gates(backend: Backend, dtype: torch.dtype, size: int) -> None:
    mixed = 4 * tensors(1, dtype, 3, 2 * size)
    gate, up = mixed.double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up
    near(backend, backend.operators.gate(backend.device.upload(mixed)), wanted, dtype, 2.0)


def test_an_event_covers_what_was_given_before_it(backend: Backend) -> None:
    device = backend.device
    double = device.upload(torch.arange(4.0)) * 2
    staged, event = device.download(double)
    later = device.download(double + 1)
    later[1].wait()
    assert event.done, "work is done in the order in which it was given"
    assert staged.tolist() == [0, 2, 4, 6]
    assert later[0].tolist() == [1, 3, 5, 7]
    device.record().wait()


def test_a_native_exchange_is_of_memory_that_the_host_addresses(backend: Backend) -> None:
    assert backend.attention.native_exchange is None or backend.device.host


def test_the_asynchronous_device_does_nothing_before_it_is_waited_for_and_lets_nobody_look() -> None:
    """Of the stand-in itself: what passes on it would not pass by chance."""
    device = asynchronous().device
    host = torch.arange(4.0)
    far = device.upload(host)
    host[0] = 9.0
    staged, event = device.download(far + 1)
    assert staged.isnan().all()
    assert not event.done
    event.wait()
    assert staged.tolist() == [10, 2, 3, 4]
    looks: list[Callable[[], object]] = [
        far.tolist, far.numpy, far.data_ptr, far.cpu, lambda: float(far[0]), lambda: bool((far > 0).any()),
        lambda: far + torch.ones(4), lambda: torch.ones(4).copy_(far), lambda: torch.ones(4)[far.long()],
        lambda: far.to("cpu"), lambda: int(far.sum()), lambda: device.fetch(torch.ones(4)),
    ]  # fmt: skip
    for look in looks:
        with pytest.raises((HostAccess, RuntimeError, NotImplementedError)):
            look()


@pytest.mark.parametrize("normed", [False, True])
def test_a_layer_is_what_its_formulas_say(backend: Backend, dtype: torch.dtype, normed: bool) -> None:
    """Up to attention, from it on, and from one layer's attention to the next one's."""
    hidden, mlp, dim, heads, kv_heads, rows = 64, 96, 16, 4, 2, 5
    device, operators = backend.device, backend.operators
    shapes = {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "output": (hidden, heads * dim),
        "gate_up": (2 * mlp, hidden),
        "down": (hidden, mlp),
    }
    exact = {
        name: tensors(at, dtype, *shape) / shape[1] ** 0.5 for at, (name, shape) in enumerate(shapes.items())
    }
    norms = {name: torch.rand(hidden) + 0.5 for name in ("attention_norm", "mlp_norm")}
    qk_norm = torch.rand(heads + kv_heads, dim) + 0.5 if normed else None
    layer = operators.layer(
        LayerWeights(
            **{name: operators.pack(device.upload(weight)) for name, weight in exact.items()},
            **{name: device.upload(weight) for name, weight in norms.items()},
            qk_norm=None if qk_norm is None else device.upload(qk_norm),
            head_dim=dim,
            rotated_heads=heads + kv_heads,
            epsilon=1e-5,
        )
    )

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def opened(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, v, and q and k rotated."""
        qkv = (rms(x, norms["attention_norm"]) @ exact["qkv"].double().t()).view(rows, -1, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        qk = qk if qk_norm is None else rms(qk, qk_norm)
        first, second = qk[..., : dim // 2], qk[..., dim // 2 :]
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return qk, v, rotated

    def closed(x: Tensor, attended: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        x = x + ranks * (attended @ exact["output"].double().t())
        gate, up = (rms(x, norms["mlp_norm"]) @ exact["gate_up"].double().t()).chunk(2, -1)
        return x, ranks * ((torch.nn.functional.silu(gate) * up) @ exact["down"].double().t())

    x, attended = tensors(7, dtype, rows, hidden), tensors(8, dtype, rows, heads * dim)
    angles = torch.rand(rows, 1, dim // 2) * 2 * math.pi
    cos, sin = angles.cos(), angles.sin()
    rotation = device.upload(cos), device.upload(sin)
    made = layer.open(device.upload(x), None, *rotation)
    for part, wanted in zip((made.qk, made.v, made.rotated), opened(x.double()), strict=True):
        near(backend, part, wanted, dtype, scale=3)
    for ranks in (1, 2):
        total = None if ranks == 1 else (lambda summand: summand + summand)
        stream, added = layer.close(device.upload(x), device.upload(attended), total)
        near(backend, stream, closed(x.double(), attended.double(), ranks)[0], dtype, scale=3)
        near(backend, added, closed(x.double(), attended.double(), ranks)[1], dtype, scale=6)
    passed = layer.advance(layer, device.upload(x), device.upload(attended), *rotation)
    stream, added = closed(x.double(), attended.double(), 1)
    near(backend, passed.hidden, stream + added, dtype, scale=6)
    for part, wanted in zip((passed.qk, passed.v, passed.rotated), opened(stream + added), strict=True):
        near(backend, part, wanted, dtype, scale=12)
