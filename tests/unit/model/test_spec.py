"""What is read from folders, what is refused and with which words, and what a fingerprint covers."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvcommons.backend.choice import choose
from kvcommons.errors import InvalidInput, ModelNotFound
from kvcommons.model.slices import Model
from kvcommons.model.spec import ModelSpec, fingerprint, model_info, random_fingerprint, resolve_folder
from kvcommons.model.synthetic import random_config, write_random_folder

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' are not served; llama, mistral"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification is not served",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "change with the length of the text"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope' is not served"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "'mrope' is not served; linear, llama3 and yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a positive number, not None"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"head_dim": 7}, "4 query heads of 7"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3}, "layer_types must name"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "each of 3 layers"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        (
            {
                "model_type": "mistral",
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            "layers differ in layer_types",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_a_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        ModelSpec.of(CONFIG | changes)
    assert caught.value.param == "model"


ODD_VALUES: list[Any] = [
    None, -1, 0, 3, True, 1 << 31, 10**400, -0.5, math.nan, math.inf, 1e308, "", "x", [], [1], {}, {"a": {}},
    {"rope_type": "yarn", "factor": 0},
    {"rope_type": "yarn", "factor": 2, "mscale": "x", "mscale_all_dim": 1},
    {"rope_type": "linear", "factor": math.inf},
    {"rope_type": "linear", "factor": 2, "original_max_position_embeddings": "x"},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1},
    {"rope_type": ["x"]},
]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_whatever_a_config_has_is_read_or_refused(family: str) -> None:
    """Never an exception of another kind, which would have the service started again and again."""
    names = [*CONFIG, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window"]
    names += ["layer_types", "max_window_layers", "original_max_position_embeddings", "partial_rotary_factor"]
    accepted = []
    for name, value in itertools.product(names, ODD_VALUES):
        config = {
            **CONFIG,
            "model_type": family,
            "architectures": None,
            "use_sliding_window": True,
            name: value,
        }
        with contextlib.suppress(InvalidInput):
            spec = ModelSpec.of(config)
            accepted.append(model_info("odd", spec, bytes(32), "float32", 16))
    assert all(info.kv_heads > 0 and info.head_dim > 0 and info.context_window > 0 for info in accepted)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8}, (None, None, None)),
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True},
            (None, 8, 8),
        ),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        (
            {
                "model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 8, None),
        ),
    ],
)  # fmt: skip
def test_sliding_windows_are_read_as_transformers_does(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelSpec.of(CONFIG | changes).windows == windows


@pytest.mark.parametrize(
    ("scaling", "window"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 256),
        (
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
                "original_max_position_embeddings": 32,
            },
            256,
        ),
    ],
)  # fmt: skip
def test_the_context_window_counts_the_scaling(scaling: dict[str, Any] | None, window: int) -> None:
    assert ModelSpec.of(CONFIG | {"rope_scaling": scaling}).context_window == window


def test_frequencies_are_float64() -> None:
    spec = ModelSpec.of(CONFIG | {"rope_theta": 1e6})
    assert spec.rotary.frequencies == tuple(1e6 ** (-2 * i / 8) for i in range(4))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        ModelSpec.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInput, match="cannot be read"):
        ModelSpec.read(tmp_path)
    with pytest.raises(ModelNotFound, match="no model folder"):
        resolve_folder("/no/such/folder")
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match=r"pytorch_model\.bin.*run any code.*convert it to safetensors"):
        Model.load(tmp_path)
    with pytest.raises(InvalidInput, match="pickle"):
        fingerprint(tmp_path, ModelSpec.read(tmp_path), "bfloat16", 64)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    write_random_folder(tmp_path, CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}})
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('the folder ran its code')")
    assert Model.load(tmp_path).spec.family == "llama"


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other/model.safetensors"}}))
    with pytest.raises(InvalidInput, match="no safetensors file beside it"):
        Model.load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(InvalidInput, match="download it again"):
        Model.load(tmp_path)


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    write_random_folder(tmp_path, CONFIG)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if "1.mlp.up" not in name}, path)
    with pytest.raises(InvalidInput, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        Model.load(tmp_path)
    save_file(tensors | {"lm_head.weight": torch.zeros(299, 32)}, path)
    with pytest.raises(InvalidInput, match=r"shape \[299, 32\], its config says \[300, 32\]"):
        Model.load(tmp_path)
    save_file(tensors | {"lm_head.weight": torch.zeros(300, 32, dtype=torch.int8)}, path)
    with pytest.raises(InvalidInput, match="int8"):
        Model.load(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidInput, match="download it again"):
        Model.load(tmp_path)


def test_settings_that_are_not_served_are_refused(tmp_path: Path) -> None:
    write_random_folder(tmp_path, CONFIG)
    with pytest.raises(InvalidInput, match="float16") as caught:
        Model.load(tmp_path, dtype="float16")
    assert caught.value.param == "dtype"
    with pytest.raises(InvalidInput, match="nonsense") as caught:
        choose("nonsense")
    assert caught.value.param == "device"


def test_a_fingerprint_covers_weights_config_dtype_and_block_size(tmp_path: Path) -> None:
    def identity(dtype: str = "float32", block_tokens: int = 16) -> bytes:
        return fingerprint(tmp_path, ModelSpec.read(tmp_path), dtype, block_tokens)

    write_random_folder(tmp_path, CONFIG)
    first = identity()
    assert len(first) == 32
    assert len({first, identity("bfloat16"), identity(block_tokens=64)}) == 3
    config = json.loads((tmp_path / "config.json").read_text())
    for change, same in (
        ({"transformers_version": "9", "_name_or_path": "x"}, True),
        ({"rms_norm_eps": 1e-4}, False),
        ({"rope_theta": 1e5}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert (identity() == first) == same
    (tmp_path / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert identity() == first
    write_random_folder(tmp_path, CONFIG, seed=1)
    assert identity() != first


def test_fingerprints_are_pinned() -> None:
    """Other bytes would make KV that is stored already useless."""
    spec = ModelSpec.of(CONFIG)
    identity = random_fingerprint(spec, seed=1, init_range=0.05, dtype="bfloat16", block_tokens=64)
    assert identity.hex() == "f4ae9ec0d98c6c0a9bc5636dd7cc8b297234c40c07b76cbccdf30f050c0f05b4"


def test_hub_ids_are_found_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--maker--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    code = (
        "from kvcommons.errors import ModelNotFound\nfrom kvcommons.model.spec import resolve_folder\n"
        "print(resolve_folder('maker/model'))\n"
        "try: resolve_folder('maker/other')\nexcept ModelNotFound as error: print(error.message)"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    found, missing = done.stdout.split("\n", 1)
    assert found == str(snapshot)
    assert missing.startswith("maker/other is no folder here, and the hub's cache on this machine does not")


def test_model_info_is_what_services_announce() -> None:
    spec = ModelSpec.of(CONFIG)
    info = model_info("name", spec, b"f" * 32, "float32", 16)
    assert (info.layers, info.kv_heads, info.query_heads, info.head_dim) == (3, 2, 4, 8)
    assert (info.vocab_size, info.context_window, info.block_tokens, info.kv_dtype) == (
        300,
        256,
        16,
        "float32",
    )


def test_a_random_folder_is_the_random_model(tmp_path: Path) -> None:
    spec = write_random_folder(tmp_path / "a", CONFIG, seed=3, init_range=0.1, dtype="float32")
    write_random_folder(tmp_path / "b", CONFIG, seed=3, init_range=0.1, dtype="float32")
    files = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    tokens, rows = torch.arange(4), range(4)
    attention = torch.ones(4, 4, 8)
    logits = []
    for model in (
        Model.load(tmp_path / "a", dtype="float32"),
        Model.random(spec, seed=3, init_range=0.1, dtype="float32"),
        Model.random(spec, seed=4, init_range=0.1, dtype="float32"),
    ):
        state = model.begin(tokens, torch.arange(4))
        for layer in range(2):
            state = model.advance(layer, state, attention)
        logits.append(model.end(state, attention, rows))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    marks = {"init_range": 0.1, "dtype": "float32", "block_tokens": 16}
    assert random_fingerprint(spec, seed=3, **marks) != random_fingerprint(spec, seed=4, **marks)


def test_the_benchmark_model_has_the_size_in_its_name() -> None:
    from kvcommons.model.weights import tensor_shapes

    shapes = tensor_shapes(ModelSpec.of(random_config("246m")))
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert round(total / 1e6) == 246
    with pytest.raises(InvalidInput, match="there are 246m"):
        random_config("1b")
