"""Layers that go at once compute what they compute one by one, to the bit: tokens, logits, and KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcommons.backend.choice import choose
from kvcommons.engine.core import Core, make_core
from kvcommons.engine.executor import Composer
from kvcommons.engine.iteration import STRETCH
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, Sequence
from kvcommons.holder.budget import AttentionBudget
from kvcommons.model.sampling import SamplingParams
from kvcommons.model.slices import Model
from kvcommons.model.spec import ModelSpec, model_info
from kvcommons.rblock.identity import IdentityChain
from tests.unit.backend.kernels import needs_compiler

pytestmark = needs_compiler
BLOCK, LAYERS = 16, 2 * STRETCH + 2
CONFIG: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA = CONFIG | {"model_type": "llama"}
BIASED = CONFIG | {"model_type": "qwen2"}
WINDOWED = CONFIG | {"model_type": "mistral", "sliding_window": 20}
NORMED = CONFIG | {"model_type": "qwen3"}


def core_of(config: dict[str, Any], dtype: str, kv_dtype: str | None = None) -> Core:
    spec = ModelSpec.of(config)
    model = Model.random(spec, seed=1, init_range=0.2, dtype=dtype)
    info = model_info("tiny", spec, bytes(32), kv_dtype or dtype, BLOCK)
    core = make_core(model, info, capacity_tokens=512)
    core.memory.tensor.copy_(
        torch.randn(core.memory.tensor.shape, generator=torch.Generator().manual_seed(2))
    )
    return core


def sequences(core: Core, *lengths: int) -> list[Sequence]:
    made = []
    for key, length in enumerate(lengths):
        request = Request(
            request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(range(length)),
            prompt_tokens=length, max_position=200, sampling=SamplingParams(logprobs=True, top_logprobs=5),
            stop_token_ids=frozenset(), store_control="", store_data="", matched_blocks=0, no_reuse=False,
        )  # fmt: skip
        chain = IdentityChain(bytes(32), bytes(32), BLOCK)
        sequence = Sequence(key=key, request=request, block_tokens=BLOCK, chain=chain)
        blocks = core.allocator.allocate(length // BLOCK + 1)
        sequence.append_run(LocalRun(first_block=0, blocks=blocks))
        sequence.start(7)
        made.append(sequence)
    return made


def outcome(core: Core, *, at_once: bool) -> tuple[list[Any], torch.Tensor, list[int]]:
    """What an iteration of three sequences samples, the KV after it, and in which pieces it went through the
    model: layers before each pause."""
    if not at_once:
        core.model._forward = None
    remote = RemoteAttention(core.layout, core.backend, AttentionBudget(1.0))
    composer = Composer(core, remote, attend_deadline_s=1.0)
    some = sequences(core, 5, 33, 70)
    drafts = {some[1].key: [3, 4]}
    iteration = composer.iteration(composer.batch(None, some, drafts))
    pauses: list[int] = []
    with torch.inference_mode():
        tokens = iteration.run(lambda: pauses.append(1))
    assert not iteration.failures
    assert iteration.timing.here_s > 0
    assert iteration.timing.slices_s > 0
    return tokens[0], core.memory.tensor.clone(), pauses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config", [LLAMA, BIASED, WINDOWED, NORMED], ids=["llama", "biased", "windowed", "normed"]
)
def test_layers_at_once_and_one_by_one_are_the_same_to_the_bit(config: dict[str, Any], dtype: str) -> None:
    tokens, kv, pauses = outcome(core_of(config, dtype), at_once=True)
    others, other_kv, more = outcome(core_of(config, dtype), at_once=False)
    assert tokens == others
    assert torch.equal(kv, other_kv)
    # The last layer is by itself: its attention ends the model.
    assert (len(pauses), len(more)) == (-(-(LAYERS - 1) // STRETCH), LAYERS - 1)


def test_rows_whose_kv_is_of_another_type_go_one_by_one() -> None:
    tokens, _, pauses = outcome(core_of(LLAMA, "bfloat16", "float32"), at_once=True)
    assert len(tokens) == 5
    assert len(pauses) == LAYERS - 1


def test_without_the_kernel_layers_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMMONS_KERNEL", "torch")
    spec = ModelSpec.of(LLAMA)
    assert Model.random(spec, seed=1, init_range=0.2, dtype="float32", backend=choose())._forward is None
