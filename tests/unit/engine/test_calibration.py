"""A predictor's first coefficients: measured with the engine's own iterations, and kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvcommons.engine.calibration import Calibration, KeptPredictor
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.settings import EngineSettings
from tests.unit.engine.tiny import tiny_core

CHUNK = 64
SETTINGS = EngineSettings(model="tiny")
TOKENS = IterationWork(rows=4, read_bytes=1 << 10)


def calibrated(*, generates: bool = True, seconds_max: float = 60.0) -> Predictor:
    core, predictor = tiny_core(layers=2), Predictor()
    free = core.allocator.free
    Calibration(core, chunk_tokens=CHUNK, generates=generates).run(predictor, seconds_max=seconds_max)
    assert core.allocator.free == free, "all blocks are back"
    return predictor


def test_chunks_and_tokens_are_known_afterwards() -> None:
    predictor = calibrated()
    chunk = IterationWork.of_chunk(range(32))
    assert predictor.knows(chunk)
    assert predictor.knows(TOKENS)
    assert 0 < predictor.seconds(chunk) < 10
    assert predictor.seconds(TOKENS) > 0
    assert predictor.prompt_seconds(range(100), CHUNK) > 0
    assert predictor.error < 1


def test_where_no_sequence_generates_only_chunks_are_measured() -> None:
    assert calibrated(generates=False).most.read_bytes == 0


def test_it_ends_in_time_and_learns_what_it_can() -> None:
    now_s = iter(range(1000))
    core, predictor = tiny_core(layers=2), Predictor()
    Calibration(core, chunk_tokens=CHUNK, generates=True).run(
        predictor, seconds_max=1.5, clock=lambda: float(next(now_s))
    )
    assert predictor.knows(IterationWork.of_chunk(range(32)))
    assert predictor.most.read_bytes == 0, "a second each: two iterations, of which one was learnt from"


def kept(folder: Path, settings: EngineSettings = SETTINGS) -> KeptPredictor:
    file = str(folder / "predictors" / "decode.json")
    return KeptPredictor.of(replace(settings, predictor_file=file), tiny_core(layers=2))


def test_what_was_learnt_is_there_at_the_next_start(tmp_path: Path) -> None:
    predictor = calibrated()
    assert kept(tmp_path).read() is None, "there is none yet"
    kept(tmp_path).write(predictor)
    again = kept(tmp_path).read()
    assert again is not None
    for work in (IterationWork.of_chunk(range(100, 150)), TOKENS):
        assert again.seconds(work) == pytest.approx(predictor.seconds(work))
    assert (again.most, again.error) == (predictor.most, predictor.error)
    for one in (predictor, again):  # and both go on alike
        one.learn(TOKENS, 0.5)
    assert again.seconds(TOKENS) == pytest.approx(predictor.seconds(TOKENS))


def test_another_machine_or_model_has_to_be_measured(tmp_path: Path) -> None:
    kept(tmp_path).write(calibrated())
    assert kept(tmp_path, replace(SETTINGS, threads=2)).read() is None
    file = kept(tmp_path)
    assert replace(file, kept=replace(file.kept, fingerprint="of another model")).read() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"moments": [', '"moments": [NaN, '),
        lambda text: json.dumps(json.loads(text) | {"learnt": {}}),
        lambda text: "[]",
    ],
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, damage, caplog) -> None:  # type: ignore[no-untyped-def]
    file = kept(tmp_path)
    file.write(calibrated())
    path = file.kept.path
    path.write_text(damage(path.read_text()))
    assert file.read() is None
    assert "measured anew" in caplog.text


def test_nothing_is_kept_without_a_file(tmp_path: Path) -> None:
    nowhere = KeptPredictor.of(SETTINGS, tiny_core(layers=2))
    nowhere.write(Predictor())
    assert nowhere.read() is None
