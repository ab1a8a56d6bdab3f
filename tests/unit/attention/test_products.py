from __future__ import annotations

import pytest
import torch

from kvcommons.attention.products import Matrix, multiply_transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_matrix_multiplies_as_the_plain_one(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, x = torch.randn(48, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    with torch.inference_mode():
        for matrix in (Matrix(weight, bias), Matrix.packed(weight.clone(), bias)):
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
