"""The slices over paged KV give the tokens and logits of `transformers` in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcommons.backend.choice import choose
from kvcommons.model.slices import Model
from tests.backends import attend_chunk, merge
from tests.exactness import MARGIN, assert_greedy
from tests.interpreted import interpreted, needs_triton
from tests.unit.model import reference_folders
from tests.unit.model.paged_runner import BLOCK_TOKENS, PagedRunner, Sequence_

NEW_TOKENS = 64
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(199) for _ in range(length)] for length in (75, 9)]


def check(folder: Path, sequence: Sequence_, prompt_tokens: int, new_tokens: int = NEW_TOKENS) -> None:
    """The reference's logits within the margin, and its greedy tokens."""
    reference = reference_folders.reference_logits(folder, sequence.tokens)[prompt_tokens - 1 :]
    ours = torch.stack(sequence.logits)
    assert len(ours) == new_tokens + 1
    torch.testing.assert_close(ours, reference, rtol=0, atol=MARGIN)
    assert_greedy(ours.argmax(-1).tolist(), reference)


def run(
    model: Model, *, chunk_tokens: int, split: int | None, new_tokens: int = NEW_TOKENS
) -> list[Sequence_]:
    runner = PagedRunner(model, prompts(), new_tokens, split=split)
    runner.prefill(chunk_tokens)
    runner.decode(new_tokens)
    return runner.sequences


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", sorted(reference_folders.KINDS))
def test_every_family_equals_transformers(tmp_path: Path, kind: str, device: str) -> None:
    folder = reference_folders.write(tmp_path, kind)
    model = Model.load(folder, dtype="float32", backend=choose(device))
    for chunk_tokens, split in ((512, None), (20, 3)):
        for sequence, prompt in zip(
            run(model, chunk_tokens=chunk_tokens, split=split), prompts(), strict=True
        ):
            assert sequence.tokens[: len(prompt)] == prompt
            check(folder, sequence, len(prompt))


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.parametrize("kind", ["mistral-sliding", "qwen3-sliding-biased"])
def test_the_kernels_for_gpus_equal_transformers(tmp_path: Path, kind: str) -> None:
    """A few tokens: they are interpreted."""
    folder = reference_folders.write(tmp_path, kind)
    model = Model.load(folder, dtype="float32", backend=interpreted())
    sequences = run(model, chunk_tokens=20, split=3, new_tokens=3)
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        check(folder, sequence, len(prompt), 3)


@pytest.mark.parametrize("chunk_tokens", [1, 16, 33])
@pytest.mark.parametrize("split", [None, 1, 5, 7])
def test_chunks_and_holders_do_not_show(tmp_path: Path, chunk_tokens: int, split: int | None) -> None:
    folder = reference_folders.write(tmp_path, "mistral-sliding")
    model = Model.load(folder, dtype="float32")
    for sequence, prompt in zip(run(model, chunk_tokens=chunk_tokens, split=split), prompts(), strict=True):
        check(folder, sequence, len(prompt))


@pytest.mark.parametrize("kind", ["llama", "llama-linear", "llama-llama3", "llama-yarn-factor", "qwen3"])
def test_older_folders_and_shards_are_read_alike(tmp_path: Path, kind: str) -> None:
    new = Model.load(reference_folders.write(tmp_path / "new", kind), dtype="float32")
    folder = reference_folders.write(tmp_path / "old", kind, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    reference_folders.old_style(folder)
    old = Model.load(folder, dtype="float32")
    for one, other in zip(
        run(new, chunk_tokens=64, split=None), run(old, chunk_tokens=64, split=None), strict=True
    ):
        assert one.tokens == other.tokens
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize("kind", ["llama-yarn-factor", "llama-llama3", "qwen3", "mistral-sliding"])
@pytest.mark.parametrize("shift", [48, 1_000_000])
def test_a_shifted_segment_is_met_by_a_rotated_query(tmp_path: Path, kind: str, shift: int) -> None:
    """KV stored for positions 0… counts as `shift` later; scores depend on relative positions only."""
    folder = reference_folders.write(tmp_path, kind)
    model = Model.load(folder, dtype="float32")
    tokens = [(7 * i) % 199 for i in range(80)]
    stored = 64
    runner = PagedRunner(model, [tokens[:stored], tokens[stored:]], 0, split=None)
    runner.prefill(stored)  # writes both sequences; the second one's KV is overwritten below
    history, fresh = (sequence.tables[0] for sequence in runner.sequences)
    memory = runner.memories[0]
    positions = torch.arange(stored, len(tokens)) + shift
    slots = fresh[torch.arange(16) // BLOCK_TOKENS] * BLOCK_TOKENS + torch.arange(16) % BLOCK_TOKENS
    state = model.begin(torch.tensor(tokens[stored:]), positions)
    moved = model.rotation(positions - shift)

    def attend(layer: int) -> Tensor:
        memory.write_tokens(layer, slots, state.k, state.v)
        kv, scale, window = memory.layer(layer), model.scale, model.window(layer)
        old = attend_chunk(
            model.shifted_query(state, moved), kv, history, stored,
            first_key_position=shift, query_positions=positions, scale=scale, window=window,
        )  # fmt: skip
        new = attend_chunk(
            state.q, kv, fresh, 16,
            first_key_position=stored + shift, query_positions=positions, scale=scale, window=window,
        )  # fmt: skip
        return merge([old, new]).out

    for layer in range(model.spec.layers - 1):
        state = model.advance(layer, state, attend(layer))
    logits = model.end(state, attend(model.spec.layers - 1), range(16))
    reference = reference_folders.reference_logits(folder, tokens)[stored:]
    torch.testing.assert_close(logits, reference, rtol=0, atol=1e-3)


def test_rows_of_the_last_slice_are_independent(tmp_path: Path) -> None:
    model = Model.load(reference_folders.write(tmp_path, "qwen2"), dtype="float32")
    state = model.begin(torch.arange(5), torch.arange(5))
    attention = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        model.end(state, attention, [3, 1]), model.end(state, attention, range(5))[[3, 1]]
    )


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = reference_folders.write(tmp_path, "qwen3-sliding-biased")
    (sequence, _) = run(Model.load(folder), chunk_tokens=64, split=3)
    reference = reference_folders.reference_logits(folder, sequence.tokens)[74:]
    ours = torch.stack(sequence.logits)
    assert ours.dtype == torch.float32
    distance = (ours.log_softmax(-1).exp() - reference.log_softmax(-1).exp()).abs().sum(-1) / 2
    assert distance.mean() < 0.05
