"""Who multiplies with a model's weights: measured once, kept, and not changed by a restart."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcommons.attention.native import library
from kvcommons.backend.product_choice import (
    ROWS,
    ProductWork,
    Timings,
    chosen_products,
    kept_products,
    measure,
    quickest,
)
from kvcommons.backend.products import Products
from tests.unit.backend.kernels import needs_compiler

WORK = ProductWork(matrices=((96, 64), (64, 48)), layers=3, dtype=torch.float32, threads=1)


class Measured:
    """Says that one of the two is quicker, and how often it was asked."""

    def __init__(self, quicker: Products) -> None:
        self.times = 0
        self._quicker = quicker

    def __call__(self, work: ProductWork) -> Timings:
        self.times += 1
        return {who: [1.0 if who is self._quicker else 2.0] * len(ROWS) for who in Products}


@pytest.mark.parametrize(
    ("native", "onednn", "quicker"),
    [
        ([1, 1, 1], [2, 2, 1.1], Products.NATIVE),
        ([1, 2, 100], [2, 4, 10], Products.ONEDNN),  # matrix units
        ([1, 1, 1.05], [1.5, 1.2, 1], Products.NATIVE),  # half as fast again, for a twentieth
    ],
)
def test_all_numbers_of_rows_count_alike(native: list[float], onednn: list[float], quicker: Products) -> None:
    assert quickest({Products.NATIVE: native, Products.ONEDNN: onednn}) is quicker


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_are_measured_with_each_number_of_rows(dtype: torch.dtype) -> None:
    timings = measure(replace(WORK, dtype=dtype))
    assert set(timings) == set(Products)
    for seconds in timings.values():
        assert len(seconds) == len(ROWS)
        assert all(0 < one < 10 for one in seconds)


def test_few_rows_go_through_more_than_caches_hold_or_the_whole_model() -> None:
    assert WORK.copies == 3
    large = ProductWork(matrices=((8192, 4096),), layers=32, dtype=torch.bfloat16, threads=1)
    assert large.copies == 6
    head = replace(large, matrices=((128_000, 4096),))
    assert head.measured == ((2048, 4096),)


@needs_compiler
@pytest.mark.parametrize("quicker", Products)
def test_what_was_measured_is_in_the_log(
    quicker: Products, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        kept_products(WORK, [tmp_path], Measured(quicker))
    (said,) = [vars(record) for record in caplog.records if record.message == "products measured"]
    assert (said["products"], said["rows"]) == (quicker.value, list(ROWS))
    assert said[f"{quicker.value}_ms"] == [1000.0] * len(ROWS)


@needs_compiler
@pytest.mark.parametrize("quicker", Products)
def test_a_restart_changes_nothing(quicker: Products, tmp_path: Path) -> None:
    first, later = Measured(quicker), Measured(next(who for who in Products if who is not quicker))
    assert kept_products(WORK, [tmp_path], first) is quicker
    assert kept_products(WORK, [tmp_path], later) is quicker
    assert (first.times, later.times) == (1, 0)


@needs_compiler
def test_another_shape_dtype_or_number_of_threads_is_measured_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(Products.ONEDNN)
    others = [
        WORK,
        replace(WORK, threads=2),
        replace(WORK, dtype=torch.bfloat16),
        replace(WORK, layers=4),
        replace(WORK, matrices=((96, 64), (64, 50))),
    ]
    for work in others:
        kept_products(work, [tmp_path], measured)
    assert measured.times == len(others)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    kept_products(WORK, [tmp_path], measured)
    assert measured.times == len(others) + 1, "oneDNN is held to other instructions"


@needs_compiler
def test_processes_that_start_at_once_measure_once(tmp_path: Path) -> None:
    measured = Measured(Products.ONEDNN)
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(lambda _: kept_products(WORK, [tmp_path], measured), range(8)))
    assert found == [Products.ONEDNN] * 8
    assert measured.times == 1


@needs_compiler
def test_a_damaged_file_is_measured_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept_products(WORK, [tmp_path], Measured(Products.ONEDNN))
    (file,) = tmp_path.glob("_products-*.json")
    for content in (b"{", b'{"version": 1, "products": "abacus"}', b"[]"):
        file.write_bytes(content)
        caplog.clear()
        again = Measured(Products.NATIVE)
        assert kept_products(WORK, [tmp_path], again) is Products.NATIVE
        assert again.times == 1
        assert "measured anew" in caplog.text


@needs_compiler
def test_where_nothing_can_be_kept_it_is_measured_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        found = kept_products(WORK, [tmp_path / "file" / "below"], Measured(Products.ONEDNN))
    assert found is Products.ONEDNN
    assert "measured at each start" in caplog.text


@pytest.mark.parametrize("who", Products)
def test_a_setting_says_who(who: Products) -> None:
    assert chosen_products(who.value, WORK) is who


def test_without_the_kernel_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "torch")
    measured = Measured(Products.NATIVE)
    assert kept_products(WORK, [tmp_path], measured) is Products.ONEDNN
    assert measured.times == 0
