"""Chunks of prompts beside sequences that generate, in the iterations of one engine: what becomes of one of
them is no matter of the others, whose tokens stay what they are alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from kvcommons.engine.iteration import Iteration
from kvcommons.engine.iteration_timing import IterationTiming
from kvcommons.engine.prompts import PromptSpan
from kvcommons.engine.sequence import Sequence
from kvcommons.engine.token_rows import TokenRows
from kvcommons.errors import CapacityExhausted, Internal
from kvcommons.model.slices import State
from kvcommons.pb import common_pb2
from tests.clock import Clock
from tests.contract.test_long_chunks import LAYERS, LONG_S, PROMPT, Chunk, Creditor, creditor, generating
from tests.unit.engine.loads import HeldLoader, KeptKV, kept_kv
from tests.unit.engine.test_prompts import counted
from tests.waiting import wait_until

FIRST = common_pb2.SampledToken(token=3)
BLOCK = 16


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[list[type]]:
    """What each iteration had, group by group."""
    seen: list[list[type]] = []
    run = Iteration.run

    def noting(self: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
        seen.append([type(group) for group in self.groups])
        return run(self, *between_layers)

    monkeypatch.setattr(Iteration, "run", noting)
    return seen


class Breaks(Chunk):
    """One of whose layers fails."""

    def __init__(self, at: int) -> None:
        super().__init__(self._fail)
        self._at = at

    def _fail(self, layer: int) -> None:
        if layer == self._at:
            raise MemoryError("on purpose")


def plain() -> Chunk:
    return Chunk(lambda layer: None)


def begun(made: Creditor, tokens: int = 5, *, max_position: int = 16) -> Sequence:
    """A sequence that generates from the first iteration on."""
    sequence = generating(made, tokens, max_position=max_position)
    made.engine.begin(sequence.key, FIRST)
    return sequence


def ended(made: Creditor) -> None:
    wait_until(lambda: made.around.updates and made.around.updates[-1].reason == "length")


def generated_alone(tokens: int = 5, *, max_position: int = 16) -> list[int]:
    with creditor(Clock()) as made:
        sequence = begun(made, tokens, max_position=max_position)
        made.engine.start()
        ended(made)
        return list(sequence.tokens)


def computed_alone(prompt: list[int]) -> tuple[int, KeptKV]:
    """The token that follows a prompt, and what a store would have of it."""
    with creditor(Clock()) as made:
        chunk = plain()
        made.submit(chunk, prompt)
        made.engine.start()
        return token_of(chunk), kept_kv(made.core, made.sequence(0, prompt).chain.ids)


def token_of(chunk: Chunk) -> int:
    assert chunk.ended.wait(LONG_S)
    assert chunk.first is not None, chunk.error
    return chunk.first.token.token


def fails_alone(fails: Chunk, groups: list[list[type]]) -> None:
    """A prompt whose chunk fails, with a sequence and another prompt in the iteration, which go on."""
    expected, (token, _) = generated_alone(), computed_alone(PROMPT[:7])
    groups.clear()
    with creditor(Clock(), chunks_s=math.inf) as made:
        sequence, other = begun(made), plain()
        made.submit(fails, PROMPT[10:30])
        made.submit(other, PROMPT[:7])
        made.engine.start()
        assert token_of(other) == token
        assert fails.ended.wait(LONG_S)
        ended(made)
        assert list(sequence.tokens) == expected
    assert isinstance(fails.error, Internal)
    assert other.layers == list(range(LAYERS)), "it was computed once"
    assert groups[0] == [TokenRows, PromptSpan, PromptSpan]


def test_a_chunk_that_fails_ends_its_prompt_alone(groups: list[list[type]]) -> None:
    fails = Breaks(at=2)
    fails_alone(fails, groups)
    assert fails.layers == [0, 1, 2]


def test_a_chunk_that_cannot_begin_ends_its_prompt_alone(
    monkeypatch: pytest.MonkeyPatch, groups: list[list[type]]
) -> None:
    opened = PromptSpan.open

    def cannot(self: PromptSpan, timing: IterationTiming) -> None:
        if len(self.prompt.sequence.tokens) == 20:
            raise MemoryError("on purpose")
        opened(self, timing)

    monkeypatch.setattr(PromptSpan, "open", cannot)
    fails_alone(plain(), groups)


@pytest.mark.parametrize("where", ["open", "attend"])
def test_rows_that_fail_end_without_the_chunks_beside_them(
    monkeypatch: pytest.MonkeyPatch, groups: list[list[type]], where: str
) -> None:
    prompts = [PROMPT[:7], PROMPT[10:30]]
    tokens = [computed_alone(prompt)[0] for prompt in prompts]
    groups.clear()
    attend = TokenRows.attend

    def fails(self: TokenRows, layer: int, state: State, *, needed: bool) -> Tensor:
        if layer == 2:
            raise MemoryError("on purpose")
        return attend(self, layer, state, needed=needed)

    def fails_to_open(self: TokenRows, timing: IterationTiming) -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr(TokenRows, where, fails if where == "attend" else fails_to_open)
    with creditor(Clock(), chunks_s=math.inf) as made:
        sequence = begun(made)
        chunks = [plain() for _ in prompts]
        for chunk, prompt in zip(chunks, prompts, strict=True):
            made.submit(chunk, prompt)
        made.engine.start()
        assert [token_of(chunk) for chunk in chunks] == tokens
        wait_until(lambda: made.around.updates and made.around.updates[-1].error is not None)
        assert made.around.updates[-1].key == sequence.key
        assert isinstance(made.around.updates[-1].error, Internal)
    assert [chunk.layers for chunk in chunks] == [list(range(LAYERS))] * 2
    assert groups == [[TokenRows, PromptSpan, PromptSpan]]


def test_a_history_that_fell_short_takes_nothing_from_the_sequence_beside_it(
    groups: list[list[type]],
) -> None:
    """All layers came, but of one block instead of two: the prompt begins again with that one."""
    expected, (token, kept) = generated_alone(), computed_alone(PROMPT)
    groups.clear()
    loader = HeldLoader(kept, at_once=[1] * LAYERS)
    with creditor(Clock(), chunks_s=math.inf, loader=loader) as made:
        sequence, short = begun(made), plain()
        made.submit(short, stored_blocks=2)
        made.engine.start()
        assert token_of(short) == token
        ended(made)
        assert list(sequence.tokens) == expected
    assert short.first is not None
    assert short.first.cached_tokens == BLOCK
    assert groups[:3] == [[TokenRows, PromptSpan]] * 2 + [[TokenRows]]


def test_a_prompt_is_in_no_iteration_of_tokens_before_all_of_its_history_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer comes after each token. Though it could begin with the first one, it would make the tokens wait
    for the others."""
    expected, (token, kept) = generated_alone(), computed_alone(PROMPT)
    loader, seen = HeldLoader(kept), list[tuple[int, bool]]()
    run = Iteration.run

    def noting(self: Iteration, *between_layers: Any) -> list[list[common_pb2.SampledToken]]:
        has_chunk = any(isinstance(group, PromptSpan) for group in self.groups)
        seen.append((loader.loads[0].layers_arrived, has_chunk))
        if has_chunk:
            assert loader.loads[0].ended, "the engine's thread would wait for ever"
        return run(self, *between_layers)

    def come() -> None:
        if loader.loads and not loader.loads[0].ended:
            loader.loads[0].come()

    monkeypatch.setattr(Iteration, "run", noting)
    with creditor(Clock(), chunks_s=math.inf, loader=loader) as made:
        sequence, chunk = begun(made), plain()
        made.around.delivered = come
        made.submit(chunk, stored_blocks=2)
        made.engine.start()
        assert token_of(chunk) == token
        ended(made)
        assert list(sequence.tokens) == expected
    assert chunk.first is not None
    assert chunk.first.cached_tokens == 2 * BLOCK
    assert chunk.first.load_wait_us == 0
    assert [arrived for arrived, has_chunk in seen if has_chunk] == [LAYERS]
    assert [arrived for arrived, has_chunk in seen if not has_chunk][:LAYERS] == list(range(LAYERS))


def test_a_partly_computed_prompt_that_gives_way_leaves_what_was_computed() -> None:
    """The sequence beside it is older and needs a block. The prompt, when it comes again, has its first chunk
    from here."""
    expected, (token, _) = generated_alone(15, max_position=20), computed_alone(PROMPT)
    with creditor(Clock(), chunks_s=math.inf, chunk_tokens=2 * BLOCK) as made:
        sequence, chunk = begun(made, 15, max_position=20), plain()
        made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
        assert isinstance(chunk.error, CapacityExhausted)
        assert chunk.runs[-1] == (LAYERS - 1, range(2))
        ended(made)
        assert list(sequence.tokens) == expected
        found_again(made, token)


def test_a_partly_computed_prompt_that_is_cancelled_leaves_what_was_computed() -> None:
    token, _ = computed_alone(PROMPT)
    with creditor(Clock(), chunk_tokens=2 * BLOCK) as made:

        def pace(layer: int) -> None:
            if len(chunk.runs) == LAYERS + 3:  # in its second chunk
                made.engine.cancel(key)

        chunk = Chunk(pace)
        key = made.submit(chunk)
        made.engine.start()
        assert chunk.ended.wait(LONG_S)
        assert chunk.first is None
        wait_until(lambda: made.core.allocator.in_use == 0)
        found_again(made, token)


def found_again(made: Creditor, token: int) -> None:
    """Of the prompt the first two blocks, by one that comes later."""
    again = plain()
    made.submit(again)
    assert token_of(again) == token
    assert again.first is not None
    assert (again.first.cached_tokens, again.first.device_tokens) == (2 * BLOCK, 2 * BLOCK)
    assert len(again.layers) == LAYERS, "the rest was one chunk"


def test_beside_tokens_too_the_last_layer_and_the_head_are_for_the_last_chunk_alone(
    monkeypatch: pytest.MonkeyPatch, groups: list[list[type]]
) -> None:
    with creditor(Clock(), chunks_s=math.inf, chunk_tokens=BLOCK) as made:
        attended, heads = counted(made.core, monkeypatch)
        begun(made)
        chunk = plain()
        made.submit(chunk)
        made.engine.start()
        token_of(chunk)
        ended(made)
    assert groups[:4] == [[TokenRows, PromptSpan]] * 3 + [[TokenRows]]
    assert [rows for layer, rows in attended if layer == LAYERS - 1] == [len(PROMPT) - 2 * BLOCK]
    assert len(attended) == 3 * (LAYERS - 1) + 1
    assert heads[:4] == [1, 1, 2, 1]
