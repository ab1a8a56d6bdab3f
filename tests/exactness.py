"""Exactness in float32: token for token, but for steps whose two best logits are as good as equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Sums in another order change logits by less than half of it.
MARGIN = 1e-3


def evident(logits: Tensor) -> Tensor:
    """Of logits [steps, vocabulary]: the steps whose two best are further apart than the margin."""
    best = logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1] > MARGIN


def assert_greedy(made: Sequence[int], logits: Tensor) -> None:
    """Asserts that each token of `made` is the best one by the reference's `logits` [len(made), vocabulary],
    or one of the two best where those are nearer than the margin. More than half of the steps are evident."""
    sure, best = evident(logits), logits.topk(2, dim=-1).indices
    assert len(made) == len(logits)
    assert sure.sum() > len(made) // 2, "the reference hardly ever prefers one token"
    allowed = [
        {int(first)} if one else {int(first), int(second)}
        for one, (first, second) in zip(sure, best, strict=True)
    ]
    wrong = {step: token for step, token in enumerate(made) if token not in allowed[step]}
    assert not wrong, f"of {len(made)} tokens these are not the reference's: {wrong}"


def logits_of(model: torch.nn.Module, tokens: Sequence[int], made: Sequence[int]) -> Tensor:
    """Logits [len(made), vocabulary] of a model of transformers for the tokens of `made`, which follow
    `tokens`."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([[*tokens, *made]])).logits[0, len(tokens) - 1 : -1]
    return logits
