"""`kvcommons bench attention`: what its figures are of."""

from __future__ import annotations

import argparse
import shlex

import pytest
import torch

from benchmarks import attention
from benchmarks.attention import Case, Heads, Round
from kvcommons.attention.native import library
from kvcommons.errors import Unavailable

HEADS = Heads(query_heads=4, kv_heads=2, head_dim=32, block_tokens=16)


def test_ratios_are_of_neighbours_in_time_and_the_worst_counts() -> None:
    case, slow = (Case(dtype=dtype, batch=2, context=1000) for dtype in ("bfloat16", "float32"))
    report = attention.summarise(
        "t",
        HEADS,
        {
            case: [Round(read=4e9, kernel=3e9, torch=1e9), Round(read=8e9, kernel=6.8e9, torch=2e9)] * 2
            + [Round(read=1e9, kernel=0.9e9, torch=0.1e9)],
            slow: [Round(read=2e9, kernel=1e9, torch=1e9)],
        },
    )
    assert report.ratios == pytest.approx({"of_reading_least": 0.5, "over_torch_least": 1.0})
    assert report.rows[0]["of reading %"] == pytest.approx(85)
    assert report.rows[0]["over torch"] == pytest.approx(3.4)
    assert report.rows[1]["a call ms"] == pytest.approx(2 * 1000 * 2 * 2 * 32 * 4 / 1e9 * 1e3)


def test_a_small_pool_is_measured_as_a_large_one() -> None:
    if library.chosen() is None:
        pytest.skip("no C++ compiler here")
    parser = argparse.ArgumentParser()
    attention.add(parser.add_subparsers(), lambda _: None)
    command = (
        "attention --pool-mib 2 --seconds 0 --context 100 5000 --batch 3 --threads 1 --query-heads 4"
        " --kv-heads 2 --head-dim 32"
    )
    options = parser.parse_args(shlex.split(command))
    threads = torch.get_num_threads()
    try:
        report = options.run(options, lambda _: None)
    finally:
        torch.set_num_threads(threads)
    assert [row["case"] for row in report.rows] == [
        f"{dtype}, 3 x {context}" for dtype in ("bfloat16", "float32") for context in ("100", "5,000")
    ]
    assert all(row["kernel GB/s"] > 0 and row["torch GB/s"] > 0 for row in report.rows)


def test_without_a_kernel_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "torch")
    with pytest.raises(Unavailable, match="compiler"):
        attention.Pool(HEADS, "bfloat16", 1 << 20)
