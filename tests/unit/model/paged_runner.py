"""Runs a model over paged memory in one process, as the engines do: chunked prefill, batched decode,
holders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcommons.attention.memory import BlockMemory
from kvcommons.attention.partial import Partial, attend_batch, attend_chunk, merge
from kvcommons.model.slices import Model, State
from kvcommons.rblock.layout import Layout

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
        needs = [-(-(len(prompt) + new_tokens) // BLOCK_TOKENS) for prompt in prompts]
        holders = 1 if split is None else 2
        self.memories = [BlockMemory(layout, sum(needs) + 3, str(model.device)) for _ in range(holders)]
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
                state = self.model.begin(
                    tokens[positions].to(self.model.device), positions.to(self.model.device)
                )
                last = self.model.spec.layers - 1
                for layer in range(last):
                    state = self.model.advance(layer, state, self._chunk(sequence, layer, state))
                attention = self._chunk(sequence, last, state)
            logits = self.model.end(state, attention, [len(positions) - 1])
            sequence.logits.append(logits[0].cpu())

    def decode(self, steps: int) -> None:
        """Greedy."""
        for _ in range(steps):
            for sequence in self.sequences:
                sequence.tokens.append(int(sequence.logits[-1].argmax()))
            device = self.model.device
            positions = torch.tensor([len(sequence.tokens) - 1 for sequence in self.sequences])
            tokens = torch.tensor([sequence.tokens[-1] for sequence in self.sequences])
            state = self.model.begin(tokens.to(device), positions.to(device))
            last = self.model.spec.layers - 1
            for layer in range(last):
                state = self.model.advance(layer, state, self._batch(layer, state))
            logits = self.model.end(state, self._batch(last, state), range(len(tokens)))
            for sequence, row in zip(self.sequences, logits.cpu(), strict=True):
                sequence.logits.append(row)

    def _segments(self, sequence: Sequence_) -> list[tuple[int, int, BlockMemory, Tensor]]:
        """First position, room, memory and table of each."""
        segments, first = [], 0
        for memory, table in zip(self.memories, sequence.tables, strict=True):
            segments.append((first, len(table) * BLOCK_TOKENS, memory, table.to(self.model.device)))
            first += len(table) * BLOCK_TOKENS
        return segments

    def _write(self, sequence: Sequence_, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        for first, room, memory, table in self._segments(sequence):
            here = (positions >= first) & (positions < first + room)
            at = positions[here] - first
            slots = table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
            memory.write_tokens(layer, slots, k[here], v[here])

    def _chunk(self, sequence: Sequence_, layer: int, state: State) -> Tensor:
        self._write(sequence, layer, state.positions, state.k, state.v)
        end = int(state.positions[-1]) + 1
        parts = [
            attend_chunk(
                state.q, memory.layer(layer), table, min(max(end - first, 0), room),
                first_key_position=first, query_positions=state.positions,
                scale=self.model.scale, window=self.model.window(layer),
            )
            for first, room, memory, table in self._segments(sequence)
        ]  # fmt: skip
        return merge(parts).out

    def _batch(self, layer: int, state: State) -> Tensor:
        device = self.model.device
        parts: list[Partial] = []
        for row, sequence in enumerate(self.sequences):
            one = slice(row, row + 1)
            self._write(sequence, layer, state.positions[one], state.k[one], state.v[one])
        ends = (state.positions + 1).cpu()
        for holder in range(len(self.memories)):
            segments = [self._segments(sequence)[holder] for sequence in self.sequences]
            tables = torch.nn.utils.rnn.pad_sequence([table for _, _, _, table in segments], batch_first=True)
            firsts = torch.tensor([first for first, _, _, _ in segments])
            rooms = torch.tensor([room for _, room, _, _ in segments])
            parts.append(
                attend_batch(
                    state.q,
                    segments[0][2].layer(layer),
                    tables,
                    torch.minimum((ends - firsts).clamp_min(0), rooms).to(device),
                    scale=self.model.scale,
                    first_key_positions=firsts.to(device),
                    query_positions=state.positions,
                    window=self.model.window(layer),
                )
            )
        return merge(parts).out
