"""Ranks that divide each layer's heads and columns: together they are the whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcommons.backend.plain_layer import PlainLayer
from kvcommons.errors import InvalidInput
from kvcommons.model.slices import Model, State
from kvcommons.model.spec import ModelSpec
from kvcommons.model.synthetic import random_config
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.model.weights import read_weights
from kvcommons.rblock.layout import Layout
from tests.unit.model import reference_folders
from tests.unit.model.test_exactness import check, prompts, run


class Divided:
    """All ranks of a model on threads, used as one: heads are put side by side, those that several ranks have
    once."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._parts: list[Tensor] = [torch.empty(0)] * ranks
        self._threads = ThreadPoolExecutor(ranks)
        self.models = [
            Model.load(
                folder,
                dtype="float32",
                rank=TensorRank(number=number, ranks=ranks),
                sum_ranks=lambda part, number=number: self._sum(number, part),  # type: ignore[misc]
            )
            for number in range(ranks)
        ]
        first = self.models[0]
        self.spec, self.dtype, self.backend, self.scale = first.spec, first.dtype, first.backend, first.scale
        self.window = first.window
        self._states: list[State] = []

    def _sum(self, number: int, part: Tensor) -> Tensor:
        self._parts[number] = part
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        return total

    def _each(self, call: Callable[[int, Model], Any]) -> list[Any]:
        return [
            one.result() for one in [self._threads.submit(call, *item) for item in enumerate(self.models)]
        ]

    def begin(self, tokens: Tensor, positions: Tensor) -> State:
        first = self.models[0].begin(tokens, positions)
        rest = [model.enter(first.hidden, positions) for model in self.models[1:]]
        return self._whole([first, *rest])

    def advance(self, layer: int, state: State, attention: Tensor) -> State:
        states = self._of(state)
        return self._whole(
            self._each(
                lambda number, model: model.advance(layer, states[number], self._heads(number, attention))
            )
        )

    def end(self, state: State, attention: Tensor, rows: Sequence[int]) -> Tensor:
        states, chosen = self._of(state), list(rows)

        def close(number: int, model: Model) -> Tensor:
            own = self._heads(number, attention)
            if model.last:
                return model.end(states[number], own, chosen)
            return model.leave(states[number].rows(chosen), own[chosen])  # type: ignore[arg-type]

        logits: Tensor = self._each(close)[0]
        return logits

    def _whole(self, states: list[State]) -> State:
        keeping = [
            state
            for state, model in zip(states, self.models, strict=True)
            if model.rank.keeps(self.spec.kv_heads)
        ]
        return replace(
            states[0],
            q=torch.cat([state.q for state in states], 1),
            unrotated_q=torch.cat([state.unrotated_q for state in states], 1),
            k=torch.cat([state.k for state in keeping], 1),
            v=torch.cat([state.v for state in keeping], 1),
        )

    def _of(self, state: State) -> list[State]:
        return [
            replace(state, q=self._heads(number, state.q), unrotated_q=self._heads(number, state.unrotated_q))
            for number in range(len(self.models))
        ]

    def _heads(self, number: int, tensor: Tensor) -> Tensor:
        own = self.models[number].rank.query_heads(self.spec.query_heads)
        return tensor[:, own.start : own.stop]


# What ranks divide, or add once: biases, norms of heads, and KV heads that several ranks have.
BY_DEFAULT = {("llama-tied-biased", 2), ("qwen2", 4), ("qwen3-sliding-biased", 4)}
CASES = [(kind, ranks) for kind in sorted(reference_folders.KINDS) for ranks in (2, 4)]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [pytest.param(*one, marks=[] if one in BY_DEFAULT else [pytest.mark.slow]) for one in CASES],
)
def test_ranks_equal_transformers(tmp_path: Path, kind: str, ranks: int) -> None:
    """Of two KV heads four ranks repeat each."""
    folder = reference_folders.write(tmp_path, kind)
    divided: Any = Divided(folder, ranks)
    for sequence, prompt in zip(run(divided, chunk_tokens=20, split=3), prompts(), strict=True):
        check(folder, sequence, len(prompt))


def test_ranks_have_equal_shares_and_one_has_the_vocabulary(tmp_path: Path) -> None:
    folder = reference_folders.write(tmp_path, "llama")
    spec = ModelSpec.read(folder)
    models = Divided(folder, 2).models
    assert [(model.first, model.last) for model in models] == [(True, True), (False, False)]
    shares = [
        read_weights(folder, spec, torch.float32, models[0].backend, range(3), model.rank) for model in models
    ]
    assert shares[0].ending is not None
    assert shares[0].ending.head(torch.zeros(1, spec.hidden)).shape == (1, spec.vocab_size)
    for share in shares:
        first, one = share.layers[0], torch.zeros(1, spec.hidden)
        assert isinstance(first, PlainLayer)
        layer = first.weights
        assert layer.qkv(one).shape == (1, (2 + 1 + 1) * spec.head_dim)
        assert layer.gate_up(one).shape == (1, spec.mlp)
        assert layer.down(torch.zeros(1, spec.mlp // 2)).shape == (1, spec.hidden)


def test_which_heads_a_rank_has() -> None:
    whole = Layout(layers=1, kv_heads=2, block_tokens=2, head_dim=4, kv_dtype="float32", query_heads=8)
    four = [TensorRank(number=number, ranks=4) for number in range(4)]
    assert [rank.query_heads(8) for rank in four] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert [rank.kv_heads(2) for rank in four] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [rank.keeps(2) for rank in four] == [True, False, True, False]
    assert [str(rank.kv_part(2)) for rank in four] == ["0/2", "0/2", "1/2", "1/2"]
    assert four[3].layout(whole) == replace(whole, kv_heads=1, query_heads=2)
    assert [rank.kv_part(1) for rank in four] == [None] * 4
    assert [rank.keeps(1) for rank in four] == [True, False, False, False]
    assert [rank.kv_heads(8) for rank in four] == [range(2), range(2, 4), range(4, 6), range(6, 8)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "able"),
    [(6, 3, 2, "1, 3, 6"), (6, 3, 4, "1, 3, 6"), (8, 2, 3, "1, 2, 4, 8"), (4, 4, 8, "1, 2, 4")],
)
def test_what_cannot_be_divided_is_refused(heads: int, kv_heads: int, ranks: int, able: str) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    config = random_config("7m") | changes | {"intermediate_size": 48}
    message = f"tensor = {ranks} does not divide .* divided over {able}$"
    with pytest.raises(InvalidInput, match=message) as refused:
        TensorRank(ranks=ranks).check(ModelSpec.of(config))
    assert refused.value.param == "tensor"
