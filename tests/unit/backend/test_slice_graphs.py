"""Slices that are captured once and replayed give what computing them gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvcommons.backend.interface import LayerWeights, Matrix, Opened
from kvcommons.backend.plain_layer import PlainLayer
from kvcommons.backend.slice_graphs import ROWS, GraphedLayer, SliceGraphs
from kvcommons.backend.torch_operators import TorchOperators
from tests.interpreted import Replayed

HIDDEN, MLP, DIM, HEADS, KV_HEADS = 24, 40, 8, 3, 1
NAMES = ("hidden", "qk", "v", "rotated")


def weights(operators: TorchOperators) -> LayerWeights:
    def matrix(rows: int, size: int) -> Matrix:
        return operators.pack(torch.randn(rows, size) / size**0.5)

    return LayerWeights(
        attention_norm=torch.rand(HIDDEN) + 0.5, qkv=matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        qk_norm=None, output=matrix(HIDDEN, HEADS * DIM), mlp_norm=torch.rand(HIDDEN) + 0.5,
        gate_up=matrix(2 * MLP, HIDDEN), down=matrix(HIDDEN, MLP), head_dim=DIM,
        rotated_heads=HEADS + KV_HEADS, epsilon=1e-5,
    )  # fmt: skip


def given(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    angles = torch.rand(rows, 1, DIM // 2) * 6
    return torch.randn(rows, HIDDEN), torch.randn(rows, HEADS * DIM), angles.cos(), angles.sin()


class Counted:
    """Replays, and how many slices were captured."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, compute: Callable[[], Opened]) -> Replayed:
        self.captured += 1
        return Replayed(compute)


def equal(ours: Opened, wanted: Opened) -> bool:
    return all(
        torch.allclose(getattr(ours, name), getattr(wanted, name), rtol=1e-5, atol=1e-5) for name in NAMES
    )


@pytest.fixture
def layers() -> tuple[Counted, list[GraphedLayer], list[PlainLayer]]:
    torch.manual_seed(0)
    operators, capture = TorchOperators(), Counted()
    graphs = SliceGraphs(capture)
    made = [weights(operators) for _ in range(3)]
    graphed = [GraphedLayer(operators, one, graphs, number) for number, one in enumerate(made)]
    return capture, graphed, [PlainLayer(operators, one) for one in made]


Layers = tuple[Counted, list[GraphedLayer], list[PlainLayer]]


def test_any_number_of_rows_gives_what_the_layer_computes(layers: Layers) -> None:
    capture, graphed, plain = layers
    for rows in [*range(1, ROWS[-1] + 2), 300, 5, 64, 1]:
        inputs = given(rows)
        for at in (0, 1):
            ours = graphed[at].advance(graphed[at + 1], *inputs)
            assert equal(ours, plain[at].advance(plain[at + 1], *inputs)), rows
            assert len(ours.hidden) == rows
    assert capture.captured == 2 * len(ROWS), "one for a slice and a number of rows; none for more"


def test_results_stay_when_the_same_slice_is_computed_again(layers: Layers) -> None:
    _, graphed, plain = layers
    batches = [given(3), given(4), given(3)]
    ours = [graphed[0].advance(graphed[1], *inputs) for inputs in batches]
    for one, inputs in zip(ours, batches, strict=True):
        assert equal(one, plain[0].advance(plain[1], *inputs))
