"""A layer by one operator after another, on any device."""

from __future__ import annotations

from torch import Tensor

from kvcommons.backend.interface import Layer, LayerWeights, Opened, Operators, Sum


class PlainLayer:
    def __init__(self, operators: Operators, weights: LayerWeights) -> None:
        self._operators = operators
        self.weights = weights

    def open(self, hidden: Tensor, added: Tensor | None, cos: Tensor, sin: Tensor) -> Opened:
        weights = self.weights
        hidden, normed = self._operators.add_and_norm(hidden, added, weights.attention_norm, weights.epsilon)
        return self.rotate(hidden, weights.qkv(normed), cos, sin)

    def rotate(self, hidden: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor) -> Opened:
        """From qkv [T, all heads * head_dim] on."""
        weights = self.weights
        heads = qkv.view(len(qkv), -1, weights.head_dim)
        qk = heads[:, : weights.rotated_heads]
        if weights.qk_norm is not None:
            qk = self._operators.norm(qk, weights.qk_norm, weights.epsilon)
        rotated = self._operators.rotate(qk, cos, sin)
        return Opened(hidden=hidden, qk=qk, v=heads[:, weights.rotated_heads :], rotated=rotated)

    def close(self, hidden: Tensor, attended: Tensor, sum_ranks: Sum | None) -> tuple[Tensor, Tensor]:
        weights, operators = self.weights, self._operators
        projected = weights.output(attended)
        if sum_ranks is not None:
            projected = sum_ranks(projected)
        hidden, normed = operators.add_and_norm(hidden, projected, weights.mlp_norm, weights.epsilon)
        added = weights.down(operators.gate(weights.gate_up(normed)))
        return hidden, added if sum_ranks is None else sum_ranks(added)

    def advance(
        self, next_layer: Layer, hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> Opened:
        hidden, added = self.close(hidden, attended, None)
        return next_layer.open(hidden, added, cos, sin)
