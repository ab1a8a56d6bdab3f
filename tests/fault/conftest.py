"""Two of everything that may be two, shared by the tests that kill one of them and wait for its return."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommons.model.synthetic import write_random_folder
from tests.system.stack import Stack

TWINS = {"prefill": 2, "decode": 2, "attention_pool": 2, "ledger": 2}
# Random weights of a size at which a token takes milliseconds, so that a stream has a middle to be hit in.
SLOW_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
BLOCK_TOKENS = 16


def slow_tables(capacity_tokens: int = 8192, **tables: dict[str, object]) -> dict[str, dict[str, object]]:
    """Settings of a stack that serves the slow model; `tables` go over them. Instances do not measure for two
    seconds each at their start what iterations take: they learn it as they go. Nothing is drafted: tests give
    the same answer again and again, which would be over before anybody has killed anything."""
    shared = {"dtype": "float32", "block_tokens": BLOCK_TOKENS, "capacity_tokens": capacity_tokens}
    measured = {"calibrate_s": 0.0}
    decode = shared | measured | {"max_draft_tokens": 0}
    services = {"prefill": shared | measured, "decode": decode, "attention_pool": shared}
    return {name: {**known, **tables.get(name, {})} for name, known in services.items()} | {
        name: table for name, table in tables.items() if name not in services
    }


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "slow"
    write_random_folder(folder, SLOW_MODEL, init_range=0.06, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, slow_model: Path) -> Iterator[Stack]:
    shared = Stack(tmp_path_factory.mktemp("twins"), tables=slow_tables(), model=str(slow_model), **TWINS)
    with shared:
        yield shared
    shared.assert_gone()
