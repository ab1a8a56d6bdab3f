"""A predictor's first coefficients: measured with the engine's own iterations, and kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvcommons.backend.choice import processor
from kvcommons.engine.calibration import Calibration, KeptPredictor
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.settings import EngineSettings
from kvcommons.model.spec import ModelSpec, fingerprint
from kvcommons.model.synthetic import write_random_folder
from tests.unit.engine.tiny import tiny_core
from tests.unit.model.reference_folders import edit_config

CHUNK = 64
SETTINGS = EngineSettings(model="tiny")
TOKENS = IterationWork(rows=4, read_bytes=1 << 10)
SMALL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}  # fmt: skip


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


def kept(folder: Path, settings: EngineSettings = SETTINGS, *, identity: bytes = bytes(32)) -> KeptPredictor:
    """`identity` is what the model goes by."""
    file = str(folder / "predictors" / "decode.json")
    return KeptPredictor.of(replace(settings, predictor_file=file), tiny_core(layers=2, identity=identity))


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


def test_another_machine_has_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path).write(calibrated())
    assert kept(tmp_path, replace(SETTINGS, threads=2)).read() is None
    here = processor()
    for other in ("another processor, 2 cores", f"{here.rpartition(',')[0]}, 1000 cores"):
        monkeypatch.setattr("kvcommons.engine.calibration.processor", lambda other=other: other)
        assert kept(tmp_path).read() is None
    monkeypatch.setattr("kvcommons.engine.calibration.processor", lambda: here)
    assert kept(tmp_path).read() is not None, "it is this one's still"


def test_another_model_has_to_be_measured(tmp_path: Path) -> None:
    """By what is in its folder: other weights of the same shape, another shape, another dtype of its KV. A
    copy elsewhere is the same model."""
    folder, copy, longer, other = (tmp_path / name for name in ("model", "copy", "longer", "other"))
    write_random_folder(folder, SMALL, seed=1)
    for each in (copy, longer):
        shutil.copytree(folder, each)
    edit_config(longer, lambda config: config.update(max_position_embeddings=128))
    write_random_folder(other, SMALL, seed=2)
    kept(tmp_path, identity=identity_of(folder)).write(calibrated())
    for identity in (identity_of(longer), identity_of(other), identity_of(folder, "float32")):
        assert kept(tmp_path, identity=identity).read() is None
    assert kept(tmp_path, identity=identity_of(copy)).read() is not None


def identity_of(folder: Path, dtype: str = "bfloat16") -> bytes:
    return fingerprint(folder, ModelSpec.read(folder), dtype, 16)


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
