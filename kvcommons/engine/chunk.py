"""The tensors of one chunk: begun once, then written, attended and advanced layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.attention.partial import ChunkPlan, Partial, merge
from kvcommons.engine.core import Core
from kvcommons.engine.truncated import WHOLE, Truncated


class Chunk:
    """Rows at `positions` of one sequence whose KV lies in `blocks` (physical, in order)."""

    def __init__(
        self,
        core: Core,
        tokens: Sequence[int],
        positions: range,
        blocks: Sequence[int],
        truncated: Truncated = WHOLE,
    ) -> None:
        """Behind a truncation, `positions` lie after its head."""
        self._core = core
        self._count = len(positions)
        self._length = positions.stop
        device, size = core.model.device, core.block_tokens
        needed = -(-positions.stop // size)
        self._table = torch.tensor(blocks[:needed], dtype=torch.long, device=device)
        self._positions = core.positions(positions.start, self._count)
        self._slots = self._table[self._positions // size] * size + self._positions % size
        self._head = truncated.shifted_head_tokens
        self._plans: dict[tuple[int | None, range], ChunkPlan] = {}
        ids = torch.tensor(tokens[positions.start : positions.stop], dtype=torch.long, device=device)
        assert not self._head or positions.start >= self._head
        self._state = core.model.begin(ids, self._positions + truncated.dropped_tokens)
        self._head_rotation = core.model.rotation(self._positions) if self._head else None
        self._attention: Tensor | None = None

    def write(self, layer: int) -> None:
        """K and V of this layer go to the blocks."""
        self._core.memory.write_tokens(layer, self._slots, self._state.k, self._state.v)

    def attend(self, layer: int) -> None:
        """Attention over the sequence up to each row; then on to the next layer, where there is one."""
        model = self._core.model
        attention = self._attention_over(layer)
        if layer < self._core.layout.layers - 1:
            self._state = model.advance(layer, self._state, attention)
        else:
            self._attention = attention

    def logits(self, rows: Sequence[int] | None = None) -> Tensor:
        """[len(rows), vocab] after all layers; by default of the last row."""
        assert self._attention is not None
        chosen = [self._count - 1] if rows is None else rows
        return self._core.model.end(self._state, self._attention, chosen)

    def _attention_over(self, layer: int) -> Tensor:
        """[T, query_heads, head_dim] float32."""
        rest = self._attend_to(layer, range(self._head, self._length), self._state.q)
        if self._head_rotation is None:
            return rest.out
        query = self._core.model.shifted_query(self._state, self._head_rotation)
        return merge([self._attend_to(layer, range(self._head), query), rest]).out

    def _attend_to(self, layer: int, keys: range, query: Tensor) -> Partial:
        """`keys` begin at a block's border."""
        core, window = self._core, self._core.model.window(layer)
        kv = core.memory.layer(layer)
        plan = self._plans.get((window, keys))
        if plan is None:
            plan = self._plans[window, keys] = ChunkPlan(
                kv.shape,
                core.layout.query_heads,
                self._table[keys.start // core.block_tokens : -(-keys.stop // core.block_tokens)],
                len(keys),
                first_key_position=keys.start,
                query_positions=self._positions,
                window=window,
            )
        return plan.attend(query, kv, core.model.scale)
