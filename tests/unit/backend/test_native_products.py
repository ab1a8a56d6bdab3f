"""The compiled kernel's products, against float64, for every instruction set here."""

from __future__ import annotations

import pytest
import torch

from kvcommons.attention.native.library import Kernel
from kvcommons.attention.native.products import PackedWeight, WeightMemory, serves
from tests.unit.backend.kernels import chosen, needs_compiler, variants

pytestmark = needs_compiler
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(5, 8), (48, 96), (131, 64), (33, 1030), (700, 1024)]


@pytest.fixture(params=variants())
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return chosen(request.param, monkeypatch)


def drawn(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "size"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_any_number_of_rows_is_multiplied_and_rounded_once(
    kernel: Kernel, dtype: torch.dtype, out: int, size: int, biased: bool
) -> None:
    weight, bias = drawn(1, dtype, out, size), drawn(2, dtype, out) if biased else None
    packed = PackedWeight(kernel, WeightMemory(), weight, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 16, 19, 24, 25, 31, 95, 96, 97, 203):
        x = drawn(rows, dtype, rows, size)
        exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        product = packed.multiply(x)
        assert product.dtype == dtype
        # Half a unit in the last place of bfloat16, and what float32 sums are off by.
        unit = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(product.double(), exact, rtol=unit, atol=1e-4)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "size"), [(131, 64), (700, 1024)])
def test_a_row_has_the_same_bits_in_every_batch(
    kernel: Kernel, dtype: torch.dtype, out: int, size: int
) -> None:
    packed = PackedWeight(kernel, WeightMemory(), drawn(1, dtype, out, size), drawn(2, dtype, out))
    x = drawn(3, dtype, 203, size)
    alone = torch.cat([packed.multiply(row) for row in x.split(1)])
    for rows in (2, 3, 5, 8, 11, 12, 13, 20, 30, 203):
        together = torch.cat([packed.multiply(part) for part in x.split(rows)])
        assert torch.equal(together, alone), rows
    torch.set_num_threads(1)
    assert torch.equal(packed.multiply(x), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "size"), SHAPES)
def test_a_packed_weight_gives_its_rows_back(kernel: Kernel, dtype: torch.dtype, out: int, size: int) -> None:
    weight, numbers = drawn(1, dtype, out, size), torch.arange(out).flip(0)
    packed = PackedWeight(kernel, WeightMemory(), weight, None)
    assert torch.equal(packed.weight_rows(numbers), weight[numbers])
    assert packed.weight_rows(numbers[:0]).shape == (0, size)


def test_rows_of_any_strides_and_none(kernel: Kernel) -> None:
    weight, x = drawn(1, torch.float32, 48, 96), drawn(2, torch.float32, 96, 5)
    packed = PackedWeight(kernel, WeightMemory(), weight, None)
    torch.testing.assert_close(packed.multiply(x.t()), x.t() @ weight.t(), rtol=1e-4, atol=1e-4)
    assert packed.multiply(x.t()[:0]).shape == (0, 48)


def test_what_is_no_number_stays_none_and_in_its_row(kernel: Kernel) -> None:
    packed = PackedWeight(kernel, WeightMemory(), drawn(1, torch.bfloat16, 48, 96), None)
    x = drawn(2, torch.bfloat16, 9, 96)
    x[3, 5] = torch.nan
    product = packed.multiply(x)
    assert product[3].isnan().all()
    assert not product[[0, 1, 2, 4, 5, 6, 7, 8]].isnan().any()


def test_serves_what_is_of_whole_words() -> None:
    assert serves(torch.zeros(3, 5))
    assert serves(torch.zeros(3, 6).bfloat16())
    assert not serves(torch.zeros(3, 5).bfloat16())
    assert not serves(torch.zeros(3, 6).half())


def test_weights_lie_close_together_and_apart() -> None:
    memory = WeightMemory()
    pieces = [memory.take(size) for size in (100, 64, 1, 70 << 20, 200)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    assert [int(piece.min()) for piece in pieces] == [int(piece.max()) for piece in pieces] == [0, 1, 2, 3, 4]
    assert pieces[2].data_ptr() - pieces[0].data_ptr() == 192
