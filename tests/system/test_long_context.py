"""One sequence over many holders: its tokens are those of a single large instance (Infinite-LLM, section
6.3)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcommons.errors import ContextLengthExceeded
from kvcommons.model.synthetic import write_random_folder
from tests.exactness import MARGIN, assert_greedy, logits_of
from tests.system.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HOLDER_TOKENS = 4096
ANSWER = 24
# Large enough that its answers do not repeat one token, small enough to read 60,000 tokens in a minute.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "max_position_embeddings": 65536,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "long"
    write_random_folder(folder, MODEL, dtype="float32", init_range=0.08)
    return folder


def tables(capacity_tokens: int, **decode: Any) -> dict[str, dict[str, Any]]:
    shared = {"dtype": "float32", "block_tokens": 64, "capacity_tokens": capacity_tokens, "threads": 1}
    return {
        "prefill": {**shared, "push_deadline_s": 30.0},
        "decode": {**shared, "attend_deadline_s": 30.0, **decode},
        "attention_pool": shared,
    }


def answer(stack: Stack, tokens: int) -> list[tuple[str, float]]:
    """Of each token that follows a prompt of so many: it, and how far it was ahead of the next best."""
    draw = random.Random(1)
    body = {
        "model": "long",
        "prompt": [draw.randrange(3, 2000) for _ in range(tokens)],
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
    }
    (choice,) = stack.client.post("/v1/completions", body)["choices"]
    reported = choice["logprobs"]
    bests = [sorted(top.values(), reverse=True) for top in reported["top_logprobs"]]
    # Tokens of the same text share a place: where only one is left, nothing says how far ahead it was.
    leads = [best[0] - best[1] if len(best) > 1 else 0.0 for best in bests]
    return list(zip(reported["tokens"], leads, strict=True))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[int, list[tuple[str, float]]]:
    """What a single large instance answers to prompts of these lengths."""
    folder = tmp_path_factory.mktemp("large")
    settings = tables(65536, placement="local")
    with Stack(folder, tables=settings, model=str(model)) as stack:
        return {tokens: answer(stack, tokens) for tokens in (30_000, 60_000)}


@pytest.mark.parametrize(
    ("tokens", "pools", "decode"),
    [
        (30_000, 7, {"placement": "overflow"}),
        (30_000, 7, {"placement": "grow", "holder_tokens": HOLDER_TOKENS}),
        (60_000, 15, {"placement": "overflow"}),
    ],
)
def test_a_sequence_larger_than_any_instance(
    tmp_path: Path,
    model: Path,
    large: dict[int, list[tuple[str, float]]],
    tokens: int,
    pools: int,
    decode: dict[str, Any],
) -> None:
    """With room for 4,096 tokens at prefill, at decode and at each pool."""
    settings = tables(HOLDER_TOKENS, **decode)
    with Stack(tmp_path / "stack", tables=settings, model=str(model), attention_pool=pools) as stack:
        got = answer(stack, tokens)
        stack.assert_no_block_is_held()
    assert len(got) == ANSWER
    for (token, _), (expected, ahead) in zip(got, large[tokens], strict=True):
        if token != expected:
            assert ahead < MARGIN, "the tokens part where the best one is far ahead"
            break


def test_a_document_over_several_instances_is_what_one_chats_on(tmp_path: Path, model: Path) -> None:
    """Computed part by part with KV in three places, and refused where all of them together are too small."""
    settings = tables(HOLDER_TOKENS, placement="overflow") | {"router": {"document_part_s": 0.5}}
    path = "/v1/sessions/long/prefill"
    with Stack(tmp_path / "stack", tables=settings, model=str(model), attention_pool=2) as stack:
        with pytest.raises(ContextLengthExceeded, match=r"are missing, which is \d+ tokens"):
            stack.client.post(path, {"content": document(800)})
        stack.client.post(path, {"content": document(360)})
        *states, last = stack.client.events(f"{path}?stream=true")
        assert (last["status"], last["computed_tokens"]) == ("completed", last["tokens"])
        assert last["tokens"] > 2 * HOLDER_TOKENS
        assert len({state["computed_tokens"] for state in states}) > 2, "in several parts"
        turn = stack.client.say("Who likes blue?", "long", max_tokens=ANSWER, temperature=0, ignore_eos=True)
        assert turn.cached_tokens > 0.9 * turn.prompt_tokens
        tokens = stack.client.session("long")["token_ids"]
        stack.assert_no_block_is_held()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    prompt, made = tokens[: turn.prompt_tokens], tokens[turn.prompt_tokens :]
    assert_greedy(made[:ANSWER], logits_of(reference, prompt, made[:ANSWER]))


def document(sentences: int) -> str:
    return " ".join(f"My friend number {i} likes the colour blue." for i in range(sentences))
