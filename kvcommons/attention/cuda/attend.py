"""Attention over blocks in a GPU's memory, for rows of a batch and for chunks alike, and the merge of
partials.

A program computes one unit (kvcommons.attention.cuda.units) for one KV head. Where the keys of a row are in
several units, a second kernel merges their partials (Infinite-LLM, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcommons.attention.cuda.launch import beside
from kvcommons.attention.cuda.precision import dot, rounded
from kvcommons.attention.cuda.units import DOT_MIN, FIELDS, HeadShape, Merge, Units
from kvcommons.backend.interface import Partial

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = 1.4426950408889634


def attend(
    q: Tensor, kv: Tensor, units: Units, shape: HeadShape, scale: float, into: Partial | None
) -> Partial:
    """q [rows, heads, D], of any strides but the last; kv one layer's blocks. The output `into` which it is
    written may be of the model's dtype."""
    heads = shape.kv_heads * shape.group
    result = into or _undefined(q, units.rows, heads, shape.head_dim)
    parts = result if units.merge is None else _undefined(q, units.parts, heads, shape.head_dim)
    tile = shape.tile(units.unit_rows)
    with beside(q):
        _attend_unit[(len(units.table), shape.kv_heads)](
            q, kv, units.blocks, units.table, parts.out, parts.lse,
            scale * _LOG2_E, 0 if units.window is None else units.window,
            q.stride(0), q.stride(1), units.blocks.stride(0),
            KV_HEADS=shape.kv_heads, GROUP=shape.group, BLOCK_TOKENS=shape.block_tokens, DIM=shape.head_dim,
            PADDED=shape.padded_dim, TILE=tile, KEYS=shape.keys, FIELDS=FIELDS,
            WINDOWED=units.window is not None, num_warps=2 if tile == DOT_MIN else 4, num_stages=2,
        )  # fmt: skip
    return result if units.merge is None else _merge(parts, units.merge, result)


def merge(partials: Sequence[Partial]) -> Partial:
    """Of one shape [T, H, D]."""
    out = torch.stack([part.out for part in partials])
    rows, heads, dim = out.shape[1:]
    parts = Partial(out=out, lse=torch.stack([part.lse for part in partials]))
    return _merge(parts, Merge(count=len(partials), stride=rows), _undefined(out, rows, heads, dim))


def _undefined(like: Tensor, rows: int, heads: int, dim: int) -> Partial:
    return Partial(
        out=like.new_empty((rows, heads, dim), dtype=torch.float32),
        lse=like.new_empty((rows, heads), dtype=torch.float32),
    )


def _merge(parts: Partial, merge: Merge, result: Partial) -> Partial:
    rows, heads, dim = result.out.shape
    if not rows:
        return result
    given = merge.begins is not None
    with beside(parts.out):
        _merge_row[(rows, heads)](
            parts.out, parts.lse, merge.begins if given else parts.lse, merge.counts if given else parts.lse,
            merge.count, merge.stride, result.out, result.lse, HEADS=heads, DIM=dim,
            PADDED=triton.next_power_of_2(dim), GIVEN=given,
        )  # fmt: skip
    return result


@triton.jit
def _keys_at(
    kv, blocks, head, start, begin, end, dims,
    KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    KEYS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Where the keys from `start` on are, and which of them and of their dimensions may be read. With `ALL`
    they all lie between `begin` and `end`."""
    steps = tl.arange(0, KEYS)
    key = start + steps
    if BLOCK_TOKENS % KEYS == 0:  # all in one block
        block = tl.load(blocks + start // BLOCK_TOKENS).to(tl.int64)
        place = (block * (2 * KV_HEADS) + head) * BLOCK_TOKENS + start % BLOCK_TOKENS
        address = kv + place * DIM + (steps[:, None] * DIM + dims[None, :])
    else:
        there = (key >= begin) & (key < end)
        block = tl.load(blocks + key // BLOCK_TOKENS, mask=there, other=0).to(tl.int64)
        place = (block * (2 * KV_HEADS) + head) * BLOCK_TOKENS + key % BLOCK_TOKENS
        address = kv + place[:, None] * DIM + dims[None, :]
    read = dims[None, :] < DIM
    if not ALL:
        read = read & ((key >= begin) & (key < end))[:, None]
    return address, read


@triton.jit
def _weigh(scores, values, top, total, sums, dtype: tl.constexpr):
    """An online softmax's next step: scores [rows, keys] and values [keys, D]."""
    above = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(above == float("-inf"), 0.0, above)  # no key seen as yet
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(top - base)
    sums = sums * shrunk[:, None] + dot(rounded(weights, dtype), values)
    return above, total * shrunk + tl.sum(weights, 1), sums


# What changes from one call to the next must not be compiled for: others would wait a second for it.
@triton.jit(do_not_specialize=["window", "blocks_stride"])
def _attend_unit(
    q, kv, blocks, table, out, lse, scale, window, q_row_stride, q_head_stride, blocks_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    unit = table + tl.program_id(0) * FIELDS
    row, rows, sequence = tl.load(unit), tl.load(unit + 1), tl.load(unit + 2)
    first, begin, end, part = tl.load(unit + 3), tl.load(unit + 4), tl.load(unit + 5), tl.load(unit + 6)
    dtype = kv.dtype.element_ty
    blocks += sequence * blocks_stride

    m, dims = tl.arange(0, TILE), tl.arange(0, PADDED)
    token, query_head = m // GROUP, head * GROUP + m % GROUP
    live = (token < rows)[:, None] & (dims < DIM)[None, :]
    at = (row + token).to(tl.int64) * q_row_stride + query_head * q_head_stride
    queries = rounded(tl.load(q + at[:, None] + dims[None, :], mask=live, other=0.0).to(tl.float32), dtype)
    query = first + token

    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, PADDED], tl.float32)
    # Tiles of keys begin at their multiples. Those that all rows see need no masks.
    start = begin // KEYS * KEYS
    masked = start
    if not WINDOWED:
        bound = end
        if first + 1 < end:
            bound = first + 1
        if bound > start:
            masked = bound // KEYS * KEYS
        for tile in range(start, masked, KEYS):
            address, read = _keys_at(
                kv, blocks, head, tile, begin, end, dims, KV_HEADS, BLOCK_TOKENS, DIM, PADDED, KEYS, True
            )
            keys = tl.load(address, mask=read, other=0.0)
            scores = dot(queries, tl.trans(keys)) * scale
            values = tl.load(address + KV_HEADS * BLOCK_TOKENS * DIM, mask=read, other=0.0)
            top, total, sums = _weigh(scores, values, top, total, sums, dtype)
    for tile in range(masked, end, KEYS):
        address, read = _keys_at(
            kv, blocks, head, tile, begin, end, dims, KV_HEADS, BLOCK_TOKENS, DIM, PADDED, KEYS, False
        )
        # What nobody sees may be anything, NaN included: it is not read.
        keys = tl.load(address, mask=read, other=0.0)
        key = tile + tl.arange(0, KEYS)
        seen = ((key >= begin) & (key < end))[None, :] & (key[None, :] <= query[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > query[:, None] - window)
        scores = tl.where(seen, dot(queries, tl.trans(keys)) * scale, float("-inf"))
        values = tl.load(address + KV_HEADS * BLOCK_TOKENS * DIM, mask=read, other=0.0)
        top, total, sums = _weigh(scores, values, top, total, sums, dtype)

    target = (part + token).to(tl.int64) * (KV_HEADS * GROUP) + query_head
    # A row that sees nothing has a top of -inf, and so a log-sum-exp of -inf.
    total = tl.where(total == 0.0, 1.0, total)
    attended = rounded(sums / total[:, None], out.dtype.element_ty)
    tl.store(out + target[:, None] * DIM + dims[None, :], attended, mask=live)
    tl.store(lse + target, (top + tl.log2(total)) * _LN_2, mask=token < rows)


@triton.jit(do_not_specialize=["count", "stride"])
def _merge_row(
    parts_out, parts_lse, begins, counts, count, stride, out, lse,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    row, head, dims = tl.program_id(0), tl.program_id(1), tl.arange(0, PADDED)
    begin = row
    if GIVEN:
        begin = tl.load(begins + row)
        count = tl.load(counts + row)
    top = float("-inf")
    total = 0.0
    sums = tl.zeros([PADDED], tl.float32)
    for number in range(count):
        at = (begin + number * stride).to(tl.int64) * HEADS + head
        size = tl.load(parts_lse + at)
        above = tl.maximum(top, size)
        base = tl.where(above == float("-inf"), 0.0, above)
        shrunk, weight = tl.exp(top - base), tl.exp(size - base)
        sums = sums * shrunk + weight * tl.load(parts_out + at * DIM + dims, mask=dims < DIM, other=0.0)
        total = total * shrunk + weight
        top = above
    at = row.to(tl.int64) * HEADS + head
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * DIM + dims, rounded(sums / total, out.dtype.element_ty), mask=dims < DIM)
    tl.store(lse + at, top + tl.log(total))
