"""A layer in one call of the compiled kernel, against one operator after another: the same bits."""

from __future__ import annotations

import pytest
import torch

from kvcommons.backend.interface import LayerWeights
from kvcommons.backend.native_layer import NativeLayer
from kvcommons.backend.native_operators import NativeOperators
from kvcommons.backend.plain_layer import PlainLayer
from tests.unit.backend.kernels import chosen, needs_compiler, variants

pytestmark = needs_compiler
HIDDEN, MLP, DIM, HEADS, KV_HEADS = 48, 80, 16, 3, 1


def weights(operators: NativeOperators, dtype: torch.dtype, *, biased: bool, normed: bool) -> LayerWeights:
    def matrix(rows: int, size: int) -> object:
        bias = torch.randn(rows).to(dtype) if biased else None
        return operators.pack((torch.randn(rows, size) / size**0.5).to(dtype), bias)

    return LayerWeights(
        attention_norm=torch.rand(HIDDEN) + 0.5,
        qkv=matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),  # type: ignore[arg-type]
        qk_norm=torch.rand(HEADS + KV_HEADS, DIM) + 0.5 if normed else None,
        output=matrix(HIDDEN, HEADS * DIM),  # type: ignore[arg-type]
        mlp_norm=torch.rand(HIDDEN) + 0.5,
        gate_up=matrix(2 * MLP, HIDDEN),  # type: ignore[arg-type]
        down=matrix(HIDDEN, MLP),  # type: ignore[arg-type]
        head_dim=DIM,
        rotated_heads=HEADS + KV_HEADS,
        epsilon=1e-5,
    )


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_one_call_gives_the_bits_of_one_after_another(
    variant: str, dtype: torch.dtype, biased: bool, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    operators = NativeOperators(chosen(variant, monkeypatch))
    layers = [weights(operators, dtype, biased=biased, normed=normed) for _ in range(2)]
    native = [operators.layer(one) for one in layers]
    plain = PlainLayer(operators, layers[0])
    assert all(isinstance(one, NativeLayer) for one in native)
    for rows in (1, 2, 7, 100):
        hidden, attended = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, HEADS * DIM).to(dtype)
        angles = torch.rand(rows, 1, DIM // 2) * 6
        cos, sin = angles.cos(), angles.sin()
        ours = native[0].advance(native[1], hidden, attended, cos, sin)
        wanted = plain.advance(native[1], hidden, attended, cos, sin)
        for name in ("hidden", "qk", "v", "rotated"):
            assert torch.equal(getattr(ours, name), getattr(wanted, name)), name


def test_what_the_kernel_has_no_form_for_goes_one_after_another() -> None:
    operators = NativeOperators(None)
    assert not isinstance(
        operators.layer(weights(operators, torch.float32, biased=False, normed=False)), NativeLayer
    )
