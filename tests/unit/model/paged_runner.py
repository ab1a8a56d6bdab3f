"""Runs a model over paged memory in one process, as the engines do: chunked prefill, batched decode,
holders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.backend.interface import Partial
from kvcommons.backend.memory import BlockMemory
from kvcommons.model.slices import Model, State
from kvcommons.rblock.layout import Layout
from tests.backends import attend_batch, attend_chunk

BLOCK_TOKENS = 16


class Sequence_:
    """Tokens of one sequence, and the block tables of its segments on each holder."""

    def __init__(self, prompt: Sequence[int], tables: list[list[int]]) -> None:
        self.tokens = list(prompt)
        self.logits: list[Tensor] = []  # [vocab], of the last prompt token and each generated one
        self.tables = [torch.tensor(table, dtype=torch.int64) for table in tables]


class PagedRunner:
    """Blocks of a sequence: the first `split` on holder 0, the rest on holder 1 (all on 0 without a
    split).
    """

    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], new_tokens: int, *, split: int | None
    ) -> None:
        self.model = model
        spec = model.spec
        layout = Layout(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            block_tokens=BLOCK_TOKENS,
            head_dim=spec.head_dim,
            kv_dtype=str(model.dtype).removeprefix("torch."),
            query_heads=spec.query_heads,
        )
        self.split = split
        self._upload, self._fetch = model.backend.device.upload, model.backend.device.fetch
        needs = [-(-(len(prompt) + new_tokens) // BLOCK_TOKENS) for prompt in prompts]
        holders = 1 if split is None else 2
        self.memories = [BlockMemory(layout, sum(needs) + 3, model.backend) for _ in range(holders)]
        for memory in self.memories:
            memory.tensor.fill_(torch.nan)
        free = torch.randperm(sum(needs) + 3, generator=torch.Generator().manual_seed(0)).tolist()
        self.sequences = []
        for prompt, need in zip(prompts, needs, strict=True):
            table = [free.pop() for _ in range(need)]
            tables = [table] if split is None else [table[:split], table[split:]]
            self.sequences.append(Sequence_(prompt, tables))

    def prefill(self, chunk_tokens: int) -> None:
        for sequence in self.sequences:
            tokens = torch.tensor(sequence.tokens)
            for first in range(0, len(tokens), chunk_tokens):
                positions = torch.arange(first, min(first + chunk_tokens, len(tokens)))
                state = self.model.begin(self._upload(tokens[positions]), self._upload(positions))
                last = self.model.spec.layers - 1
                for layer in range(last):
                    attention = self._chunk(sequence, layer, state, positions)
                    state = self.model.advance(layer, state, attention)
                attention = self._chunk(sequence, last, state, positions)
            logits = self.model.end(state, attention, [len(positions) - 1])
            sequence.logits.append(self._fetch(logits)[0])

    def decode(self, steps: int) -> None:
        """Greedy."""
        for _ in range(steps):
            for sequence in self.sequences:
                sequence.tokens.append(int(sequence.logits[-1].argmax()))
            positions = torch.tensor([len(sequence.tokens) - 1 for sequence in self.sequences])
            tokens = torch.tensor([sequence.tokens[-1] for sequence in self.sequences])
            state = self.model.begin(self._upload(tokens), self._upload(positions))
            last = self.model.spec.layers - 1
            for layer in range(last):
                state = self.model.advance(layer, state, self._batch(layer, state, positions))
            logits = self.model.end(state, self._batch(last, state, positions), range(len(tokens)))
            for sequence, row in zip(self.sequences, self._fetch(logits), strict=True):
                sequence.logits.append(row)

    def _segments(self, sequence: Sequence_) -> list[tuple[int, int, BlockMemory, Tensor]]:
        """First position, room, memory and table of each."""
        segments, first = [], 0
        for memory, table in zip(self.memories, sequence.tables, strict=True):
            segments.append((first, len(table) * BLOCK_TOKENS, memory, table))
            first += len(table) * BLOCK_TOKENS
        return segments

    def _write(self, sequence: Sequence_, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """`positions` are consecutive, in host memory."""
        for first, capacity, memory, table in self._segments(sequence):
            inside = ((positions >= first) & (positions < first + capacity)).nonzero().flatten().tolist()
            here = slice(inside[0], inside[-1] + 1) if inside else slice(0)
            at = positions[here] - first
            slots = table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
            memory.write_tokens(layer, slots, k[here], v[here])

    def _chunk(self, sequence: Sequence_, layer: int, state: State, positions: Tensor) -> Tensor:
        self._write(sequence, layer, positions, state.k, state.v)
        end = int(positions[-1]) + 1
        parts = [
            attend_chunk(
                state.q, memory.layer(layer), table, min(max(end - first, 0), capacity),
                first_key_position=first, query_positions=positions, backend=self.model.backend,
                scale=self.model.scale, window=self.model.window(layer),
            )
            for first, capacity, memory, table in self._segments(sequence)
        ]  # fmt: skip
        return self.model.backend.attention.merge(parts).out

    def _batch(self, layer: int, state: State, positions: Tensor) -> Tensor:
        parts: list[Partial] = []
        for row, sequence in enumerate(self.sequences):
            one = slice(row, row + 1)
            self._write(sequence, layer, positions[one], state.k[one], state.v[one])
        ends = positions + 1
        for holder in range(len(self.memories)):
            segments = [self._segments(sequence)[holder] for sequence in self.sequences]
            tables = torch.nn.utils.rnn.pad_sequence([table for _, _, _, table in segments], batch_first=True)
            firsts = torch.tensor([first for first, _, _, _ in segments])
            capacities = torch.tensor([capacity for _, capacity, _, _ in segments])
            parts.append(
                attend_batch(
                    state.q,
                    segments[0][2].layer(layer),
                    tables,
                    torch.minimum((ends - firsts).clamp_min(0), capacities),
                    scale=self.model.scale,
                    first_key_positions=firsts,
                    query_positions=positions,
                    window=self.model.window(layer),
                    backend=self.model.backend,
                )
            )
        return self.model.backend.attention.merge(parts).out
