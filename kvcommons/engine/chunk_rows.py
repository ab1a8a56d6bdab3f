"""Rows at consecutive positions of one sequence: a chunk of its prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.backend.interface import ChunkPlan, PagedRows, Partial
from kvcommons.engine.core import Core
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.truncated import WHOLE, Truncated
from kvcommons.model.sampling import SamplingRow
from kvcommons.model.slices import State

# Of a longer chunk, or of one behind a longer context, a layer takes long enough to be asked for by itself:
# commands, and others that want the cores, wait for several where they go at once.
_AT_ONCE_MAX = 64
_AT_ONCE_KEYS = 64 * 4096  # of all rows together


class ChunkRows:
    """Rows at `positions` of one sequence. `table` LongTensor, in host memory, has the physical blocks that
    its KV lies in, from its `first_block` on."""

    def __init__(
        self,
        core: Core,
        tokens: Sequence[int],
        positions: range,
        table: Tensor,
        truncated: Truncated = WHOLE,
        *,
        first_block: int = 0,
    ) -> None:
        """Behind a truncation, `positions` lie after its head."""
        self._core = core
        self._length = positions.stop
        self._places = positions
        size = core.block_tokens
        self._table, self._first_block = table, first_block
        places = torch.arange(positions.start, positions.stop)
        self._rows = core.memory.rows_of(table[places // size - first_block] * size + places % size)
        self._head = truncated.shifted_head_tokens
        assert not self._head or positions.start >= self._head
        self._plans: dict[tuple[int | None, range], ChunkPlan] = {}
        self.tokens = torch.tensor(tokens[positions.start : positions.stop], dtype=torch.long)
        self.positions = places + truncated.dropped_tokens  # for which rows are rotated
        self._head_rotation = core.model.rotation(core.backend.device.upload(places)) if self._head else None

    def write(self, layer: int, state: State) -> None:
        """K and V of this layer go to the blocks."""
        self._core.memory.write_rows(layer, self._rows, torch.cat((state.k, state.v), dim=1))

    def attend(self, layer: int, state: State) -> Tensor:
        """Attention over the sequence up to each row, which is written: [T, query_heads, head_dim]
        float32."""
        rest = self.partial(layer, range(self._head, self._length), state.q)
        if self._head_rotation is None:
            return rest.out
        query = self._core.model.shifted_query(state, self._head_rotation)
        return self._core.backend.attention.merge([self.partial(layer, range(self._head), query), rest]).out

    def paged(self) -> PagedRows | None:
        """None where a layer takes long, or rows attend in more than one way."""
        core = self._core
        rows = len(self.tokens)
        if rows > _AT_ONCE_MAX or rows * self._length > _AT_ONCE_KEYS or self._head_rotation is not None:
            return None
        plans = [self._plan(layer, range(self._length)) for layer in core.layers]
        return PagedRows(kv=core.memory.tensor, slots=self._rows, plans=plans, scale=core.model.scale)

    def partial(self, layer: int, keys: range, query: Tensor) -> Partial:
        """Over `keys`, which begin at a block's border."""
        core = self._core
        return self._plan(layer, keys).attend(query, core.memory.layer(layer), core.model.scale)

    def _plan(self, layer: int, keys: range) -> ChunkPlan:
        core, window = self._core, self._core.model.window(layer)
        plan = self._plans.get((window, keys))
        if plan is None:
            first, stop = keys.start // core.block_tokens, -(-keys.stop // core.block_tokens)
            plan = self._plans[window, keys] = core.backend.attention.plan_chunk(
                core.memory.layer(layer),
                core.layout.query_heads,
                self._table[first - self._first_block : stop - self._first_block],
                len(keys),
                first_key_position=keys.start,
                query_positions=self._places,
                window=window,
            )
        return plan


class InnerChunk:
    """`Rows` of a chunk that is not its prompt's last, and whose KV goes nowhere else."""

    def __init__(
        self, core: Core, positions: range, blocks: Sequence[int], tokens: Sequence[int] | None = None
    ) -> None:
        """`tokens`: of the whole prompt; None: zeros."""
        tokens = (0,) * positions.stop if tokens is None else tokens
        self._rows = ChunkRows(core, tokens, positions, torch.tensor(blocks))
        self.tokens, self.positions = self._rows.tokens, self._rows.positions
        self.work = IterationWork.of_chunk(positions)
        self._timing: IterationTiming

    def open(self, timing: IterationTiming) -> None:
        self._timing = timing

    def attend(self, layer: int, state: State, *, needed: bool) -> Tensor | None:
        began_s = time.monotonic()
        self._rows.write(layer, state)
        attention = self._rows.attend(layer, state) if needed else None
        self._timing.here_s += time.monotonic() - began_s
        return attention

    def paged(self) -> PagedRows | None:
        return self._rows.paged()

    def passed(self, layers: range) -> None:
        """Nobody waits for it."""

    def sampling(self) -> list[SamplingRow]:
        return []

    def wanted_logprobs(self) -> None:
        """Of no prompt."""

    def close(self) -> None:
        """Nothing was taken."""


def logits(core: Core, chunk: ChunkRows, rows: Sequence[int]) -> Tensor:
    """[len(rows), vocab]: of a chunk that is computed by itself, for some of its rows."""
    upload = core.backend.device.upload
    state = core.model.begin(upload(chunk.tokens), upload(chunk.positions))
    for layer in range(core.layout.layers):
        chunk.write(layer, state)
        attention = chunk.attend(layer, state)
        if layer < core.layout.layers - 1:
            state = core.model.advance(layer, state, attention)
    return core.model.end(state, attention, rows)
