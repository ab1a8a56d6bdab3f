"""The benchmark of drafts: each kind of prompt has its row, and the sessions are what they are said to be."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.agent_sessions import agent_session
from benchmarks.deepened_model import write_deepened_model
from kvcommons.errors import InvalidInput
from kvcommons.model.slices import Model
from kvcommons.model.synthetic import random_config, write_random_folder
from tests.system.bench import bench, refused


def test_a_session_repeats_its_file_with_two_changes_and_asks_for_a_third() -> None:
    for seed in range(20):
        messages = agent_session(seed)
        assert messages == agent_session(seed)
        assert messages != agent_session(seed + 1)
        assert messages[0]["role"] == "system"
        assert messages[-1]["role"] == "user"
        files = [one["content"] for one in messages if "```python\n" in one["content"]]
        assert len(files) == 3
        texts = [set(file.split("```python\n")[1].splitlines()) for file in files]
        assert all(1 <= len(before - after) <= 2 for before, after in pairwise(texts))


def test_a_deepened_model_has_layers_that_add_a_share(tmp_path: Path) -> None:
    config = random_config("7m") | {"num_hidden_layers": 2}
    model = tmp_path / "model"
    write_random_folder(model, config, dtype="float32")
    made = write_deepened_model(tmp_path, model, 3)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, made))
    assert json.loads((made / "config.json").read_text())["num_hidden_layers"] == 6
    assert (made / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    for name in ("mlp.down_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight"):
        own = before[f"model.layers.1.{name}"]
        share = 1.0 if "up" in name else 0.1
        assert torch.equal(after[f"model.layers.3.{name}"], own)
        for copy in (4, 5):
            assert torch.equal(after[f"model.layers.{copy}.{name}"], own * share)
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert Model.load(made, dtype="float32").layers == range(6)
    for times, folder in ((1, model), (2, tmp_path)):
        with pytest.raises(InvalidInput):
            write_deepened_model(tmp_path, folder, times)


def test_fewer_prompts_than_are_asked_at_once_are_refused() -> None:
    said = refused("speculation", "--batches", "1", "8", "--prompts", "4")
    assert said == "kvcommons bench: --prompts 4 are fewer than are asked at once: name 8 or more\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_draft_model_has_its_rows(tmp_path: Path) -> None:
    sizes = ("--random-model", "7m", "--deepen", "2", "--dtype", "float32", "--batches", "1")
    few = ("--cases", "1", "5", "--prompts", "2", "--answer", "16", "--rounds", "1")
    report = bench(tmp_path / "drafts.json", "speculation", *sizes, *few)
    assert [row["prompts"] for row in report["rows"]] == ["agent sessions", "noise"]
    assert "2 times its layers" in report["title"]
    assert all(row["same answers"] == 1.0 for row in report["rows"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_kind_has_its_row(tmp_path: Path) -> None:
    picture = tmp_path / "drafts.png"
    sizes = ("--random-model", "7m", "--dtype", "float32", "--batches", "1", "2")
    few = ("--prompts", "2", "--answer", "16", "--rounds", "1", "--picture", str(picture))
    report = bench(tmp_path / "drafts.json", "speculation", *sizes, *few)
    assert len(report["rows"]) == 10
    assert all(row["ratio"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in report["rows"])
    assert all(row["same answers"] == 1.0 for row in report["rows"])
    assert picture.stat().st_size > 10_000
