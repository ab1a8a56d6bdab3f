"""The tensors of one chunk: begun once, then written, attended and advanced layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.attention.partial import ChunkPlan
from kvcommons.engine.core import Core


class Chunk:
    """Rows at `positions` of one sequence whose KV lies in `blocks` (physical, in order)."""

    def __init__(self, core: Core, tokens: Sequence[int], positions: range, blocks: Sequence[int]) -> None:
        self._core = core
        self._count = len(positions)
        self._length = positions.stop
        device, size = core.model.device, core.block_tokens
        needed = -(-positions.stop // size)
        self._table = torch.tensor(blocks[:needed], dtype=torch.long, device=device)
        self._positions = core.positions(positions.start, self._count)
        self._slots = self._table[self._positions // size] * size + self._positions % size
        self._plans: dict[int | None, ChunkPlan] = {}
        ids = torch.tensor(tokens[positions.start : positions.stop], dtype=torch.long, device=device)
        self._state = core.model.begin(ids, self._positions)
        self._attention: Tensor | None = None

    def write(self, layer: int) -> None:
        """K and V of this layer go to the blocks."""
        self._core.memory.write_tokens(layer, self._slots, self._state.k, self._state.v)

    def attend(self, layer: int) -> None:
        """Attention over the sequence up to each row; then on to the next layer, where there is one."""
        model, kv = self._core.model, self._core.memory.layer(layer)
        attention = self._plan(model.window(layer)).attend(self._state.q, kv, model.scale).out
        if layer < self._core.layout.layers - 1:
            self._state = model.advance(layer, self._state, attention)
        else:
            self._attention = attention

    def logits(self) -> Tensor:
        """[1, vocab], of the last row, after all layers."""
        assert self._attention is not None
        return self._core.model.end(self._state, self._attention, [self._count - 1])

    def _plan(self, window: int | None) -> ChunkPlan:
        if window not in self._plans:
            layout = self._core.layout
            self._plans[window] = ChunkPlan(
                self._core.memory.layer(0).shape,
                layout.query_heads,
                self._table,
                self._length,
                first_key_position=0,
                query_positions=self._positions,
                window=window,
            )
        return self._plans[window]
