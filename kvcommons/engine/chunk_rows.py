"""Rows at consecutive positions of one sequence: a chunk of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.attention.partial import ChunkPlan, Partial, merge
from kvcommons.engine.core import Core
from kvcommons.engine.truncated import WHOLE, Truncated
from kvcommons.model.slices import State


class ChunkRows:
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
        self._length = positions.stop
        device, size = core.model.device, core.block_tokens
        needed = -(-positions.stop // size)
        self._table = torch.tensor(blocks[:needed], dtype=torch.long, device=device)
        self._places = core.positions(positions.start, len(positions))
        self._slots = self._table[self._places // size] * size + self._places % size
        self._head = truncated.shifted_head_tokens
        assert not self._head or positions.start >= self._head
        self._plans: dict[tuple[int | None, range], ChunkPlan] = {}
        self.tokens = torch.tensor(tokens[positions.start : positions.stop], dtype=torch.long, device=device)
        self.positions = self._places + truncated.dropped_tokens  # for which rows are rotated
        self._head_rotation = core.model.rotation(self._places) if self._head else None

    def write(self, layer: int, state: State) -> None:
        """K and V of this layer go to the blocks."""
        self._core.memory.write_tokens(layer, self._slots, state.k, state.v)

    def attend(self, layer: int, state: State) -> Tensor:
        """Attention over the sequence up to each row, which is written: [T, query_heads, head_dim]
        float32."""
        rest = self.partial(layer, range(self._head, self._length), state.q)
        if self._head_rotation is None:
            return rest.out
        query = self._core.model.shifted_query(state, self._head_rotation)
        return merge([self.partial(layer, range(self._head), query), rest]).out

    def partial(self, layer: int, keys: range, query: Tensor) -> Partial:
        """Over `keys`, which begin at a block's border."""
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
                query_positions=self._places,
                window=window,
            )
        return plan.attend(query, kv, core.model.scale)


def logits(core: Core, chunk: ChunkRows, rows: Sequence[int]) -> Tensor:
    """[len(rows), vocab]: of a chunk that is computed by itself, for some of its rows."""
    state = core.model.begin(chunk.tokens, chunk.positions)
    for layer in range(core.layout.layers):
        chunk.write(layer, state)
        attention = chunk.attend(layer, state)
        if layer < core.layout.layers - 1:
            state = core.model.advance(layer, state, attention)
    return core.model.end(state, attention, rows)
