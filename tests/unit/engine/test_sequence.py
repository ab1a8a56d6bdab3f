from __future__ import annotations

from typing import cast

import pytest

from kvcommons.engine.request import Request
from kvcommons.engine.sequence import LocalRun, RemoteRun, Sequence
from kvcommons.engine.truncated import WHOLE, Truncated
from kvcommons.holder.client import RemoteHolder
from kvcommons.holder.segments import SegmentRef
from kvcommons.model.sampling import SamplingParams
from kvcommons.rblock.identity import IdentityChain
from services.decode.arrival.arrivals import split

BLOCK = 4
HOLDER = cast(RemoteHolder, "never called here")


def make(
    tokens: int,
    *,
    prompt: int = 0,
    max_position: int = 100,
    stops: tuple[int, ...] = (),
    truncated: Truncated = WHOLE,
) -> Sequence:
    request = Request(
        request_id="r", session_id="", tenant="t", salt=bytes(32), tokens=tuple(range(tokens)),
        prompt_tokens=prompt or tokens, max_position=max_position, sampling=SamplingParams(),
        stop_token_ids=frozenset(stops), store_control="", store_data="", matched_blocks=0, no_reuse=False,
        truncated=truncated,
    )  # fmt: skip
    return Sequence(
        key=1,
        request=request,
        block_tokens=BLOCK,
        chain=IdentityChain(request.salt, bytes(32), BLOCK),
    )


def remote(first: int, count: int, handle: int = 5, segment_block: int = 0) -> RemoteRun:
    return RemoteRun(
        first_block=first,
        count=count,
        holder=HOLDER,
        ref=SegmentRef(handle=handle, epoch=1),
        segment_block=segment_block,
    )


def test_runs_join_where_they_can() -> None:
    sequence = make(8)
    sequence.append_run(LocalRun(first_block=0, blocks=[7]))
    sequence.append_run(LocalRun(first_block=1, blocks=[3, 4]))
    sequence.append_run(remote(3, 2))
    sequence.append_run(remote(5, 1, segment_block=2))
    sequence.append_run(remote(6, 1, handle=6))
    sequence.append_run(LocalRun(first_block=7, blocks=[9]))
    assert [(run.first_block, run.count) for run in sequence.runs] == [(0, 3), (3, 3), (6, 1), (7, 1)]
    assert sequence.local_blocks() == [7, 3, 4, 9]
    assert [run.ref.handle for run in sequence.remote_runs()] == [5, 6]
    assert sequence.locate(5) == (sequence.runs[1], 2)
    with pytest.raises(IndexError):
        sequence.locate(8)


def test_a_runs_table_follows_its_blocks() -> None:
    run = LocalRun(first_block=0, blocks=[7, 3, 4])
    assert list(run.table()) == [7, 3, 4]
    run.blocks.extend([9, 5])
    run.replace(1, 8)
    assert list(run.table()) == run.blocks == [7, 8, 4, 9, 5]


def test_a_run_lies_in_the_head_of_a_truncated_sequence_or_behind_it() -> None:
    sequence = make(40, truncated=Truncated(head_tokens=2 * BLOCK, dropped_tokens=4 * BLOCK))
    sequence.append_run(LocalRun(first_block=0, blocks=[7]))
    sequence.append_run(LocalRun(first_block=1, blocks=[3, 4, 5]))
    sequence.append_run(LocalRun(first_block=4, blocks=[6]))
    assert [(run.first_block, run.count) for run in sequence.runs] == [(0, 2), (2, 3)]
    assert sequence.local_blocks() == [7, 3, 4, 5, 6]
    assert [sequence.in_head(run) for run in sequence.runs] == [True, False]
    nothing_dropped = make(40, truncated=Truncated(head_tokens=2 * BLOCK))
    nothing_dropped.append_run(LocalRun(first_block=0, blocks=[7, 3, 4]))
    assert [nothing_dropped.in_head(run) for run in nothing_dropped.runs] == [False]


@pytest.mark.parametrize(
    ("blocks", "parts"),
    [
        (range(6), [range(2), range(2, 6)]),
        (range(2), [range(2)]),
        (range(2, 5), [range(2, 5)]),
        (range(3, 5), [range(3, 5)]),
    ],
)
def test_what_is_borrowed_is_asked_for_on_either_side_of_the_heads_end(
    blocks: range, parts: list[range]
) -> None:
    assert split(blocks, 2) == parts
    assert split(blocks, 0) == [blocks]


def test_the_last_token_needs_room_for_its_kv() -> None:
    sequence = make(7)
    sequence.append_run(LocalRun(first_block=0, blocks=[0, 1]))
    assert not sequence.full
    assert sequence.start(50) is None  # 8 tokens: KV for the 8th has room
    assert not sequence.full
    assert sequence.append(51) is None
    assert sequence.full


def test_ends_with_a_stop_token_or_at_its_length() -> None:
    assert make(3, stops=(9,)).start(9) == "stop"
    sequence = make(3, stops=(9,), max_position=5)
    assert sequence.start(8) is None
    assert sequence.append(9) == "stop"
    sequence = make(3, max_position=5)
    assert sequence.start(8) is None
    assert sequence.append(8) == "length"


def test_penalties_and_noise_follow_the_prompt_boundary() -> None:
    sequence = make(6, prompt=4)
    sequence.start(5)
    row = sequence.sampling_row()
    assert dict(row.generated) == {4: 1, 5: 2}
    assert row.position == 7


def test_each_full_block_is_settled_once_with_the_identity_of_its_tokens() -> None:
    sequence = make(7)
    sequence.start(50)
    assert sequence.newly_full() == range(1)
    sequence.append(51)
    assert sequence.newly_full() == range(1, 2)
    assert list(sequence.newly_full()) == []
    expected = IdentityChain(bytes(32), bytes(32), BLOCK).extend([*range(7), 50])
    assert list(sequence.identities()) == expected
    sequence.append(52)
    assert list(sequence.identities()) == expected


def places(sequence: Sequence) -> list[tuple[str, int, int]]:
    return [
        ("here" if isinstance(run, LocalRun) else "away", run.first_block, run.count) for run in sequence.runs
    ]


def started(tokens: int) -> Sequence:
    """Two blocks here, four away, and the tail away on another segment; so many tokens have KV."""
    sequence = make(tokens)
    sequence.append_run(LocalRun(first_block=0, blocks=[0, 1]))
    sequence.append_run(remote(2, 4))
    sequence.append_run(remote(6, 3, handle=6))
    sequence.start(1)
    return sequence


def test_the_front_of_a_run_moves_and_the_rest_keeps_its_place_in_the_segment() -> None:
    sequence = started(8 * BLOCK + 1)
    run = sequence.remote_runs()[0]
    new = SegmentRef(handle=5, epoch=1, generation=1)
    assert sequence.movable(run) == 4
    assert sequence.move(run, LocalRun(first_block=2, blocks=[7, 8]), new)
    assert places(sequence) == [("here", 0, 4), ("away", 4, 2), ("away", 6, 3)]
    assert sequence.local_blocks() == [0, 1, 7, 8]
    assert (run.segment_block, run.ref.generation) == (2, 1)
    # What was agreed before that move is not carried out.
    assert not sequence.move(run, LocalRun(first_block=2, blocks=[9]), new)
    assert sequence.move(run, remote(4, 2, handle=9), new)
    assert places(sequence) == [("here", 0, 4), ("away", 4, 2), ("away", 6, 3)]
    assert not sequence.move(run, LocalRun(first_block=4, blocks=[9]), new)


def test_only_full_blocks_move_and_the_tail_keeps_one() -> None:
    sequence = started(8 * BLOCK + 1)
    head, tail = sequence.remote_runs()
    assert (sequence.movable(head), sequence.movable(tail)) == (4, 2)
    assert not sequence.move(tail, LocalRun(first_block=6, blocks=[3, 4, 5]), tail.ref)
    early = started(4 * BLOCK + 3)
    assert [early.movable(run) for run in early.remote_runs()] == [2, 0]
    waiting = make(4 * BLOCK)
    waiting.append_run(remote(0, 5))
    assert waiting.movable(waiting.remote_runs()[0]) == 0


@pytest.mark.parametrize("computed", [1, BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 2])
def test_a_partly_computed_prompt_is_not_moved(computed: int) -> None:
    """Its blocks may be full already: whoever computes the rest still finds them where they were."""
    waiting = make(4 * BLOCK + 3)
    waiting.append_run(remote(0, 5))
    waiting.append_run(remote(5, 1, handle=6))
    waiting.computed = computed
    head, tail = waiting.remote_runs()
    assert (waiting.movable(head), waiting.movable(tail)) == (0, 0)
    assert not waiting.move(head, LocalRun(first_block=0, blocks=[7]), head.ref)
    assert places(waiting) == [("away", 0, 5), ("away", 5, 1)]
    waiting.computed = len(waiting.tokens)
    assert (waiting.movable(head), waiting.movable(tail)) == (4, 0)


def test_a_segment_that_grows_while_it_moves_goes_on_where_it_was() -> None:
    sequence = started(9 * BLOCK)
    tail = sequence.remote_runs()[1]
    assert sequence.move(tail, LocalRun(first_block=6, blocks=[3]), tail.ref)
    sequence.append_run(remote(9, 2, handle=6, segment_block=3))
    assert places(sequence) == [("here", 0, 2), ("away", 2, 4), ("here", 6, 1), ("away", 7, 4)]
    assert (tail.count, tail.segment_block) == (4, 1)
