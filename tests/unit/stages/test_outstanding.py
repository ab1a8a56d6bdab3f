"""What the first stage waits for, and when blocks are its own again."""

from __future__ import annotations

import random

import pytest

from kvcommons.stages.outstanding import OutstandingWork


def test_one_more_iteration_than_stages_fills_the_line() -> None:
    work = OutstandingWork[str]([1, 2], iterations_max=3)
    for now_s, name in ((1.0, "a"), (2.0, "b"), (3.0, "c")):
        assert not work.full
        work.passed_on(now_s, name)
    assert work.full
    assert work.late(6.5, 5.0)
    assert work.done(2) == ["a", "b"]
    assert not work.late(6.5, 5.0)
    assert (work.full, work.iterations) == (False, 1)
    with pytest.raises(ValueError, match="2 iterations are done, of 1"):
        work.done(2)


def test_blocks_come_back_once_all_stages_have_ended_a_sequence() -> None:
    work = OutstandingWork[None]([1, 2], iterations_max=3)
    work.begin(7, [4, 5], delivers=False)
    work.grow(7, [9])
    assert work.begun(7)
    assert work.ended(7, 2) == ()
    assert work.ended(7, 2) == ()
    assert not work.delivered(7, 1)
    assert work.ended(7, 1) == (4, 5, 9)
    assert not work.begun(7)
    assert work.ended(7, 1) == ()


def test_a_stage_says_once_that_it_has_delivered() -> None:
    work = OutstandingWork[None]([1, 2], iterations_max=3)
    work.begin(7, [])
    assert [work.delivered(7, 1), work.delivered(7, 1), work.delivered(8, 1)] == [True, False, False]
    assert work.abandon() == ([], [(7, 2)])


def test_a_chunks_blocks_come_back_once_all_stages_are_done_with_it() -> None:
    work = OutstandingWork[None]([1, 2], iterations_max=3)
    work.begin(7, [])
    assert work.open_window(7, 0, [4, 5])
    assert not work.open_window(7, 0, [4, 5]), "who knows it already holds no second reference"
    assert work.open_window(7, 32, [6, 8])
    assert work.left_window(7, 0, 2) == ()
    assert work.left_window(7, 0, 2) == ()
    assert work.left_window(7, 0, 1) == (4, 5)
    assert work.left_window(7, 0, 1) == ()
    assert work.left_window(8, 0, 1) == ()
    assert work.ended(7, 1) == ()
    assert work.ended(7, 2) == (6, 8), "what is left of it comes back with its end"
    assert work.abandon() == ([], [])


def test_random_epochs_lose_no_block_and_give_none_back_twice() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        stages = range(1, draw.randrange(2, 6))
        work = OutstandingWork[None](stages, iterations_max=len(stages) + 1)
        held: dict[int, list[int]] = {}
        left: dict[int, set[int]] = {}
        came_back: list[int] = []
        for key in range(draw.randrange(1, 12)):
            held[key] = [draw.randrange(100) for _ in range(draw.randrange(4))]
            left[key] = set(stages)
            work.begin(key, held[key])
            for _ in range(draw.randrange(6)):
                other = draw.choice(list(left))
                stage = draw.choice(list(stages))
                back = work.ended(other, stage)
                expected = left[other] == {stage}
                left[other].discard(stage)
                assert back == (tuple(held[other]) if expected else ())
                came_back += back
        blocks, undelivered = work.abandon()
        assert sorted([*came_back, *blocks]) == sorted(block for some in held.values() for block in some)
        assert {key for key, _ in undelivered} == {key for key, stages_left in left.items() if stages_left}
        assert work.sequences == []
