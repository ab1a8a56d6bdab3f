"""How attention is divided for a GPU: each key that a row sees is in exactly one of its units."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcommons.attention.cuda.units import HeadShape, Units, batch_units, chunk_units
from kvcommons.backend.host_device import HostDevice

HOST = HostDevice()
Window = st.none() | st.integers(1, 5000)


def shape(group: int = 4, dim: int = 128, kv_heads: int = 8, itemsize: int = 2) -> HeadShape:
    return HeadShape(kv_heads=kv_heads, group=group, block_tokens=64, head_dim=dim, itemsize=itemsize)


def keys_of_rows(units: Units) -> dict[int, list[tuple[int, int]]]:
    """Of each row its ranges of keys that it sees, in the order in which they are merged."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    parts = {}
    for row, count, _, first, begin, end, part in units.table.tolist():
        assert 0 <= count <= units.unit_rows
        for at in range(count):
            query = first + at
            start = begin if units.window is None else max(begin, query - units.window + 1)
            assert part + at not in parts, "two units write to one place"
            parts[part + at] = (row + at, (start, min(end, query + 1)))
    merge = units.merge
    for row in range(units.rows):
        if merge is None:
            places = [row]
        elif merge.begins is not None and merge.counts is not None:
            places = [int(merge.begins[row]) + number for number in range(int(merge.counts[row]))]
        else:
            places = [row + number * merge.stride for number in range(merge.count)]
        for place in places:
            owner, keys = parts.pop(place)
            assert owner == row
            if keys[0] < keys[1]:
                ranges[row].append(keys)
    assert not parts, "a part that nobody merges"
    return ranges


def joined(ranges: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The one range that they are; they follow each other."""
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    return (ranges[0][0], ranges[-1][1]) if ranges else None


def seen(query: int, length: int, window: int | None) -> tuple[int, int] | None:
    end = min(length, query + 1)
    start = 0 if window is None else max(query - window + 1, 0)
    return (start, end) if start < end else None


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(-5, 41_000)), min_size=1, max_size=6), Window)
def test_a_batch(rows: list[tuple[int, int]], window: int | None) -> None:
    lengths, queries = (
        torch.tensor([length for length, _ in rows]),
        torch.tensor([query for _, query in rows]),
    )
    units = batch_units(HOST, torch.zeros(len(rows), 1, dtype=torch.int64), lengths, queries, window)
    found = keys_of_rows(units)
    for row, (length, query) in enumerate(rows):
        assert joined(found[row]) == seen(query, length, window)


@given(
    st.integers(0, 5000), st.integers(-3000, 5000), st.integers(1, 700), Window,
    st.sampled_from([(1, 64, 2), (4, 128, 2), (7, 64, 4), (3, 256, 4), (40, 128, 2), (128, 256, 4)]),
)  # fmt: skip
def test_a_chunk(length: int, first: int, rows: int, window: int | None, kind: tuple[int, int, int]) -> None:
    group, dim, itemsize = kind
    queries = range(first, first + rows)
    units = chunk_units(
        HOST, torch.zeros(1, dtype=torch.int64), length, queries, window, shape(group, dim, itemsize=itemsize)
    )
    found = keys_of_rows(units)
    for row, query in enumerate(queries):
        assert joined(found[row]) == seen(query, length, window)


def test_a_sequence_is_cut_alike_in_every_batch() -> None:
    def cut(lengths: list[int], row: int) -> list[list[int]]:
        tables, numbers = torch.zeros(len(lengths), 1, dtype=torch.int64), torch.tensor(lengths)
        units = batch_units(HOST, tables, numbers, numbers - 1, None).table.tolist()
        return [unit[3:6] for unit in units if unit[0] == row and unit[1]]

    assert cut([5000], 0) == cut([7, 90_000, 5000], 2)
    assert [len(cut([length], 0)) for length in (1000, 2000, 5000, 30_000)] == [8, 8, 10, 59]
    assert len(cut([1_000_000], 0)) == 64, "a long one is not cut to pieces"


@pytest.mark.parametrize(("rows", "history"), [(16, 30_000), (512, 30_000), (4096, 0)])
def test_a_chunk_is_work_for_a_whole_gpu(rows: int, history: int) -> None:
    kind = shape()
    units = chunk_units(
        HOST, torch.zeros(1, dtype=torch.int64), history + rows, range(history, history + rows), None, kind
    )
    assert len(units.table) * kind.kv_heads >= 128


def test_a_group_larger_than_a_tile_has_a_tile_of_its_own() -> None:
    wide = shape(group=128, dim=256, itemsize=4)
    assert wide.unit_rows(100) == 1
    assert wide.tile(1) == 128
