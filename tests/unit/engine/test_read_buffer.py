from __future__ import annotations

import pytest

from kvcommons.engine.load_or_compute import LoadOrCompute
from kvcommons.engine.read_buffer import ReadBuffer, buffer_bytes


def rates(*, load_s: float, compute_s: float) -> LoadOrCompute:
    """Of 1,000 bytes and of a token."""
    made = LoadOrCompute(lambda positions: compute_s * len(positions))
    made.loaded(1000, load_s)
    return made


def test_the_buffer_fills_the_gap_between_loading_and_computing() -> None:
    """A history of 16 layers of 1,000 bytes takes 16 s; 10 tokens compute in 6 s: 10 layers are missing."""
    made = rates(load_s=1.0, compute_s=0.6)
    assert buffer_bytes(made, history_bytes=16_000, new=range(10)) == pytest.approx(10_000)
    assert buffer_bytes(made, history_bytes=16_000, new=range(30)) == 0
    buffer = ReadBuffer(layers=16, bytes_max=100_000)
    assert buffer.layers_ahead(made, history_bytes=16_000, new=range(10), held_bytes=0) == 11
    assert buffer.layers_ahead(made, history_bytes=16_000, new=range(30), held_bytes=0) == 1
    assert buffer.layers_ahead(made, history_bytes=16_000, new=range(1), held_bytes=0) == 16


def test_all_is_loaded_while_nothing_is_known() -> None:
    buffer = ReadBuffer(layers=16, bytes_max=100_000)
    assert (
        buffer.layers_ahead(LoadOrCompute(lambda _: 0.0), history_bytes=16_000, new=range(1), held_bytes=0)
        == 16
    )


def test_memory_bounds_it_over_all_jobs() -> None:
    made = rates(load_s=1.0, compute_s=0.001)
    buffer = ReadBuffer(layers=16, bytes_max=5_500)
    assert buffer.layers_ahead(made, history_bytes=16_000, new=range(1), held_bytes=0) == 5
    assert buffer.layers_ahead(made, history_bytes=16_000, new=range(1), held_bytes=4_000) == 1
    assert buffer.layers_ahead(made, history_bytes=16_000, new=range(1), held_bytes=9_000) == 0


def test_a_fixed_size_beats_the_formula() -> None:
    buffer = ReadBuffer(layers=16, bytes_max=100_000, fixed_layers=5)
    made = rates(load_s=1.0, compute_s=1.0)
    assert buffer.layers_ahead(made, history_bytes=16_000, new=range(1), held_bytes=0) == 5
    assert ReadBuffer(layers=4, bytes_max=0, whole_first=True).first_use == 3
