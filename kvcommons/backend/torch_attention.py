"""Attention over paged blocks by torch's operators (the micro-attentions of Infinite-LLM), and the exact
merge of partials: the reference, on any device.

Keys are gathered to contiguous memory, a span at a time, and attended over by one dense call each, which
`Dense` names: matmuls here, what is quickest on the CPU there (kvcommons.backend.native_attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvcommons.backend.interface import BatchPlan, ChunkPlan, Device, Partial

if TYPE_CHECKING:
    from kvcommons.attention.native.exchange import Library

# Keys gathered to contiguous memory at once; bounds the temporary copy (64 MiB with 8 heads of 128 in bf16).
SPAN_TOKENS = 16384
# The same for a chunk of rows: its scores are made a tile at a time, best of so many keys.
CHUNK_SPAN_TOKENS = 2048
# Sequences of a batch share one padded call while padding stays below this share of its keys.
_PADDING_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Which keys a row does not see, in the forms that dense calls take; made once and used for every layer.

    hidden bool and scores float32 (0 or -inf) [N or 1, 1, R or 1, L]; blind bool [N or 1, 1, R or 1]: rows
    that see nothing, None where there is no such row.
    """

    hidden: Tensor
    scores: Tensor
    blind: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, *, blind: bool) -> Mask:
        """`blind`: whether there may be rows that see nothing."""
        return cls(
            hidden=hidden,
            scores=hidden.new_zeros(hidden.shape, dtype=torch.float32).masked_fill_(hidden, -torch.inf),
            blind=hidden.all(-1) if blind else None,
        )


class Dense(Protocol):
    """One dense attention call."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """q [N, kv_heads, R, D]; k, v [N, kv_heads, L, D], L > 0. Query heads that share a KV head are folded
        into R. Returns out [N, kv_heads, R, D] in float32 and lse [N, kv_heads, R] float32, which is -inf
        where a row sees nothing. Accumulates in float32."""


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float) -> tuple[Tensor, Tensor]:
    """By matmuls in float32."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if mask is not None:
        scores += mask.scores
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
    return torch.matmul(weights, v.float()), lse


class TorchAttention:
    """An AttentionBackend."""

    def __init__(self, device: Device, dense: Dense = dense) -> None:
        self._device = device
        self._dense = dense

    @property
    def native_exchange(self) -> Library | None:
        return None

    def plan_batch(
        self,
        kv: Tensor,
        tables: Tensor,
        lengths: Tensor,
        *,
        first_key_positions: Tensor,
        query_positions: Tensor,
        window: int | None = None,
    ) -> BatchPlan:
        return TorchBatchPlan(self, kv.shape, tables, lengths, query_positions - first_key_positions, window)

    def plan_chunk(
        self,
        kv: Tensor,
        query_heads: int,
        table: Tensor,
        length: int,
        *,
        first_key_position: int,
        query_positions: range,
        window: int | None = None,
    ) -> ChunkPlan:
        first = query_positions.start - first_key_position
        queries = range(first, first + len(query_positions))
        return TorchChunkPlan(self, kv.shape, query_heads, table, length, queries, window)

    def merge(self, partials: Sequence[Partial]) -> Partial:
        if len(partials) == 1:
            return partials[0]
        lse = torch.stack([part.lse for part in partials])
        top = lse.amax(0)
        weights = torch.exp(lse - top.masked_fill(top.isneginf(), 0.0))
        total = weights.sum(0)
        shares = weights / total.clamp_min(torch.finfo(torch.float32).tiny)
        out = partials[0].out * shares[0].unsqueeze(-1)
        for part, share in zip(partials[1:], shares[1:], strict=True):
            out.addcmul_(part.out, share.unsqueeze(-1))
        return Partial(out=out, lse=top + torch.log(total))

    def append(self, kv: Tensor, rows: Tensor, new: Tensor) -> None:
        dim = kv.shape[-1]
        kv.view(-1, dim).index_copy_(0, rows, new.to(kv.dtype).view(-1, dim))


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
    def of(cls, device: Device, kv_shape: Sequence[int], tables: Tensor, skip: int, keys: int) -> _Gather:
        """tables LongTensor [N, nb] in host memory."""
        heads = kv_shape[2]
        pair = torch.arange(2).view(2, 1, 1, 1) * heads
        head = torch.arange(heads).view(1, 1, heads, 1)
        index = tables.view(1, tables.shape[0], 1, tables.shape[1]) * (2 * heads) + pair + head
        index = device.upload(index.reshape(-1))
        return cls(index=index, sequences=tables.shape[0], skip=skip, keys=keys)

    def keys_and_values(self, kv: Tensor) -> Tensor:
        _, _, heads, block_tokens, dim = kv.shape
        rows = kv.view(-1, block_tokens * dim).index_select(0, self.index)
        return rows.view(2, self.sequences, heads, -1, dim)[:, :, :, self.skip : self.skip + self.keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkSpan:
    gather: _Gather
    mask: Mask | None  # [1, 1, group * T, keys]


class TorchChunkPlan:
    """Keys that all rows see are read without a mask; only the chunk's own keys and a window's edge have
    one."""

    def __init__(
        self,
        attention: TorchAttention,
        kv_shape: Sequence[int],
        query_heads: int,
        table: Tensor,
        length: int,
        queries: range,
        window: int | None,
    ) -> None:
        """`queries`: which key each row is the query of, by index; `length` keys are there."""
        self._attention = attention
        block_tokens, device = kv_shape[3], attention._device
        group = query_heads // kv_shape[2]
        low, high = queries.start, queries.stop - 1
        end = min(length, high + 1)
        seen_by_all_end = max(min(end, low + 1), 0)
        start = 0 if window is None else max(low - window + 1, 0)
        seen_by_all_start = 0 if window is None else min(max(high - window + 1, 0), seen_by_all_end)
        cuts = [(start, seen_by_all_start, True), (seen_by_all_start, seen_by_all_end, False)]
        cuts.append((max(seen_by_all_end, start), end, True))
        self._spans: list[_ChunkSpan] = []
        for first, last, masked in cuts:
            for begin in range(first, last, CHUNK_SPAN_TOKENS):
                keys = range(begin, min(begin + CHUNK_SPAN_TOKENS, last))
                block = begin // block_tokens
                blocks = table[block : -(-keys.stop // block_tokens)].view(1, -1)
                gather = _Gather.of(device, kv_shape, blocks, begin - block * block_tokens, len(keys))
                mask = _mask(device, keys, queries, window, group) if masked else None
                self._spans.append(_ChunkSpan(gather=gather, mask=mask))

    def attend(self, q: Tensor, kv: Tensor, scale: float) -> Partial:
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
            out, lse = self._attention._dense(folded, k, v, span.mask, scale)
            out = out.reshape(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
            parts.append(Partial(out=out, lse=lse.reshape(heads, rows).transpose(0, 1)))
        return self._attention.merge(parts)


def _mask(device: Device, keys: range, queries: range, window: int | None, group: int) -> Mask:
    """Of rows of `group` query heads, one head after the other."""
    key, query = torch.arange(keys.start, keys.stop), torch.arange(queries.start, queries.stop).unsqueeze(1)
    hidden = key > query
    blind = queries.start < keys.start
    if window is not None:
        hidden |= key <= query - window
        blind |= queries.stop - 1 - window >= keys.stop - 1
    return Mask.of(device.upload(hidden.repeat(group, 1)[None, None]), blind=blind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchGroup:
    rows: Tensor  # LongTensor [N], of the batch
    gather: _Gather
    mask: Mask | None  # [N, 1, 1, keys]
    clean_keys: int  # keys from here on are out of sight for some sequence, and may be anything, NaN included


class TorchBatchPlan:
    """Sequences of like length share a call; a very long one is read in spans,
    which are merged."""

    def __init__(
        self,
        attention: TorchAttention,
        kv_shape: Sequence[int],
        tables: Tensor,
        lengths: Tensor,
        queries: Tensor,
        window: int | None,
    ) -> None:
        """`queries`: which key each row is the query of, by index."""
        self._attention = attention
        block_tokens, device = kv_shape[3], attention._device
        ends = torch.minimum(lengths, queries + 1).tolist()
        starts = [0] * len(ends) if window is None else (queries - window + 1).clamp_min(0).tolist()
        self._waves: list[list[_BatchGroup]] = []
        spans = [(row, start, ends[row]) for row, start in enumerate(starts) if ends[row] > start]
        while spans:
            self._waves.append(
                [_batch_group(device, kv_shape, tables, group) for group in _groups(spans, block_tokens)]
            )
            nexts = ((row, _span_stop(start, end, block_tokens), end) for row, start, end in spans)
            spans = [(row, start, end) for row, start, end in nexts if end > start]

    def attend(self, q: Tensor, kv: Tensor, scale: float, into: Partial | None = None) -> Partial:
        if self._waves:
            partial = self._attention.merge([self._wave(wave, q, kv, scale) for wave in self._waves])
        else:
            partial = Partial.empty(q)
        if into is None:
            return partial
        into.out.copy_(partial.out)
        into.lse.copy_(partial.lse)
        return into

    def _wave(self, wave: Sequence[_BatchGroup], q: Tensor, kv: Tensor, scale: float) -> Partial:
        result = Partial.empty(q)
        for group in wave:
            size, heads, dim = len(group.rows), *q.shape[1:]
            k, v = both = group.gather.keys_and_values(kv)
            if group.mask is not None and group.clean_keys < group.gather.keys:
                unseen = group.mask.hidden[:, :, 0, group.clean_keys :, None]
                both[:, :, :, group.clean_keys :].masked_fill_(unseen, 0.0)
            folded = q.index_select(0, group.rows).to(kv.dtype).reshape(size, kv.shape[2], -1, dim)
            out, lse = self._attention._dense(folded, k, v, group.mask, scale)
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


def _batch_group(
    device: Device, kv_shape: Sequence[int], tables: Tensor, spans: Sequence[_Span]
) -> _BatchGroup:
    block_tokens = kv_shape[3]
    rows = torch.tensor([row for row, _, _ in spans])
    blocks = [start // block_tokens for _, start, _ in spans]
    skips = [start - block * block_tokens for (_, start, _), block in zip(spans, blocks, strict=True)]
    stops = [end - block * block_tokens for (_, _, end), block in zip(spans, blocks, strict=True)]
    keys, count = max(stops), -(-max(stops) // block_tokens)
    columns = torch.tensor(blocks).view(-1, 1) + torch.arange(count)
    chosen = tables.index_select(0, rows).gather(1, columns.clamp_max(tables.shape[1] - 1))
    mask = None
    if min(stops) < keys or max(skips) > 0:
        positions = torch.arange(keys).view(1, 1, 1, -1)
        first, last = torch.tensor(skips).view(-1, 1, 1, 1), torch.tensor(stops).view(-1, 1, 1, 1)
        mask = Mask.of(device.upload((positions < first) | (positions >= last)), blind=False)
    gather = _Gather.of(device, kv_shape, chosen, 0, keys)
    return _BatchGroup(rows=device.upload(rows), gather=gather, mask=mask, clean_keys=min(stops))
