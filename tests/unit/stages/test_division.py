"""The first stage divides the layers by what it measured, and the others have what it says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcommons.engine.settings import EngineSettings
from kvcommons.errors import InvalidInput
from kvcommons.model.layer_ranges import LayerTimes
from kvcommons.model.spec import ModelSpec
from kvcommons.model.tensor_rank import TensorRank
from kvcommons.pb import ledger_pb2 as pb
from kvcommons.stages import division
from kvcommons.stages.division import LayerDivision, first_stages_division, said_by
from kvcommons.stages.layer_timing import StageWork, measured_times
from kvcommons.stages.settings import StageSettings
from tests.unit.model import reference_folders

WORK = StageWork(rows=16, generates=False)
SHAPE = StageSettings(stages=2)


def settings(folder: Path, **changes: Any) -> EngineSettings:
    known: dict[str, Any] = {"dtype": "float32", "block_tokens": 16, "calibrate_s": 0.01}
    return EngineSettings(model=str(folder), **(known | changes))


def counts(divided: LayerDivision) -> list[int]:
    return [len(layers) for layers in divided.ranges]


@pytest.mark.parametrize(("rows", "generates"), [(8, False), (8, True), (4096, False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_kind_of_layer_is_measured(tmp_path: Path, rows: int, generates: bool, ranks: int) -> None:
    """Also for chunks that are longer than the context."""
    folder = reference_folders.write(tmp_path, "llama", layers=5)
    work = StageWork(rows=rows, generates=generates)
    times = measured_times(settings(folder), ModelSpec.read(folder), TensorRank(ranks=ranks), work)
    assert len(times.layers) == 5
    assert min(times.layers) > 0
    assert len(set(times.layers[1:4])) == 1, "layers of one kind take the same"


def test_what_was_measured_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: Any) -> None:
    """And corrected by what stages took: the next start divides otherwise."""
    folder = reference_folders.write(tmp_path, "llama", layers=5)
    spec, known = ModelSpec.read(folder), LayerTimes(layers=(1.0, 1.0, 1.0, 1.0, 4.0))
    measured: list[StageWork] = []

    def measure(engine: EngineSettings, spec: ModelSpec, rank: TensorRank, work: StageWork) -> LayerTimes:
        measured.append(work)
        return known

    monkeypatch.setattr(division, "measured_times", measure)
    engine = settings(folder, predictor_file=str(tmp_path / "kept" / "prefill.json"))

    def start(engine: EngineSettings = engine, standing: tuple[int, ...] = ()) -> LayerDivision:
        return LayerDivision.of(engine, SHAPE, spec, WORK, standing)

    assert counts(start()) == counts(start()) == [4, 1]
    assert measured == [WORK]
    start(replace(engine, threads=2))
    assert len(measured) == 2, "of another number of threads"
    first = start()
    first.measured([4.0, 7.5])
    assert counts(start()) == [4, 1], "the last layer is one"
    start().measured([8.0, 3.0])
    assert counts(start()) == [3, 2]
    assert counts(start(standing=(4, 1))) == [3, 2], "so much better that those that stand are loaded anew"
    unmeasured = start(replace(engine, calibrate_s=0.0, predictor_file=""))
    assert unmeasured.times == WORK.estimate(spec)


def test_a_setting_divides_and_nothing_is_measured(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    folder = reference_folders.write(tmp_path, "llama", layers=5)
    spec = ModelSpec.read(folder)
    monkeypatch.setattr(division, "measured_times", None)
    divided = LayerDivision.of(settings(folder), replace(SHAPE, stage_layers=(1, 4)), spec, WORK, (2, 3))
    assert counts(divided) == [1, 4]
    with caplog.at_level("INFO"):
        divided.measured([1.0, 4.0])
    assert "stage_layers = [2, 3] would let the slowest take 25% less" in caplog.text
    with pytest.raises(InvalidInput, match="stages = 6, and the model has 5 layers"):
        LayerDivision.of(settings(folder), StageSettings(stages=6), spec, WORK, ())


def first(name: str, group: str, started_ms: int, *layers: int) -> pb.Instance:
    return pb.Instance(
        id=name, service="prefill", started_ms=started_ms, stage=pb.StagePart(group=group, division=layers)
    )


def test_the_newest_of_a_group_says_how_layers_are_divided() -> None:
    instances = [
        first("a", "g", 1, 2, 3),
        first("b", "g", 2, 4, 1),
        first("c", "h", 3, 5),
        first("d", "g", 4),
    ]
    assert said_by(instances, "g") == (4, 1)
    assert said_by(instances, "other") == ()


async def test_a_stage_waits_until_the_first_one_says_it(caplog: Any) -> None:
    instances: list[pb.Instance] = []
    changed = asyncio.Condition()

    async def until_changed() -> None:
        async with changed:
            await changed.wait()

    directory: Any = SimpleNamespace(instances=lambda service, ready: instances, changed=until_changed)

    async def say(*layers: int) -> None:
        await asyncio.sleep(0)
        instances.append(first(f"p{len(instances)}", SHAPE.stage_group, len(instances), *layers))
        async with changed:
            changed.notify_all()
        await asyncio.sleep(0)

    waiting = asyncio.create_task(first_stages_division(directory, "prefill", SHAPE))
    await say(1, 2, 2)
    assert not waiting.done()
    assert "stages = 2 here, and the first stage of group 'stages' has 3" in caplog.text
    await say(2, 3)
    assert await waiting == (2, 3)
    waiting = asyncio.create_task(first_stages_division(directory, "prefill", SHAPE, but=(2, 3)))
    await say(2, 3)
    assert not waiting.done()
    await say(3, 2)
    assert await waiting == (3, 2)
