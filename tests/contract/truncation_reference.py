"""What transformers says of a session with truncations, in float32, with angles in float64: a replay of all
tokens and truncations. As in the paper, the KV of what is left is moved (its keys are rotated anew), and what
comes later is computed behind it; kvcommons moves nothing and rotates the query."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.exactness import evident

_PIECE_TOKENS = 1024  # eager scores of a long text do not fit


@dataclass
class Answer:
    """Greedy tokens, and what their log-probabilities are: wrong positions may not show in the tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TruncatedReference:
    """One sequence at a time: `begin`, then `feed` and `truncate` in turn."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        self._rotary = self._model.model.rotary_emb
        self._rotary.forward = self._angles
        self.begin()

    def begin(self) -> None:
        from transformers import DynamicCache

        self._cache: Any = DynamicCache()
        self.length = 0  # tokens in sight that have KV

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Logits [len(tokens), vocab]. Positions are those of the context: they begin anew at its start."""
        logits = []
        for first in range(0, len(tokens), _PIECE_TOKENS):
            piece = torch.tensor([list(tokens[first : first + _PIECE_TOKENS])])
            positions = torch.arange(self.length, self.length + piece.shape[1])
            with torch.inference_mode():
                out = self._model(piece, position_ids=positions[None], past_key_values=self._cache)
            self.length += piece.shape[1]
            logits.append(out.logits[0])
        return torch.cat(logits)

    def truncate(self, at: int, head: int, dropped: int) -> None:
        """Keeps the first `at` tokens of what is in sight, and drops `dropped` of them after the first
        `head`."""
        for layer in self._cache.layers:
            keys, values = layer.keys[:, :, :at], layer.values[:, :, :at]
            moved = self._moved(keys[:, :, head + dropped :], -dropped)
            layer.keys = torch.cat((keys[:, :, :head], moved), dim=2)
            layer.values = torch.cat((values[:, :, :head], values[:, :, head + dropped :]), dim=2)
        self.length = at - dropped

    def follow(self, tokens: Sequence[int], new: int) -> list[int] | None:
        """The `new` greedy tokens after `tokens`; None where one is no evidence, and nothing was heard
        then."""
        cache, length = copy.deepcopy(self._cache), self.length
        made = Answer()
        step = list(tokens)
        while len(made.tokens) < new:
            logprobs = self.feed(step)[-1:].log_softmax(-1)
            if not evident(logprobs):
                self._cache, self.length = cache, length
                return None
            step = [int(logprobs.argmax())]
            made.tokens += step
            made.logprobs.append(float(logprobs.max()))
        return made

    def _angles(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self._rotary.inv_freq.double()
        both = torch.cat((angles, angles), dim=-1)
        factor = self._rotary.attention_scaling
        return (both.cos() * factor).to(x.dtype), (both.sin() * factor).to(x.dtype)

    def _moved(self, keys: Tensor, by: int) -> Tensor:
        """keys [1, heads, T, D] as if they lay `by` positions further on, in float64."""
        angles = by * self._rotary.inv_freq.double()
        cos, sin = angles.cos(), angles.sin()
        first, second = keys.double().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(keys.dtype)
