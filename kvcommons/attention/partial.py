"""Partial attention over paged blocks, and its exact merge (the micro-attentions of Infinite-LLM).

A plan holds what follows from block tables, lengths and positions alone (gather indices, masks): it is made
once an iteration or chunk and used for every layer. `attend_chunk` and `attend_batch` make one for one call.

Batches on the CPU are computed by the compiled kernel (`native`), which reads blocks in place; torch's
operators serve chunks, other devices, and machines that have no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.attention import kernel
from kvcommons.attention.native import library

# Keys gathered to contiguous memory at once; bounds the temporary copy (64 MiB with 8 heads of 128 in bf16).
SPAN_TOKENS = 16384
# The same for a chunk of rows: its scores are made a tile at a time, best of so many keys.
CHUNK_SPAN_TOKENS = 2048
# Sequences of a batch share one padded call while padding stays below this share of its keys.
_PADDING_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """`out` [T, H, D] float32: softmax over the part alone; `lse` [T, H] float32, -inf where it is empty."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Partial:
        """Of a part without keys, for queries `like` [T, H, D]."""
        out = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        return cls(out=out, lse=torch.full(like.shape[:2], -torch.inf, device=like.device))


def merge(partials: Sequence[Partial]) -> Partial:
    """Exact online softmax over parts along tokens; parts with lse -inf count as nothing."""
    if len(partials) == 1:
        return partials[0]
    native = library.chosen() if partials[0].out.device.type == "cpu" else None
    if native is not None:
        outs = [part.out.contiguous() for part in partials]
        out, lse = native.merge(outs, [part.lse.contiguous() for part in partials])
        return Partial(out=out, lse=lse)
    lse = torch.stack([part.lse for part in partials])
    top = lse.amax(0)
    weights = torch.exp(lse - top.masked_fill(top.isneginf(), 0.0))
    total = weights.sum(0)
    shares = weights / total.clamp_min(torch.finfo(torch.float32).tiny)
    out = partials[0].out * shares[0].unsqueeze(-1)
    for part, share in zip(partials[1:], shares[1:], strict=True):
        out.addcmul_(part.out, share.unsqueeze(-1))
    return Partial(out=out, lse=top + torch.log(total))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """Keys of N sequences, brought to [2, N, kv_heads, keys, D]: whole blocks, cut to [skip, skip + keys)."""

    index: (
        Tensor  # LongTensor [2 * N * kv_heads * nb]: rows of kv as [blocks * 2 * kv_heads, block_tokens * D]
    )
    sequences: int
    skip: int
    keys: int

    @classmethod
    def of(cls, kv_shape: Sequence[int], tables: Tensor, skip: int, keys: int) -> _Gather:
        """tables LongTensor [N, nb]."""
        heads = kv_shape[2]
        pair = torch.arange(2, device=tables.device).view(2, 1, 1, 1) * heads
        head = torch.arange(heads, device=tables.device).view(1, 1, heads, 1)
        index = tables.view(1, tables.shape[0], 1, tables.shape[1]) * (2 * heads) + pair + head
        return cls(index=index.reshape(-1), sequences=tables.shape[0], skip=skip, keys=keys)

    def keys_and_values(self, kv: Tensor) -> Tensor:
        _, _, heads, block_tokens, dim = kv.shape
        rows = kv.view(-1, block_tokens * dim).index_select(0, self.index)
        return rows.view(2, self.sequences, heads, -1, dim)[:, :, :, self.skip : self.skip + self.keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkSpan:
    gather: _Gather
    mask: kernel.Mask | None  # [1, 1, group * T, keys]


class ChunkPlan:
    """A chunk of rows over one sequence's blocks; used for each layer.

    kv_shape: [blocks, 2, kv_heads, block_tokens, D]; table LongTensor [nb]; query_positions LongTensor [T].
    Keys that all rows see are read without a mask; only the chunk's own keys and a window's edge have one.
    """

    def __init__(
        self,
        kv_shape: Sequence[int],
        query_heads: int,
        table: Tensor,
        length: int,
        *,
        first_key_position: int,
        query_positions: Tensor,
        window: int | None = None,
    ) -> None:
        block_tokens = kv_shape[3]
        group = query_heads // kv_shape[2]
        low, high = (int(p) - first_key_position for p in torch.aminmax(query_positions))
        end = min(length, high + 1)
        seen_by_all_end = max(min(end, low + 1), 0)
        start = 0 if window is None else max(low - window + 1, 0)
        seen_by_all_start = 0 if window is None else min(max(high - window + 1, 0), seen_by_all_end)
        cuts = [(start, seen_by_all_start, True), (seen_by_all_start, seen_by_all_end, False)]
        cuts.append((max(seen_by_all_end, start), end, True))
        self._spans: list[_ChunkSpan] = []
        for first, last, masked in cuts:
            for begin in range(first, last, CHUNK_SPAN_TOKENS):
                stop = min(begin + CHUNK_SPAN_TOKENS, last)
                block = begin // block_tokens
                blocks = table[block : -(-stop // block_tokens)].view(1, -1)
                gather = _Gather.of(kv_shape, blocks, begin - block * block_tokens, stop - begin)
                mask = None
                if masked:
                    keys = torch.arange(begin, stop, device=table.device) + first_key_position
                    hidden = _hidden(keys, query_positions, window).repeat(group, 1)
                    mask = kernel.Mask.of(hidden[None, None])
                self._spans.append(_ChunkSpan(gather=gather, mask=mask))

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> Partial:
        """q [T, H, D]; kv one layer's blocks."""
        if not self._spans:
            return Partial.empty(q)
        rows, heads, dim = q.shape
        kv_heads = kv.shape[2]
        folded = (
            q.to(kv.dtype).reshape(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        )
        parts = []
        for span in self._spans:
            k, v = span.gather.keys_and_values(kv)
            out, lse = kernel.attend(folded, k, v, span.mask, scale)
            out = out.reshape(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
            parts.append(Partial(out=out, lse=lse.reshape(heads, rows).transpose(0, 1)))
        return merge(parts)


def _hidden(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """bool [T, L]: whether key position keys[j] is out of sight of query position queries[t]."""
    hidden = keys.unsqueeze(0) > queries.unsqueeze(1)
    if window is not None:
        hidden |= keys.unsqueeze(0) <= queries.unsqueeze(1) - window
    return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchGroup:
    rows: Tensor  # LongTensor [N], of the batch
    gather: _Gather
    mask: kernel.Mask | None  # [N, 1, 1, keys]
    clean_keys: int  # keys from here on are out of sight for some sequence, and may be anything, NaN included


class BatchPlan:
    """One row a sequence over the sequences' blocks; used for each layer of an iteration, by one thread at a
    time.

    tables LongTensor [B, nb], padded with any valid block, not to be changed while the plan is in use;
    lengths, first_key_positions, query_positions LongTensor [B]. What a sequence's query does not see is not
    read, and may be anything, NaN included.
    """

    def __init__(
        self,
        kv_shape: Sequence[int],
        tables: Tensor,
        lengths: Tensor,
        *,
        first_key_positions: Tensor,
        query_positions: Tensor,
        window: int | None = None,
    ) -> None:
        self._kv_shape = kv_shape
        self._tables = tables
        # Copied: a batch moves its lengths on in place.
        self._columns = torch.stack((lengths, first_key_positions, query_positions))
        self._window = window
        self._kernel = library.chosen() if tables.device.type == "cpu" else None
        self._native: library.PagedBatch | None = None
        self._waves: _Waves | None = None

    def attend(self, q: Tensor, kv: Tensor, scale: float, into: Partial | None = None) -> Partial:
        """q [B, H, D]; kv one layer's blocks. `into`, contiguous, where the caller has memory for the result,
        and as the result then."""
        if self._kernel is not None and library.serves(q, kv):
            if self._native is None:
                self._native = library.PagedBatch(
                    self._kernel, self._kv_shape, self._tables.contiguous(), self._columns, self._window
                )
            out, lse = self._native.attend(q, kv, scale, (into.out, into.lse) if into else None)
            return into or Partial(out=out, lse=lse)
        if self._waves is None:
            self._waves = _Waves(self._kv_shape, self._tables, self._columns, self._window)
        partial = self._waves.attend(q, kv, scale)
        if into is None:
            return partial
        into.out.copy_(partial.out)
        into.lse.copy_(partial.lse)
        return into


class _Waves:
    """A batch by torch's operators. Sequences of like length share a call; a very long one is read in spans,
    which are merged."""

    def __init__(
        self,
        kv_shape: Sequence[int],
        tables: Tensor,
        columns: Tensor,  # lengths, first key positions and query positions, [3, B]
        window: int | None,
    ) -> None:
        block_tokens = kv_shape[3]
        lengths, first_key_positions, query_positions = columns
        distance = query_positions - first_key_positions
        ends = torch.minimum(lengths, distance + 1).tolist()
        starts = [0] * len(ends) if window is None else (distance - window + 1).clamp_min(0).tolist()
        self._waves: list[list[_BatchGroup]] = []
        spans = [(row, start, ends[row]) for row, start in enumerate(starts) if ends[row] > start]
        while spans:
            self._waves.append(
                [_batch_group(kv_shape, tables, group) for group in _groups(spans, block_tokens)]
            )
            nexts = ((row, _span_stop(start, end, block_tokens), end) for row, start, end in spans)
            spans = [(row, start, end) for row, start, end in nexts if end > start]

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> Partial:
        if not self._waves:
            return Partial.empty(q)
        return merge([self._wave(wave, q, kv, scale) for wave in self._waves])

    def _wave(self, wave: Sequence[_BatchGroup], q: Tensor, kv: Tensor, scale: float) -> Partial:
        result = Partial.empty(q)
        for group in wave:
            size, heads, dim = len(group.rows), *q.shape[1:]
            k, v = both = group.gather.keys_and_values(kv)
            if group.mask is not None and group.clean_keys < group.gather.keys:
                unseen = group.mask.hidden[:, :, 0, group.clean_keys :, None]
                both[:, :, :, group.clean_keys :].masked_fill_(unseen, 0.0)
            folded = q.index_select(0, group.rows).to(kv.dtype).reshape(size, kv.shape[2], -1, dim)
            out, lse = kernel.attend(folded, k, v, group.mask, scale)
            result.out.index_copy_(0, group.rows, out.reshape(size, heads, dim))
            result.lse.index_copy_(0, group.rows, lse.reshape(size, heads))
        return result


_Span = tuple[int, int, int]  # row of the batch, first key, key after the last


def _span_stop(start: int, end: int, block_tokens: int) -> int:
    """Where a span from `start` on ends: at a block's border unless the sequence ends there."""
    limit = max(SPAN_TOKENS // block_tokens, 1) * block_tokens + start // block_tokens * block_tokens
    return min(end, limit)


def _groups(spans: Sequence[_Span], block_tokens: int) -> list[list[_Span]]:
    """The first span of each sequence, by like length, each group's padded keys within SPAN_TOKENS."""
    heads = [(row, start, _span_stop(start, end, block_tokens)) for row, start, end in spans]
    heads.sort(key=lambda span: span[2] - span[1] // block_tokens * block_tokens)
    groups: list[list[_Span]] = [[]]
    real = 0
    for span in heads:
        keys = span[2] - span[1] // block_tokens * block_tokens
        padded = keys * (len(groups[-1]) + 1)
        real += keys
        # Below a block a sequence, padding costs less than another call.
        slack = _PADDING_SHARE * padded + block_tokens * len(groups[-1])
        if groups[-1] and (padded > SPAN_TOKENS or padded - real > slack):
            groups.append([])
            real = keys
        groups[-1].append(span)
    return groups


def _batch_group(kv_shape: Sequence[int], tables: Tensor, spans: Sequence[_Span]) -> _BatchGroup:
    device, block_tokens = tables.device, kv_shape[3]
    rows = torch.tensor([row for row, _, _ in spans], device=device)
    blocks = [start // block_tokens for _, start, _ in spans]
    skips = [start - block * block_tokens for (_, start, _), block in zip(spans, blocks, strict=True)]
    stops = [end - block * block_tokens for (_, _, end), block in zip(spans, blocks, strict=True)]
    keys, count = max(stops), -(-max(stops) // block_tokens)
    columns = torch.tensor(blocks, device=device).view(-1, 1) + torch.arange(count, device=device)
    chosen = tables.index_select(0, rows).gather(1, columns.clamp_max(tables.shape[1] - 1))
    mask = None
    if min(stops) < keys or max(skips) > 0:
        positions = torch.arange(keys, device=device).view(1, 1, 1, -1)
        first = torch.tensor(skips, device=device).view(-1, 1, 1, 1)
        last = torch.tensor(stops, device=device).view(-1, 1, 1, 1)
        mask = kernel.Mask.of((positions < first) | (positions >= last))
    gather = _Gather.of(kv_shape, chosen, 0, keys)
    return _BatchGroup(rows=rows, gather=gather, mask=mask, clean_keys=min(stops))


def attend_chunk(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    length: int,
    *,
    first_key_position: int,
    query_positions: Tensor,
    scale: float,
    window: int | None = None,
) -> Partial:
    """Rows of one sequence. q [T, H, D]; kv [blocks, 2, kv_heads, block_tokens, D]; table LongTensor [nb].

    Key i (0 <= i < length) has position first_key_position + i; row t sees keys whose position is not after
    query_positions[t] and, with a window, after query_positions[t] - window.
    """
    plan = ChunkPlan(
        kv.shape, q.shape[1], table, length,
        first_key_position=first_key_position, query_positions=query_positions, window=window,
    )  # fmt: skip
    return plan.attend(q, kv, scale)


def attend_batch(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    first_key_positions: Tensor,
    query_positions: Tensor,
    window: int | None = None,
) -> Partial:
    """One row a sequence, with the masks of `attend_chunk`; a length of 0 gives lse -inf."""
    plan = BatchPlan(
        kv.shape, tables, lengths,
        first_key_positions=first_key_positions, query_positions=query_positions, window=window,
    )  # fmt: skip
    return plan.attend(q, kv, scale)
