"""How attention over blocks is divided for a GPU: into units of consecutive rows of one sequence, over a
range of its keys, each for one KV head and all query heads that share it. Pure.

How a sequence is cut follows from its own lengths alone, so that its bits are the same in every batch and on
every GPU of a kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcommons.backend.interface import Device

FIELDS = 7  # of a unit
# Keys of a unit of one row, a multiple of those that are taken at a time: so many for each so many of its
# sequence's, up to a bound, and more only where a sequence would have more units than it may. Few, so that
# one sequence has units for a whole GPU; many, so that each reads for longer than it takes to begin.
_UNIT_KEYS = 128
_UNIT_KEYS_FOR = 1024
_UNIT_KEYS_MAX = 512
_UNITS_MAX = 64
# Of a chunk with few rows, keys are divided until there are so many programs, but no further than to so many
# keys.
_CHUNK_PROGRAMS = 256
_CHUNK_KEYS_MIN = 512
# Bytes of a unit's queries, which stay where products read them while keys pass by.
_QUERY_BYTES = 128 * 128 * 2
_WIDE_BYTES = 256  # of a head, above which fewer keys are taken at a time
DOT_MIN = 16  # rows, columns and depth of a product have to be so many


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What a kernel is compiled for."""

    kv_heads: int
    group: int  # query heads that share a KV head
    block_tokens: int
    head_dim: int
    itemsize: int

    @property
    def padded_dim(self) -> int:
        return max(_power_of_2(self.head_dim), DOT_MIN)

    @property
    def keys(self) -> int:
        """That are taken at a time."""
        return 64 if self.padded_dim * self.itemsize <= _WIDE_BYTES else 32

    def unit_rows(self, rows: int) -> int:
        """Rows of `rows` consecutive ones that a unit has at most."""
        return max(self._tile(rows) // self.group, 1)

    def tile(self, unit_rows: int) -> int:
        """Rows of a product: those of a unit, for each query head of the group."""
        return max(_power_of_2(unit_rows * self.group), DOT_MIN)

    def _tile(self, rows: int) -> int:
        most = _QUERY_BYTES // (self.padded_dim * self.itemsize)
        return min(max(most, DOT_MIN), self.tile(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What one call of `attend` computes; tensors are on the device."""

    # int32 [units, FIELDS]: a row of q, and how many from it on; their block table; which key the first row
    # is the query of; the first key, and the one after the last; where their partials are.
    table: Tensor
    blocks: Tensor  # int32 [tables, nb]
    unit_rows: int
    window: int | None
    rows: int
    parts: int  # rows of partials that units write
    merge: Merge | None  # None: each row's keys are in one unit, and its partial is the result


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Which parts are a row's. With `begins` and `counts`, int32 [rows] on the device, those from begins[row]
    on; else `count`, from its own number on, `stride` apart."""

    begins: Tensor | None = None
    counts: Tensor | None = None
    count: int = 0
    stride: int = 1


def batch_units(
    device: Device, tables: Tensor, lengths: Tensor, queries: Tensor, window: int | None
) -> Units:
    """One row a sequence. `queries`: which key each row is the query of, by index, LongTensor [B] in host
    memory, as tables [B, nb] and lengths [B] are. Each row has a unit, even if it sees nothing."""
    rows = len(lengths)
    ends = torch.minimum(lengths, queries + 1).clamp_min(0)
    starts = (
        torch.zeros_like(ends) if window is None else torch.minimum((queries - window + 1).clamp_min(0), ends)
    )
    keys = _unit_keys(lengths)
    numbers = starts // keys  # of each row's first unit
    counts = (-(-ends // keys) - numbers).clamp_min(1)
    row = torch.arange(rows).repeat_interleave(counts)
    begins = counts.cumsum(0) - counts
    part = torch.arange(len(row))
    border = (part - begins[row] + numbers[row]) * keys[row]
    table = torch.stack(
        (
            row, torch.ones_like(row), row, queries[row], torch.maximum(border, starts[row]),
            torch.minimum(border + keys[row], ends[row]), part,
        ), dim=1,
    )  # fmt: skip
    # So that graphs are of few lengths: behind them are some of no rows.
    padded = torch.zeros((_power_of_2(len(row)), FIELDS), dtype=torch.int32)
    padded[: len(row)] = table
    merge = None
    if len(row) > rows:
        merge = Merge(begins=_uploaded(device, begins), counts=_uploaded(device, counts))
    return Units(
        table=_uploaded(device, padded), blocks=_uploaded(device, tables), unit_rows=1, window=window,
        rows=rows,
        parts=len(row), merge=merge,
    )  # fmt: skip


def _unit_keys(lengths: Tensor) -> Tensor:
    few = (-(-lengths // _UNIT_KEYS_FOR)).clamp(1, _UNIT_KEYS_MAX // _UNIT_KEYS)
    return torch.maximum(few, -(-lengths // (_UNITS_MAX * _UNIT_KEYS))) * _UNIT_KEYS


def chunk_units(
    device: Device, table: Tensor, length: int, queries: range, window: int | None, shape: HeadShape
) -> Units:
    """Rows of one sequence, table LongTensor [nb] in host memory. `queries`: which key each row is the query
    of, by index; `length` keys are there."""
    rows = len(queries)
    unit_rows = shape.unit_rows(rows)
    tiles = range(0, rows, unit_rows)
    seen = [_seen(queries[at : at + unit_rows], length, window) for at in tiles]
    most = max((len(keys) for keys in seen), default=0)
    programs = max(len(tiles) * shape.kv_heads, 1)
    splits = max(min(_CHUNK_PROGRAMS // programs, -(-most // _CHUNK_KEYS_MIN)), 1)
    units = []
    for at, keys in zip(tiles, seen, strict=True):
        size = -(-len(keys) // (splits * shape.keys)) * shape.keys
        for split in range(splits):
            part = keys[split * size : (split + 1) * size]
            count = min(unit_rows, rows - at)
            units.append((at, count, 0, queries[at], part.start, part.stop, split * rows + at))
    return Units(
        table=_uploaded(device, torch.tensor(units, dtype=torch.int32).view(-1, FIELDS)),
        blocks=_uploaded(device, table.view(1, -1)), unit_rows=unit_rows, window=window, rows=rows,
        parts=splits * rows, merge=Merge(count=splits, stride=rows) if splits > 1 else None,
    )  # fmt: skip


def _seen(queries: range, length: int, window: int | None) -> range:
    """Keys that any of these rows sees."""
    end = max(min(length, queries.stop), 0)
    start = 0 if window is None else min(max(queries.start - window + 1, 0), end)
    return range(start, end)


def _uploaded(device: Device, numbers: Tensor) -> Tensor:
    return device.upload(numbers.to(torch.int32).contiguous())


def _power_of_2(number: int) -> int:
    """The least one that is not below."""
    return 1 << max(number - 1, 0).bit_length()
