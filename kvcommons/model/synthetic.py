"""Model folders with random weights: real input for benchmarks and tests without a download."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import save_file
from torch import Tensor

from kvcommons.errors import InvalidInput
from kvcommons.model.spec import ModelSpec
from kvcommons.model.synthetic_tokenizer import EOS_ID, make_tokenizer, write_tokenizer
from kvcommons.model.weights import random_source, tensor_shapes, torch_dtype

# Configs by the names of `kvcommons bench --random-model`; 246m is the one that docs compare engines with.
_SIZES: dict[str, dict[str, int]] = {
    "246m": {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    # A KV head for each query head, and a long window: much KV for little computing.
    "34m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "vocab_size": 8000,
        "max_position_embeddings": 32768,
    },
    "7m": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "vocab_size": 8000,
        "max_position_embeddings": 8192,
    },
    # Of Llama 3's shape: for GPUs, 16 GB.
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}


def random_config(name: str) -> dict[str, Any]:
    """The config.json of a Llama of a known size. Raises InvalidInput for another name."""
    if name not in _SIZES:
        raise InvalidInput(f"there is no random model {name!r}; there are {', '.join(_SIZES)}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_SIZES[name],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "eos_token_id": EOS_ID,
    }


def write_random_folder(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    init_range: float = 0.05,
    dtype: str = "bfloat16",
    tokenizer: tokenizers.Tokenizer | None = None,
) -> ModelSpec:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json (ChatML).

    The same bytes for the same arguments. Without a `tokenizer` one of config's vocab_size is made.
    """
    spec, kind = ModelSpec.of(config), torch_dtype(dtype)
    source = random_source(seed, init_range)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = tensor_shapes(spec)

    def made(name: str) -> Tensor:
        return source(name, shapes[name]).to(kind)

    # A tensor has a seed of its own, and is drawn by one thread.
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        tensors = dict(zip(shapes, pool.map(made, shapes), strict=True))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n", encoding="utf-8"
    )
    write_tokenizer(folder, tokenizer or make_tokenizer(spec.vocab_size))
    return spec
