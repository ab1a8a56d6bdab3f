"""`bench products` multiplies with every matrix of a model, and its figures are as documented."""

from __future__ import annotations

import pytest
import torch

from benchmarks import products
from benchmarks.products import Matrices, Round
from kvcommons.model.spec import ModelSpec
from kvcommons.model.synthetic import random_config, write_random_folder


def test_all_matrices_are_multiplied_with(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model") / "random"
    config = random_config("7m")
    write_random_folder(folder, config)
    spec = ModelSpec.read(folder)
    bench = Matrices(spec, torch.bfloat16)
    layer = (
        spec.hidden * (2 * spec.query_heads + 2 * spec.kv_heads) * spec.head_dim + 3 * spec.hidden * spec.mlp
    )
    assert bench.elements == spec.layers * layer + spec.vocab_size * spec.hidden
    rounds = bench.measure(2, 3)
    assert len(rounds) == 3
    assert all(one.read > 0 and one.native > 0 and one.onednn > 0 for one in rounds)


def test_ratios_are_of_neighbours_in_time() -> None:
    rounds = [Round(read=0.8, native=1.0, onednn=2.0), Round(read=1.8, native=2.0, onednn=6.0)]
    report = products.summarise("t", 10**9, {1: rounds[:1], 8: rounds})
    assert report.rows[1]["of reading %"] == pytest.approx(85)
    assert report.rows[1]["over oneDNN"] == pytest.approx(2.5)
    assert report.rows[1]["kernel GFLOP/s"] == pytest.approx(2 * 8 / 1.5)
    assert report.ratios == pytest.approx({"of_reading_most": 0.85, "over_onednn_least": 2.0})
