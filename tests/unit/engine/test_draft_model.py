"""A draft model samples what a model of its weights does, behind whatever came, in blocks that come back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvcommons.engine.chunk_rows import ChunkRows, logits
from kvcommons.engine.core import Core, make_core
from kvcommons.engine.drafts.choice import Depth
from kvcommons.engine.drafts.model import DraftModel
from kvcommons.engine.drafts.speculation import Speculation
from kvcommons.engine.iteration_costs import IterationWork
from kvcommons.engine.predictor import Predictor
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import Sequence
from kvcommons.model.sampling import SamplingParams, sample
from kvcommons.model.slices import Model
from kvcommons.model.spec import ModelSpec, model_info
from kvcommons.rblock.identity import IdentityChain

BLOCK, MOST, WINDOW, CHUNK = 16, 6, 256, 64
CONFIG: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": WINDOW,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA = CONFIG | {"model_type": "llama"}
WINDOWED = CONFIG | {"model_type": "mistral", "sliding_window": 20}
SAMPLINGS = {
    "greedy": SamplingParams(logprobs=True),
    "seeded": SamplingParams(temperature=1.0, top_p=0.95, seed=7, choice=1),
    "penalties": SamplingParams(
        temperature=1.0, seed=3, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3,
        min_tokens=400,
    ),
}  # fmt: skip


def core_of(config: dict[str, Any] = LLAMA, capacity_tokens: int = 1024) -> Core:
    spec = ModelSpec.of(config)
    model = Model.random(spec, seed=1, init_range=0.2, dtype="float32")
    return make_core(
        model, model_info("tiny", spec, bytes(32), "float32", BLOCK), capacity_tokens=capacity_tokens
    )


def drafting_of(core: Core, vocab_size: int = 99) -> DraftModel:
    return DraftModel(core, Predictor(), vocab_size, MOST, CHUNK)


def sequence(key: int, length: int, params: SamplingParams = SAMPLINGS["greedy"]) -> Sequence:
    """Which has had its first token; nothing of it lies in a draft model's blocks."""
    request = Request(
        request_id="r", session_id="", tenant="t", salt=bytes(32),
        tokens=tuple((key * 31 + 7 * at) % 97 for at in range(length)), prompt_tokens=length,
        max_position=WINDOW, sampling=params, stop_token_ids=frozenset({98}), store_control="",
        store_data="", matched_blocks=0, no_reuse=False,
    )  # fmt: skip
    made = Sequence(
        key=key, request=request, block_tokens=BLOCK, chain=IdentityChain(bytes(32), bytes(32), BLOCK)
    )
    made.start(5)
    return made


def expected(core: Core, one: Sequence, count: int) -> list[int]:
    """What the model samples behind a sequence's tokens: all of it computed anew for each."""
    drafts: list[int] = []
    for _ in range(count):
        tokens = [*one.tokens, *drafts]
        blocks = core.allocator.allocate(-(-len(tokens) // BLOCK))
        chunk = ChunkRows(core, tokens, range(len(tokens)), torch.tensor(blocks))
        row = logits(core, chunk, [len(tokens) - 1])
        drafts.append(sample(row, [one.sampling_row(drafts)], core.backend.device)[0].token)
        core.allocator.release(blocks)
    return drafts


def caught_up(drafting: DraftModel, *sequences: Sequence) -> None:
    for one in sequences:
        assert drafting.follow(one)
        while drafting.lags(one):
            assert drafting.has_room(one)
            drafting.catch_up(one, 0.0)
        assert drafting.ready(one)


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("config", [LLAMA, WINDOWED], ids=["llama", "windowed"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_are_what_the_model_samples(config: dict[str, Any], name: str) -> None:
    """Behind prompts of one chunk and of several, once drafts were right in part, all of them, and none, and
    once tokens came without it."""
    core, drafting = core_of(config), drafting_of(core_of(config))
    some = [sequence(key, length, SAMPLINGS[name]) for key, length in ((1, 1), (2, 33), (3, 70))]
    caught_up(drafting, *some)
    turns: list[Callable[[list[int]], list[int]]] = [
        lambda drafts: [*drafts[:2], (drafts[2] + 1) % 97],
        lambda drafts: [*drafts, 11],
        lambda drafts: [(drafts[0] + 1) % 97],
        lambda drafts: drafts[:3],  # no more of them were verified
        lambda drafts: [*drafts[:1], *range(40, 49)],  # some behind those it was not asked for
        lambda drafts: [*drafts[:1], *range(40, 80)],  # a chunk of them
    ]
    for turn in turns:
        caught_up(drafting, *some)
        drafts = drafting.draft(some, 4)
        for one in some:
            assert drafts[one.key] == expected(core, one, 4)
            for token in turn(drafts[one.key]):
                one.append(token)
            assert 0 < drafting.chance(one) < 1
    caught_up(drafting, *some)
    assert drafting.draft(some, 1) == {one.key: expected(core, one, 1) for one in some}
    for one in some:
        drafting.leave(one.key)
    assert drafting._core.allocator.in_use == 0


def test_who_has_no_room_waits_for_it_and_who_grows_beyond_it_holds_nothing() -> None:
    own = core_of(capacity_tokens=5 * BLOCK)
    drafting = drafting_of(own)
    first, second = sequence(1, 20), sequence(2, 60)
    caught_up(drafting, first)
    assert drafting.follow(second)
    assert not drafting.has_room(second)
    assert own.allocator.in_use == 2, "of the first alone"
    while drafting.ready(first):  # it grows beyond all that there is
        drafting.draft([first], 1)
        first.append(7)
        assert drafting.chance(first)
        assert drafting.follow(first)
    assert len(first.tokens) == 5 * BLOCK - MOST + 1
    assert own.allocator.in_use == 0
    assert not drafting.follow(first), "what it had is gone, and is not computed again and again"
    caught_up(drafting, second)
    drafting.leave(first.key)
    drafting.leave(second.key)
    assert own.allocator.in_use == 0


def test_a_chunk_takes_no_longer_than_it_may() -> None:
    """Of what is not known yet it has few tokens."""
    for known, steps in ((False, 4), (True, 2)):
        predictor = Predictor()
        for tokens in (1, 16, 32, 64, 128) * 20 if known else ():
            work = IterationWork.of_chunk(range(tokens))
            predictor.learn(work, 1e-3 + work.rows * 1e-4)
        drafting = DraftModel(core_of(), predictor, 99, MOST, CHUNK)
        one = sequence(1, 128)
        assert drafting.follow(one)
        assert drafting.has_room(one)
        computed = [0]
        while drafting.lags(one):
            drafting.catch_up(one, 0.02)
            computed.append(len(one.tokens) - 1 - len(drafting._missing(one)))
        assert len(computed) - 1 == steps, computed


def test_a_context_ends_before_the_draft_model_s_window() -> None:
    drafting = drafting_of(core_of())
    assert drafting.follow(sequence(1, WINDOW - MOST - 1))
    assert not drafting.follow(sequence(2, WINDOW - MOST))


def test_tokens_that_one_of_both_does_not_know() -> None:
    drafting = drafting_of(core_of(), vocab_size=5)  # the other model has five
    one = sequence(1, 20)
    caught_up(drafting, one)
    drafts = drafting.draft([one], 4)[1]
    known = [token < 5 for token in expected(core_of(), one, 4)]
    assert len(drafts) == (known.index(False) if False in known else 4)
    for came in ([99], [*drafts[:1], 99], [3, 99]):
        other = sequence(2, 20)
        caught_up(drafting, other)
        drafting.draft([other], 3)
        for token in came:
            other.append(token)
        assert drafting.chance(other) > 0
        assert not drafting.follow(other), "it has no such token"
        assert drafting.chance(other) == 0.0, "it is not asked again"
        drafting.leave(other.key)


def test_what_fails_is_given_up_and_ends_no_sequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafting = drafting_of(core_of())
    one, other = sequence(1, 20), sequence(2, 40)
    caught_up(drafting, one)
    assert drafting.follow(other)

    def fails(*_: Any) -> None:
        raise MemoryError("as a device may")

    monkeypatch.setattr(drafting._core.memory.__class__, "write_rows", fails)
    monkeypatch.setattr(drafting._core.model, "_forward", None)
    speculation = Speculation(
        Predictor(), max_draft_tokens=MOST, tbt_objective_s=1.0, token_bytes=1, model=drafting
    )
    monkeypatch.setattr("kvcommons.engine.drafts.speculation.draft_depth", lambda *_, **__: Depth(drafts=2))
    assert speculation.drafts([one, other], lambda _: None, nullcontext) == {}
    assert drafting.chance(one) == drafting.chance(other) == 0.0
    assert drafting._core.allocator.in_use == 0
    assert "a draft model failed" in caplog.text


def test_how_often_it_is_right_is_learnt_and_fades() -> None:
    drafting = drafting_of(core_of())
    one = sequence(1, 20)
    chances = [unknown := drafting.chance(one)]
    for _ in range(20):
        caught_up(drafting, one)
        drafts = drafting.draft([one], 3)[1]
        one.append((drafts[0] + 1) % 97)
        chances.append(drafting.chance(one))
    assert chances == sorted(chances, reverse=True)
    assert drafting.chance(one) < unknown / 4
    assert drafting.chance(sequence(2, 20)) < unknown / 2, "others begin with what is known of all"
    for _ in range(5000):
        drafting.rest([one])
    assert drafting.chance(one) > 0.8 * drafting.chance(sequence(2, 20)) > 0.8 * 0.8 * unknown
