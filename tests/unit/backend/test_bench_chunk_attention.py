"""`kvcommons bench chunk-attention`: what its figures are of."""

from __future__ import annotations

import argparse
import shlex

import pytest
import torch

from benchmarks import chunk_attention
from benchmarks.attention import Heads
from benchmarks.chunk_attention import Case, Round

HEADS = Heads(query_heads=4, kv_heads=2, head_dim=32, block_tokens=16)


def test_a_causal_chunk_counts_half_of_its_own_pairs() -> None:
    assert chunk_attention.operations(HEADS, Case(dtype="float32", rows=2, context=10)) == 4 * 32 * 4 * (
        11 + 12
    )


def test_ratios_are_of_neighbours_in_time_and_the_worst_counts() -> None:
    case, other = (Case(dtype=dtype, rows=8, context=100) for dtype in ("bfloat16", "float32"))
    report = chunk_attention.summarise(
        "t",
        HEADS,
        {
            case: [Round(product=4e9, kernel=3e9, torch=1e9), Round(product=8e9, kernel=7.2e9, torch=2e9)],
            other: [Round(product=2e9, kernel=1e9, torch=1e9)],
        },
    )
    assert report.ratios == pytest.approx({"of_product_least": 0.5, "over_torch_least": 1.0})
    assert report.rows[0]["of product %"] == pytest.approx(82.5)


def test_a_small_chunk_is_measured_as_a_large_one() -> None:
    parser = argparse.ArgumentParser()
    chunk_attention.add(parser.add_subparsers(), lambda _: None)
    command = "chunk-attention --rows 8 40 --context 100 --threads 1 --query-heads 4 --kv-heads 2 --rounds 1"
    options = parser.parse_args(shlex.split(command))
    threads = torch.get_num_threads()
    try:
        report = options.run(options, lambda _: None)
    finally:
        torch.set_num_threads(threads)
    assert [row["case"] for row in report.rows] == [
        f"{dtype}, {rows} after 100" for dtype in ("bfloat16", "float32") for rows in (8, 40)
    ]
    assert all(row["kernel GFLOP/s"] > 0 and row["torch GFLOP/s"] > 0 for row in report.rows)
