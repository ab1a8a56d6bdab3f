"""Small random models of each family as `transformers` writes them, and its logits for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 5e4,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

# Family and what differs from SMALL.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": (
        "Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    ),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 0.8, "beta_fast": 16.0}}),
    "llama-yarn-mscale": (
        "Llama", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-sliding": ("Mistral", {"sliding_window": 21}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-sliding-biased": (
        "Qwen3",
        {
            "head_dim": 32, "attention_bias": True, "use_sliding_window": True, "sliding_window": 30,
            "layer_types": SLIDING,
        },
    ),
}  # fmt: skip


def write(folder: Path, kind: str, *, max_shard_size: str = "1GB", layers: int = 3) -> Path:
    """Random weights, biases and norms included (transformers leaves those at 0 and 1)."""
    import transformers

    family, changes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**(SMALL | {"num_hidden_layers": layers} | changes))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def old_style(folder: Path) -> None:
    """Rewrites config.json with `rope_theta` and `rope_scaling`, as folders had them before
    rope_parameters.
    """
    edit_config(folder, _to_old_style)


def _to_old_style(config: dict[str, Any]) -> None:
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **scaling}


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def reference_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """[len(tokens), vocab] of `transformers` in float32, in one pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
