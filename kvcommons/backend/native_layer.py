"""A layer on the CPU whose matrices are the compiled kernel's: one call from its attention to the next
layer's."""

from __future__ import annotations

from torch import Tensor

from kvcommons.attention.native.advance import NativeSlice, NativeWeights
from kvcommons.attention.native.library import Kernel
from kvcommons.backend.interface import Layer, LayerWeights, Opened, Operators
from kvcommons.backend.plain_layer import PlainLayer
from kvcommons.backend.products import NativeMatrix


class NativeLayer(PlainLayer):
    def __init__(self, operators: Operators, weights: LayerWeights, native: NativeSlice) -> None:
        super().__init__(operators, weights)
        self.native = native

    @classmethod
    def of(cls, kernel: Kernel, operators: Operators, weights: LayerWeights) -> PlainLayer:
        """A PlainLayer where the kernel has no form of its matrices, or none for their sizes."""
        matrices = (weights.qkv, weights.output, weights.gate_up, weights.down)
        packed = [one.packed for one in matrices if isinstance(one, NativeMatrix)]
        if len(packed) < len(matrices):
            return PlainLayer(operators, weights)
        qkv, output, gate_up, down = packed
        native = NativeWeights(
            attention_norm=weights.attention_norm, qkv=qkv, output=output, mlp_norm=weights.mlp_norm,
            gate_up=gate_up, down=down, head_dim=weights.head_dim, rotated_heads=weights.rotated_heads,
        )  # fmt: skip
        if not native.served:
            return PlainLayer(operators, weights)
        return cls(operators, weights, NativeSlice(kernel, native))

    def advance(self, following: Layer, hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor) -> Opened:
        if not isinstance(following, NativeLayer):
            return super().advance(following, hidden, attended, cos, sin)
        weights = following.weights
        rotation = (cos, sin) if weights.qk_norm is None else None
        total, qkv, rotated = self.native.advance(
            following.native, hidden, attended, rotation, weights.epsilon
        )
        if rotated is None:
            return following.rotate(total, qkv, cos, sin)
        heads = qkv.view(len(qkv), -1, weights.head_dim)
        at = weights.rotated_heads
        return Opened(hidden=total, qk=heads[:, :at], v=heads[:, at:], rotated=rotated)
