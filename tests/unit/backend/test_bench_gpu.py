"""`bench gpu`, with the kernels interpreted: what it measures is computed, and its figures are as
documented."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Gpu, Round, Sizes
from kvcommons.errors import InvalidInput
from tests.interpreted import interpreted, needs_triton

TINY = Sizes(
    hidden=32,
    mlp=48,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    block_tokens=16,
    pool_bytes=1 << 16,
    weights_bytes=1 << 14,
    product=32,
)


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_every_case_is_measured() -> None:
    said: list[str] = []
    found = Gpu(interpreted(), TINY, "bfloat16").measure([1, 3], [40], [20], 1, said.append)
    assert list(found) == said
    assert {name.split()[0].strip(",") for name in found} == {"attention", "chunk", "product", "slice"}
    assert all(
        one.ours > 0 and one.torch > 0 and one.limit > 0 for rounds in found.values() for one in rounds
    )


def test_ratios_are_of_neighbours_in_time() -> None:
    rounds = [Round(ours=8e9, torch=2e9, limit=10e9), Round(ours=3e9, torch=1e9, limit=5e9)]
    names = ("attention, 1 x 2", "chunk of 1 after 2", "product, 1 rows, 2 x 2", "slice, 1 rows")
    report = gpu.summarise("t", dict.fromkeys(names, rounds))
    assert report.rows[0]["of the limit %"] == pytest.approx(70)
    assert report.ratios["slice_of_limit_least"] == pytest.approx(0.7)
    assert report.ratios["over_torch_least"] == pytest.approx(3.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    parser = argparse.ArgumentParser()
    gpu.add(parser.add_subparsers(), lambda _: None)
    options = parser.parse_args(["gpu"])
    with pytest.raises(InvalidInput, match="device 'cuda' cannot be used"):
        options.run(options, lambda _: None)
