"""Models of a range of layers: one behind the other they are the whole model, and which layers each has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcommons.backend.memory import BlockMemory
from kvcommons.errors import InvalidInput
from kvcommons.model.layer_ranges import LayerTimes, ranges_between, ranges_of
from kvcommons.model.slices import Model, State
from kvcommons.model.spec import ModelSpec
from kvcommons.model.synthetic import random_config
from kvcommons.rblock.layout import Layout
from tests.unit.model import reference_folders
from tests.unit.model.test_exactness import check, prompts, run

# Families of any number of layers; the others' layers differ by name.
DEEPER = sorted(set(reference_folders.KINDS) - {"qwen3-sliding-biased"})


class Chain:
    """Models of consecutive layers, used as one."""

    def __init__(self, folder: Path, ranges: Sequence[range]) -> None:
        self._models = [Model.load(folder, dtype="float32", layers=layers) for layers in ranges]
        first = self._models[0]
        self.spec, self.dtype, self.backend, self.scale = first.spec, first.dtype, first.backend, first.scale
        self.window = first.window

    def begin(self, tokens: Tensor, positions: Tensor) -> State:
        return self._models[0].begin(tokens, positions)

    def advance(self, layer: int, state: State, attention: Tensor) -> State:
        here = next(model for model in self._models if layer in model.layers)
        if layer < here.layers[-1]:
            return here.advance(layer, state, attention)
        following = next(model for model in self._models if layer + 1 in model.layers)
        return following.enter(here.leave(state, attention), state.positions)

    def end(self, state: State, attention: Tensor, rows: Sequence[int]) -> Tensor:
        return self._models[-1].end(state, attention, rows)


def check_chain(folder: Path, ranges: Sequence[range]) -> None:
    chain: Any = Chain(folder, ranges)
    for sequence, prompt in zip(run(chain, chunk_tokens=20, split=3), prompts(), strict=True):
        check(folder, sequence, len(prompt))


@pytest.mark.parametrize("kind", sorted(reference_folders.KINDS))
def test_a_chain_of_ranges_equals_transformers(tmp_path: Path, kind: str) -> None:
    folder = reference_folders.write(tmp_path, kind)
    check_chain(folder, [range(1), range(1, 3)])
    check_chain(folder, [range(1), range(1, 2), range(2, 3)])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["llama-tied-biased", "mistral-sliding", "qwen2-sliding", "qwen3"])
def test_one_to_four_stages_equal_transformers(tmp_path: Path, kind: str, stages: int) -> None:
    folder = reference_folders.write(tmp_path, kind, layers=5)
    times = LayerTimes.estimate(ModelSpec.read(folder), rows=20, sampled=1)
    check_chain(folder, times.divide(stages))


def test_a_chain_gives_the_whole_models_logits_to_the_bit(tmp_path: Path) -> None:
    folder = reference_folders.write(tmp_path, "llama", layers=4)
    whole = run(Model.load(folder, dtype="float32"), chunk_tokens=20, split=None)
    chain: Any = Chain(folder, [range(1), range(1, 3), range(3, 4)])
    for one, other in zip(whole, run(chain, chunk_tokens=20, split=None), strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize(
    ("kind", "layers", "named"),
    [
        ("llama", range(1), ("model.embed_tokens.", "model.layers.0.")),
        ("llama", range(1, 2), ("model.layers.1.",)),
        ("llama", range(2, 3), ("model.layers.2.", "model.norm.", "lm_head.")),
        ("qwen3", range(2, 3), ("model.layers.2.", "model.norm.", "model.embed_tokens.")),
    ],
)
def test_a_range_reads_its_own_weights_only(
    tmp_path: Path, kind: str, layers: range, named: tuple[str, ...]
) -> None:
    folder = reference_folders.write(tmp_path, kind)
    path = folder / "model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if name.startswith(named)}, path)
    model = Model.load(folder, dtype="float32", layers=layers)
    assert model.layers == layers
    assert (model.first, model.last) == (layers.start == 0, layers.stop == 3)
    with pytest.raises(InvalidInput, match="lacks the tensor"):
        Model.load(folder, dtype="float32")


def test_memory_of_a_range_goes_by_the_models_layer_numbers() -> None:
    layout = Layout(layers=8, kv_heads=1, block_tokens=2, head_dim=4, kv_dtype="float32", query_heads=1)
    memory = BlockMemory(layout, 3, layers=range(5, 7))
    assert memory.tensor.shape[0] == 2
    memory.layer(6)[1] = 7.0
    (seen,) = memory.read_buffers(6, [1])
    assert torch.frombuffer(seen, dtype=torch.float32).eq(7.0).all()
    with memory.write_buffers(5, [2]) as (into,):
        into[:] = seen
    assert memory.layer(5)[2].eq(7.0).all()
    for elsewhere in (4, 7):
        with pytest.raises(ValueError, match="is not in range"):
            memory.layer(elsewhere)
        with pytest.raises(IndexError):
            memory.read_buffers(elsewhere, [0])


def test_thirty_layers_over_four_stages() -> None:
    ranges = LayerTimes(layers=(1.0,) * 30).divide(4)
    assert sorted(map(len, ranges)) == [7, 7, 8, 8]
    assert ranges[0].start == 0
    assert ranges[-1].stop == 30
    assert all(one.stop == other.start for one, other in itertools.pairwise(ranges))


def test_a_large_head_counts() -> None:
    times = LayerTimes(layers=(1.0,) * 12, head=4.0)
    ranges = times.divide(4)
    assert sorted(len(one) for one in ranges[:3]) == [3, 4, 4]
    assert len(ranges[3]) == 1
    assert max(map(times.of, ranges)) == 5.0


def test_the_head_of_generating_rows_is_larger_than_a_prompts() -> None:
    spec = ModelSpec.of(random_config("246m"))
    prompt = LayerTimes.estimate(spec, rows=512, sampled=1)
    tokens = LayerTimes.estimate(spec, rows=16, sampled=16)
    assert [len(one) for one in prompt.divide(4)] == [4, 4, 4, 4]
    assert len(tokens.divide(4)[-1]) < 4


def test_no_division_is_better() -> None:
    draw = random.Random(1)
    for _ in range(60):
        count = draw.randrange(1, 9)
        times = LayerTimes(
            layers=tuple(draw.choice([1.0, 2.0, 5.0, draw.random()]) for _ in range(count)),
            embedding=draw.choice([0.0, 1.5]),
            head=draw.choice([0.0, 3.0]),
        )
        for stages in range(1, count + 1):
            slowest = max(map(times.of, times.divide(stages)))
            others = [
                max(map(times.of, ranges_between([0, *borders, count])))
                for borders in itertools.combinations(range(1, count), stages - 1)
            ]
            assert slowest == pytest.approx(min(others))


@pytest.mark.parametrize("stages", [0, 4])
def test_a_stage_without_layers_is_refused(stages: int) -> None:
    with pytest.raises(InvalidInput, match=f"stages = {stages}, and the model has 3 layers") as refused:
        LayerTimes(layers=(1.0,) * 3).divide(stages)
    assert refused.value.param == "stages"


def test_layers_may_be_named() -> None:
    assert ranges_of([2, 1], 3) == (range(2), range(2, 3))
    for counts in ([2, 2], [3, 0], [2]):
        with pytest.raises(InvalidInput, match="stage_layers") as refused:
            ranges_of(counts, 3)
        assert refused.value.param == "stage_layers"
    with pytest.raises(InvalidInput, match="stages = 4"):
        ranges_of([1, 1, 1, 0], 3)


def test_what_stages_took_says_how_to_divide_better() -> None:
    uneven, alike = [range(4), range(4, 8), range(8, 12), range(12, 16)], LayerTimes(layers=(1.0,) * 16)
    times = alike.corrected(uneven, [4.0, 4.0, 4.0, 8.0])
    better = times.divide(4)
    assert [len(layers) for layers in better][3] == 3
    assert times.gain(uneven, better) == pytest.approx(1 - 6 / 8)
    assert [times.of(layers) for layers in uneven] == pytest.approx([3.2, 3.2, 3.2, 6.4])
    nearly = alike.corrected(uneven, [4.0, 4.0, 4.0, 4.1])
    assert nearly.gain(uneven, nearly.divide(4)) == pytest.approx(0.0)
    for unknown in ([0.0] * 4, [1.0, 2.0, 3.0, 0.0]):
        assert alike.corrected(uneven, unknown) == alike


def test_a_correction_has_the_embedding_and_the_head_with_it() -> None:
    times = LayerTimes(layers=(1.0,) * 4, embedding=1.0, head=2.0)
    corrected = times.corrected([range(2), range(2, 4)], [3.0, 8.0])
    assert corrected.of(range(2)) / corrected.of(range(2, 4)) == pytest.approx(3 / 8)
    assert corrected.head / times.head == pytest.approx(corrected.layers[3] / times.layers[3])


def test_what_stands_stays_where_another_division_is_hardly_better() -> None:
    times = LayerTimes(layers=(1.0,) * 30, head=0.2)
    assert [len(one) for one in times.division(4, (8, 7, 8, 7))] == [8, 7, 8, 7]
    assert times.division(4, (9, 7, 7, 7)) == times.divide(4)
    for other in ((15, 15), (8, 7, 7, 7), ()):
        assert times.division(4, other) == times.divide(4)


def test_of_a_prompts_last_layer_little_is_needed() -> None:
    spec = ModelSpec.of(random_config("7m"))
    prompt = LayerTimes.estimate(spec, rows=512, sampled=1)
    assert prompt.layers[-1] < 0.25 * prompt.layers[0]
    tokens = LayerTimes.estimate(spec, rows=8, sampled=8)
    assert len(set(tokens.layers)) == 1
