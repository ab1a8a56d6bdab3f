from __future__ import annotations

import pytest
import torch

from kvcommons.backend import products
from kvcommons.backend.products import WidenedMatrix, multiplies_bfloat16, multiply_transposed, packed
from kvcommons.backend.torch_operators import PlainMatrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_matrix_multiplies_as_the_plain_one(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, x = torch.randn(48, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    with torch.inference_mode():
        for matrix in (PlainMatrix(weight, bias), packed(weight.clone(), bias)):
            product = matrix(x)
            assert product.dtype == dtype
            torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=tolerance * 10)


def test_float32_products_are_not_rounded() -> None:
    a, b = torch.randn(65, 300), torch.randn(33, 300)
    expected = (a.double() @ b.double().t()).float()
    torch.testing.assert_close(multiply_transposed(a, b), expected, rtol=1e-5, atol=1e-4)
    turned = torch.randn(300, 33)
    expected = (a.double() @ turned.double()).float()
    torch.testing.assert_close(multiply_transposed(a, turned.t()), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(("out", "size"), [(5, 8), (700, 1024)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_widened_matrix_multiplies_as_the_plain_one_and_rounds_once(
    rows: int, out: int, size: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(out, size, generator=generator).bfloat16()
    x = torch.randn(rows, size, generator=generator).bfloat16()
    bias = torch.randn(out, generator=generator).bfloat16() if biased else None
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    product = WidenedMatrix(weight, bias)(x)
    assert product.dtype == torch.bfloat16
    # Half a unit in the last place of bfloat16, and what float32 sums are off by.
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-4)


def test_widening_takes_a_tile_beside_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1.1 times the weight's memory, however often it is multiplied with."""
    weight, x = torch.randn(4096, 4096).bfloat16(), torch.randn(4, 4096).bfloat16()
    matrix = WidenedMatrix(weight, None)
    matrix(x)
    with torch.profiler.profile(profile_memory=True) as profiled:
        matrix(x)
    allocated = sum(max(event.cpu_memory_usage, 0) for event in profiled.events() if not event.cpu_children)
    assert 0 < allocated < 0.1 * weight.nbytes
    assert matrix._weight.data_ptr() == weight.data_ptr(), "and keeps the weight that it was given"


@pytest.mark.parametrize(
    ("avx512", "amx", "emulates", "multiplies"),
    [
        (True, False, True, True),
        (False, True, True, True),
        (False, False, True, False),
        (True, True, False, False),
    ],
)
def test_the_instruction_is_asked_for_and_not_what_is_emulated(
    avx512: bool, amx: bool, emulates: bool, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: emulates)
    assert multiplies_bfloat16.__wrapped__() is multiplies


def test_bfloat16_is_widened_where_the_processor_cannot_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 96).bfloat16()
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    assert isinstance(packed(weight, None), WidenedMatrix)
    assert not isinstance(packed(weight.float(), None), WidenedMatrix)


def test_bfloat16_stays_as_it_is_where_the_processor_multiplies_it() -> None:
    if not products.multiplies_bfloat16():
        pytest.skip("this processor has no instructions for products of bfloat16")
    assert not isinstance(packed(torch.randn(48, 96).bfloat16(), None), WidenedMatrix)
