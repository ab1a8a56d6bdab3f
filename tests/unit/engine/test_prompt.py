from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from kvcommons.engine.prompt import Prompt
from kvcommons.engine.request import Request
from kvcommons.engine.sequence import Sequence
from kvcommons.engine.truncated import Truncated
from kvcommons.errors import DataLoss
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import IdentityChain

BLOCK = 16


def make(
    tokens: int, *, matched: int = 0, store: str = "unix:/store", no_reuse: bool = False, prompt: int = 0
) -> Prompt:
    ids = tuple(range(tokens))
    request = Request(
        request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=ids, prompt_tokens=prompt or tokens,
        sampling=SamplingParams(), store_control=store, store_data=store, matched_blocks=matched,
        no_reuse=no_reuse,
    )  # fmt: skip
    chain = IdentityChain(request.salt, bytes(32), BLOCK)
    chain.extend(ids)
    sequence = Sequence(key=1, request=request, block_tokens=BLOCK, chain=chain)
    nobody = cast(Any, "never called here")
    return Prompt(sequence=sequence, sink=nobody, memory=nobody, deadline_s=1.0, submitted_s=0.0)


def test_the_last_token_is_always_computed() -> None:
    assert len(make(64).reusable()) == 3
    assert len(make(65).reusable()) == 4
    assert len(make(1).reusable()) == 0
    assert len(make(64, no_reuse=True).reusable()) == 0


def test_loads_what_the_store_has_beyond_the_own_memory() -> None:
    made = make(100, matched=5)
    made.reuse(device=2)
    assert made.loadable_blocks() == 3
    made.reuse(device=6)
    assert made.loadable_blocks() == 0
    assert make(80, matched=5).loadable_blocks() == 4
    assert make(100, matched=5, store="").loadable_blocks() == 0


def test_chunks_begin_at_block_borders_and_cover_the_prompt() -> None:
    made = make(100)
    made.reuse(device=1, loaded=1)
    seen = []
    while made.tokens_left:
        chunk = made.chunk(32)
        seen.append((chunk, made.completed_blocks(chunk)))
        made.sequence.computed = chunk.stop
    assert seen == [
        (range(32, 64), range(2, 4)),
        (range(64, 96), range(4, 6)),
        (range(96, 100), range(6, 7)),
    ]
    assert made.total_blocks == 7


def test_a_load_that_fell_short_sets_the_job_back() -> None:
    made = make(100, matched=6)
    made.reuse(device=2, loaded=4)
    made.reuse(loaded=1)
    assert (made.reused_blocks, made.sequence.computed) == (3, 48)


def test_a_block_is_complete_with_its_last_token_wherever_chunks_end() -> None:
    made = make(40)
    seen = []
    for tokens in (10, 10, 7, 100):
        chunk = made.chunk(tokens)
        seen.append((chunk, made.completed_blocks(chunk)))
        made.sequence.computed = chunk.stop
    assert seen == [
        (range(10), range(0)),
        (range(10, 16), range(1)),
        (range(16, 23), range(1, 1)),
        (range(23, 40), range(1, 3)),
    ]


def test_penalties_count_what_follows_the_prompt() -> None:
    assert make(5, prompt=3).sequence.generated == {3: 1, 4: 1}
    assert make(5).sequence.generated == {}


def test_what_was_computed_before_a_truncation_can_only_be_found() -> None:
    made = make(100)
    made.check_history()
    made.sequence.request = replace(
        made.request, truncated=Truncated(dropped_tokens=BLOCK, since_token=2 * BLOCK)
    )
    made.sequence.computed = BLOCK
    with pytest.raises(DataLoss, match="replay"):
        made.check_history()
    made.sequence.computed = 2 * BLOCK
    made.check_history()
