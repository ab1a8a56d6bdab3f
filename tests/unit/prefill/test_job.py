from __future__ import annotations

from dataclasses import replace

import pytest

from kvcommons.engine.request import Request
from kvcommons.engine.truncated import Truncated
from kvcommons.errors import DataLoss
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import IdentityChain
from services.prefill.job import Job, Target, Write, writes

BLOCK = 16


def make(
    tokens: int, *, matched: int = 0, store: str = "unix:/store", no_reuse: bool = False, prompt: int = 0
) -> Job:
    ids = tuple(range(tokens))
    asked = Request(
        request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=ids, prompt_tokens=prompt or tokens,
        sampling=SamplingParams(), store_control=store, store_data=store, matched_blocks=matched,
        no_reuse=no_reuse,
    )  # fmt: skip
    chain = IdentityChain(asked.salt, bytes(32), BLOCK)
    return Job(
        key=1,
        request=asked,
        block_tokens=BLOCK,
        deadline_s=1.0,
        submitted_s=0.0,
        ids=chain.extend(asked.tokens),
    )


def test_the_last_token_is_always_computed() -> None:
    assert len(make(64).reusable()) == 3
    assert len(make(65).reusable()) == 4
    assert make(1).reusable() == []
    assert make(64, no_reuse=True).reusable() == []


def test_loads_what_the_store_has_beyond_the_own_memory() -> None:
    job = make(100, matched=5)
    job.device_blocks = 2
    assert job.loadable_blocks() == 3
    job.device_blocks = 6
    assert job.loadable_blocks() == 0
    assert make(80, matched=5).loadable_blocks() == 4
    assert make(100, matched=5, store="").loadable_blocks() == 0


def test_chunks_begin_at_block_borders_and_cover_the_prompt() -> None:
    job = make(100)
    job.device_blocks, job.loaded_blocks = 1, 1
    job.set_back(1)
    seen = []
    while job.tokens_left:
        chunk = job.chunk(32)
        seen.append((chunk, job.covered_blocks(chunk)))
        job.done_tokens = chunk.stop
    assert seen == [
        (range(32, 64), range(2, 4)),
        (range(64, 96), range(4, 6)),
        (range(96, 100), range(6, 7)),
    ]
    assert job.total_blocks == 7


def test_a_load_that_fell_short_sets_the_job_back() -> None:
    job = make(100, matched=6)
    job.device_blocks, job.loaded_blocks = 2, 4
    job.set_back(1)
    assert (job.reused_blocks, job.done_tokens) == (3, 48)


def test_writes_go_to_the_holder_of_each_block() -> None:
    own = Target(data_address="a", handle=1, epoch=1, first_block=6, blocks=4)
    lent = Target(data_address="b", handle=2, epoch=1, first_block=2, blocks=4)
    assert writes((own, lent), 4, 4) == [
        Write(target=own, first=6, count=2),
        Write(target=lent, first=4, count=2),
    ]
    assert writes((own, lent), 0, 2) == []
    assert writes((own, lent), 5, -1) == []
    assert writes((own, lent), 9, 5) == [Write(target=own, first=9, count=1)]


def test_penalties_count_what_follows_the_prompt() -> None:
    assert make(5, prompt=3).generated() == {3: 1, 4: 1}
    assert make(5).generated() == {}


def test_what_was_computed_before_a_truncation_can_only_be_found() -> None:
    job = make(100)
    job.check_history()
    job.request = replace(job.request, truncated=Truncated(dropped_tokens=BLOCK, since_token=2 * BLOCK))
    job.done_tokens = BLOCK
    with pytest.raises(DataLoss, match="replay"):
        job.check_history()
    job.done_tokens = 2 * BLOCK
    job.check_history()
