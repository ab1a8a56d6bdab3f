"""Layers on the CPU whose matrices are the compiled kernel's: one call from a layer's attention to the next
layer's, or through several layers with their attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcommons.attention.native.advance import NativeSlice, NativeWeights
from kvcommons.attention.native.forward import NativeForward
from kvcommons.attention.native.library import Kernel, PagedBatch, PagedChunk
from kvcommons.backend.interface import Layer, LayerWeights, Opened, Operators, PagedRows
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
            attention_norm=weights.attention_norm, qkv=qkv, qk_norm=weights.qk_norm, output=output,
            mlp_norm=weights.mlp_norm, gate_up=gate_up, down=down, head_dim=weights.head_dim,
            rotated_heads=weights.rotated_heads,
        )  # fmt: skip
        if not native.served:
            return PlainLayer(operators, weights)
        return cls(operators, weights, NativeSlice(kernel, native))

    def rotate(self, hidden: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor) -> Opened:
        return self.opened(hidden, qkv, self.native.rotate(qkv, cos, sin, self.weights.epsilon))

    def advance(
        self, next_layer: Layer, hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> Opened:
        if not isinstance(next_layer, NativeLayer):
            return super().advance(next_layer, hidden, attended, cos, sin)
        epsilon = self.weights.epsilon
        total, qkv, rotated = self.native.advance(next_layer.native, hidden, attended, cos, sin, epsilon)
        return next_layer.opened(total, qkv, rotated)

    def opened(self, hidden: Tensor, qkv: Tensor, rotated: Tensor) -> Opened:
        """Of this layer, by what the kernel has computed."""
        heads = qkv.view(len(qkv), -1, self.weights.head_dim)
        at = self.weights.rotated_heads
        return Opened(hidden=hidden, qk=heads[:, :at], v=heads[:, at:], rotated=rotated)


class PagedForward:
    """Layers and their attention in one call of the kernel."""

    def __init__(self, layers: Sequence[NativeLayer], native: NativeForward) -> None:
        self._layers = layers
        self._native = native

    @classmethod
    def of(cls, kernel: Kernel, layers: Sequence[Layer]) -> PagedForward | None:
        """None where the kernel does not compute all of each layer."""
        native = [one for one in layers if isinstance(one, NativeLayer)]
        if len(native) < len(layers):
            return None
        forward = NativeForward(kernel, [one.native for one in native], native[0].weights.epsilon)
        return cls(native, forward)

    def __call__(
        self,
        layers: range,
        hidden: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
        rows: PagedRows,
    ) -> tuple[Opened, float] | None:
        of_layers = rows.plans[layers.start : layers.stop]
        batches = [plan for plan in of_layers if isinstance(plan, PagedBatch)]
        chunks = [plan for plan in of_layers if isinstance(plan, PagedChunk)]
        plans: Sequence[PagedBatch | PagedChunk] = batches or chunks
        if len(plans) < len(layers) or rows.kv.dtype != hidden.dtype:
            return None
        total, projected, rotated, attention_s = self._native.run(layers, hidden, qkv, rotation, rows, plans)
        return self._layers[layers.stop].opened(total, projected, rotated), attention_s
