"""A model small enough to be made anew in each test, in float32."""

from __future__ import annotations

from kvcommons.engine.core import Core, make_core
from kvcommons.model.slices import Model
from kvcommons.model.spec import ModelSpec, model_info


def tiny_core(*, layers: int, block_tokens: int = 16, identity: bytes = bytes(32)) -> Core:
    """With room for 64 tokens; `identity` is what the model goes by (32 bytes)."""
    spec = ModelSpec.of(
        {
            "model_type": "llama", "vocab_size": 99, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": layers, "num_attention_heads": 2, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
        }
    )  # fmt: skip
    model = Model.random(spec, seed=1, init_range=0.08, dtype="float32")
    return make_core(model, model_info("tiny", spec, identity, "float32", block_tokens), capacity_tokens=64)
