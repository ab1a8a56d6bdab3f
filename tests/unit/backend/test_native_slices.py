"""What the compiled kernel computes of a slice, against float64, for every instruction set here."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from kvcommons.attention.native import slices
from kvcommons.attention.native.library import Kernel
from tests.unit.backend.kernels import chosen, needs_compiler, variants

# A half in the last place of the dtype, of values around 4, and float32's own rounding before.
ERRORS = {torch.bfloat16: 2**-8, torch.float32: 2**-20}


pytestmark = needs_compiler


@pytest.fixture(params=variants())
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return chosen(request.param, monkeypatch)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def close(ours: torch.Tensor, truth: torch.Tensor) -> bool:
    assert ours.shape == truth.shape
    bound = ERRORS[ours.dtype] * truth.abs().clamp_min(1.0)
    return bool(((ours.double() - truth).abs() <= bound).all())


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 24), (75, 1024)])
def test_sums_and_norms(kernel: Kernel, threads: int, dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(rows)
    x, added = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype)
    weight = torch.rand(size) + 0.5

    def normed(total: torch.Tensor) -> torch.Tensor:
        wide = total.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    total, out = slices.norm(kernel, x, added, weight, 1e-5)

    assert torch.equal(total, x + added), "torch rounds it as exactly"
    assert close(out, normed(total))
    same, alone = slices.norm(kernel, x, None, weight, 1e-5)
    assert torch.equal(same, x)
    assert close(alone, normed(x))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 16), (3, 5, 48), (75, 20, 64)])
def test_rotates_the_first_heads_of_rows(
    kernel: Kernel, threads: int, dtype: torch.dtype, rows: int, heads: int, dim: int
) -> None:
    torch.manual_seed(rows)
    qkv = torch.randn(rows, heads + 2, dim).to(dtype)
    angles = torch.rand(rows, 1, dim // 2) * 2 * math.pi
    cos, sin = angles.cos(), angles.sin()

    out = slices.rotate(kernel, qkv[:, :heads], cos, sin)

    first, second = qkv[:, :heads].double().chunk(2, -1)
    truth = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert out.dtype == dtype
    assert close(out, truth)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 16), (3, 5, 48), (75, 20, 128)])
def test_norms_the_heads_that_it_rotates_in_place(
    kernel: Kernel, threads: int, dtype: torch.dtype, rows: int, heads: int, dim: int
) -> None:
    torch.manual_seed(rows)
    qkv, weight = torch.randn(rows, heads + 2, dim).to(dtype), torch.rand(heads, dim) + 0.5
    before = qkv.clone()
    angles = torch.rand(rows, 1, dim // 2) * 2 * math.pi
    cos, sin = angles.cos(), angles.sin()

    out = slices.rotate(kernel, qkv[:, :heads], cos, sin, weight, 1e-5)

    wide = before[:, :heads].double()
    assert close(qkv[:, :heads], wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)
    assert torch.equal(qkv[:, heads:], before[:, heads:])
    assert torch.equal(out, slices.rotate(kernel, qkv[:, :heads], cos, sin))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 24), (75, 2816)])
def test_gates(kernel: Kernel, threads: int, dtype: torch.dtype, rows: int, size: int) -> None:
    torch.manual_seed(rows)
    mixed = (4 * torch.randn(rows, 2 * size)).to(dtype)
    mixed[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -0.5])

    out = slices.gate(kernel, mixed)

    gate, up = mixed.double().chunk(2, -1)
    assert close(out, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", ERRORS)
def test_what_is_no_number_stays_none(kernel: Kernel, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 32, dtype=dtype)
    x[0, 3] = torch.nan
    _, normed = slices.norm(kernel, x, None, torch.ones(32), 1e-5)
    gated = slices.gate(kernel, x)
    assert normed[0].isnan().all()
    assert not normed[1].isnan().any()
    assert gated[0, 3].isnan()
    assert not gated[1].isnan().any()


def test_serves_rows_of_whole_registers() -> None:
    assert slices.has_whole_registers(24)
    assert not slices.has_whole_registers(12)
