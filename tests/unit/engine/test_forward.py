"""Layers that go at once compute what they compute one by one, to the bit: tokens, logits, and KV."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import pytest
import torch

from kvcommons.backend.choice import choose
from kvcommons.backend.interface import Backend
from kvcommons.engine.chunk_rows import InnerChunk
from kvcommons.engine.core import Core, make_core
from kvcommons.engine.executor import Composer
from kvcommons.engine.iteration import STRETCH, Iteration
from kvcommons.engine.remote.attention import RemoteAttention
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, Sequence
from kvcommons.holder.budget import AttentionBudget
from kvcommons.model.sampling import SamplingParams
from kvcommons.model.slices import Model
from kvcommons.model.spec import ModelSpec, model_info
from kvcommons.rblock.identity import IdentityChain
from tests.interpreted import interpreted, needs_triton
from tests.machine import scaled
from tests.unit.backend.kernels import needs_compiler

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
KINDS = {"llama": LLAMA, "biased": BIASED, "windowed": WINDOWED, "normed": NORMED}
DTYPES = ("float32", "bfloat16")
NATIVE = [
    pytest.param(kind, dtype, LAYERS, choose, id=f"{kind}-{dtype}-native", marks=needs_compiler)
    for kind in KINDS
    for dtype in DTYPES
]
CUDA = [
    pytest.param(kind, dtype, LAYERS, lambda: choose("cuda"), id=f"{kind}-{dtype}-cuda")
    for kind in KINDS
    for dtype in DTYPES
]
# An interpreter takes a minute for each.
INTERPRETED = [
    pytest.param(
        kind,
        dtype,
        3,
        interpreted,
        id=f"{kind}-{dtype}-interpreted",
        marks=[pytest.mark.slow, pytest.mark.timeout(scaled(600)), needs_triton],
    )
    for kind, dtype in (("llama", "bfloat16"), ("windowed", "float32"))
]


def core_of(
    config: dict[str, Any], dtype: str, kv_dtype: str | None = None, backend: Backend | None = None
) -> Core:
    spec = ModelSpec.of(config)
    model = Model.random(spec, seed=1, init_range=0.2, dtype=dtype, backend=backend)
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


def outcome(core: Core, *lengths: int, at_once: bool) -> tuple[list[Any], torch.Tensor, list[int]]:
    """What an iteration of sequences of these lengths samples, one of them with two drafts, the KV after it,
    and in which pieces it went through the model: layers before each pause."""
    if not at_once:
        core.model._forward = None
    remote = RemoteAttention(core.layout, core.backend, AttentionBudget(1.0))
    composer = Composer(core, remote, attend_deadline_s=1.0)
    some = sequences(core, *lengths)
    drafts = {some[-2].key: [3, 4]}
    iteration = composer.iteration(composer.batch(None, some, drafts))
    pauses: list[int] = []
    with torch.inference_mode():
        tokens = iteration.run(lambda: pauses.append(1))
    assert not iteration.failures
    assert iteration.timing.here_s > 0
    assert iteration.timing.slices_s > 0
    for sequence in some:
        for run in sequence.runs:
            assert isinstance(run, LocalRun)
            core.allocator.release(run.blocks)
    return tokens[0], core.backend.device.fetch(core.memory.tensor).clone(), pauses


@pytest.mark.parametrize(
    ("kind", "dtype", "layers", "make"), [*NATIVE, *(CUDA if torch.cuda.is_available() else INTERPRETED)]
)
def test_layers_at_once_and_one_by_one_are_the_same_to_the_bit(
    kind: str, dtype: str, layers: int, make: Callable[[], Backend]
) -> None:
    config = KINDS[kind] | {"num_hidden_layers": layers}
    backend = make()
    together, apart = (core_of(config, dtype, backend=one) for one in (backend, make()))
    # Twice of one shape, with other sequences between: what is captured computes from what comes now.
    for lengths in ((5, 33, 70), (3, 2), (21, 150, 61)):
        tokens, kv, pauses = outcome(together, *lengths, at_once=True)
        others, other_kv, more = outcome(apart, *lengths, at_once=False)
        assert tokens == others
        assert torch.equal(kv, other_kv)
        # The last layer is by itself: its attention ends the model.
        at_once = STRETCH if backend.device.host else layers - 1
        assert (len(pauses), len(more)) == (-(-(layers - 1) // at_once), layers - 1)


def chunk_outcome(core: Core, chunks: Items[range], *, at_once: bool) -> tuple[torch.Tensor, list[int]]:
    """The KV after chunks of one prompt, one behind the other, and layers before each pause."""
    if not at_once:
        core.model._forward = None
    tokens = [(7 * at) % 97 for at in range(chunks[-1].stop)]
    blocks = core.allocator.allocate(-(-len(tokens) // BLOCK))
    pauses: list[int] = []
    for positions in chunks:
        iteration = Iteration(core, [InnerChunk(core, positions, blocks, tokens)])
        pauses.append(0)

        def pause() -> None:
            pauses[-1] += 1

        with torch.inference_mode():
            iteration.run(pause)
        assert not iteration.failures
        assert iteration.timing.here_s > 0
    core.allocator.release(blocks)
    return core.memory.tensor.clone(), pauses


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_chunk_goes_through_layers_at_once(kind: str, dtype: str) -> None:
    """Of one row, which attends like a token, of some, and of as many as go at once."""
    together, apart = core_of(KINDS[kind], dtype), core_of(KINDS[kind], dtype)
    chunks = [range(8), range(8, 9), range(9, 24), range(24, 88), range(88, 153)]
    kv, pauses = chunk_outcome(together, chunks, at_once=True)
    other_kv, more = chunk_outcome(apart, chunks, at_once=False)
    assert torch.equal(kv, other_kv)
    few = -(-(LAYERS - 1) // STRETCH)
    assert pauses == [few, few, few, few, LAYERS - 1], "of a long one a layer takes long enough"
    assert more == [LAYERS - 1] * len(chunks)


@needs_compiler
def test_a_chunk_that_nobody_wants_any_more_ends_between_two_layers() -> None:
    core = core_of(LLAMA, "float32")
    chunk = InnerChunk(core, range(8), core.allocator.allocate(1))
    iteration = Iteration(core, [chunk])
    pauses: list[int] = []

    def pause() -> None:
        pauses.append(1)
        iteration.withdraw(chunk)

    with torch.inference_mode():
        assert iteration.run(pause) == [[]]
    assert len(pauses) == 1


@needs_compiler
def test_rows_whose_kv_is_of_another_type_go_one_by_one() -> None:
    tokens, _, pauses = outcome(core_of(LLAMA, "bfloat16", "float32"), 5, 33, 70, at_once=True)
    assert len(tokens) == 5
    assert len(pauses) == LAYERS - 1


def test_without_the_kernel_layers_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMMONS_KERNEL", "torch")
    spec = ModelSpec.of(LLAMA)
    assert Model.random(spec, seed=1, init_range=0.2, dtype="float32", backend=choose())._forward is None
