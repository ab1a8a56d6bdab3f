from __future__ import annotations

import itertools
import random

import pytest

from kvcommons.engine.scheduler import BACKGROUND_EVERY, Scheduler
from kvcommons.errors import Overloaded

CHUNK = 512


def make(*tokens: int, max_queue: int = 8, max_running: int = 4) -> Scheduler:
    """Jobs 0, 1, … of so many tokens, all admitted."""
    made = Scheduler(max_queue=max_queue, max_prompts=max_running)
    for job, length in enumerate(tokens):
        made.submit(job, tokens=length, deadline_s=100.0)
        made.admit(job, tokens_left=length)
    return made


def run(made: Scheduler, left: dict[int, int]) -> list[int]:
    """The order of chunks until all jobs are done."""
    order = []
    while spans := made.spans(lambda _: True, CHUNK):
        assert sum(tokens for _, tokens in spans) <= CHUNK
        for job, tokens in spans:
            order.append(job)
            left[job] -= tokens
            made.progress(job, tokens_left=left[job])
            if left[job] <= 0:
                made.remove(job)
    return order


@pytest.mark.parametrize("before", range(1, 8))
def test_a_short_prompt_waits_for_the_chunk_under_way_alone(before: int) -> None:
    """Whosever that is, and no row of another prompt is in its iteration."""
    left = {0: 20 * CHUNK, 1: 10 * CHUNK}
    made = make(*left.values())
    for _ in range(before):
        for job, tokens in made.spans(lambda _: True, CHUNK):
            left[job] -= tokens
            made.progress(job, tokens_left=left[job])
    made.submit(2, tokens=CHUNK, deadline_s=100.0)
    made.admit(2, tokens_left=CHUNK)
    assert made.spans(lambda _: True, CHUNK) == [(2, CHUNK)]


def test_others_are_never_ahead_of_the_oldest_by_more_than_a_chunk() -> None:
    """However many short ones come, and however little of what is wanted an iteration takes."""
    for seed in range(20):
        chance, keys = random.Random(seed), itertools.count(1)
        made, left = make(100 * CHUNK, max_running=1000), {0: 100 * CHUNK}
        done = {True: 0, False: 0}  # by whether it is the oldest's
        while left[0] > 0:
            for _ in range(chance.choice([0, 0, 1, 4])):
                key = next(keys)
                left[key] = chance.choice([10, 100, 2 * CHUNK])
                made.submit(key, tokens=left[key], deadline_s=100.0)
                made.admit(key, tokens_left=left[key])
            share = chance.choice([0.1, 1.0])
            for key, tokens in made.spans(lambda _: True, CHUNK):
                computed = max(int(tokens * share), 1)
                left[key] -= computed
                done[key == 0] += computed
                made.progress(key, tokens_left=left[key])
                if left[key] <= 0:
                    made.remove(key)
            assert done[False] <= done[True] + CHUNK or left[0] <= 0, seed


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_turn_that_cannot_be_used_passes(stuck: int) -> None:
    """Its memory is not ready: nobody waits for it."""
    left = {0: 4 * CHUNK, 1: 4 * CHUNK}
    made = make(*left.values())
    for _ in range(9):
        for job, tokens in made.spans(lambda _: True, CHUNK):
            if job != stuck:
                left[job] -= tokens
                made.progress(job, tokens_left=left[job])
    assert left[1 - stuck] == 0
    assert left[stuck] == 4 * CHUNK


def test_the_oldest_job_gets_half_of_the_chunks_but_for_the_end_of_another() -> None:
    left = {0: 8 * CHUNK, 1: 4 * CHUNK, 2: 4 * CHUNK}
    order = run(make(*left.values()), left)
    assert order == [0, 1, 0, 1, 0, 1, 1, 0, 0, 2, 0, 2, 0, 0, 2, 2]


def test_admission_is_first_come_first_served_and_bounded() -> None:
    made = make(5, 5, max_running=2)
    made.submit(7, tokens=1, deadline_s=1.0)
    made.submit(8, tokens=1, deadline_s=1.0)
    assert made.admissible() == []
    made.remove(0)
    assert made.admissible() == [7, 8]
    assert (made.computing, made.waiting) == (1, 2)


def test_the_queue_is_bounded() -> None:
    made = Scheduler(max_queue=1, max_prompts=1)
    made.submit(0, tokens=1, deadline_s=1.0)
    with pytest.raises(Overloaded, match="retry later"):
        made.submit(1, tokens=1, deadline_s=1.0)


def test_jobs_that_are_not_ready_are_passed_over() -> None:
    made = make(CHUNK, 9 * CHUNK)
    assert [made.spans(lambda job: job == 1, CHUNK) for _ in range(3)] == [[(1, CHUNK)]] * 3
    assert made.spans(lambda _: False, CHUNK) == []


def test_a_prompt_whose_last_chunk_is_under_way_has_no_turn() -> None:
    """Its token comes later, where others compute the rest of its layers."""
    left = {0: 9 * CHUNK, 1: CHUNK}
    made, order = make(*left.values()), []
    for _ in range(10):
        ((job, tokens),) = made.spans(lambda _: True, CHUNK)
        left[job] -= tokens
        made.progress(job, tokens_left=left[job])
        order.append(job)
    assert sorted(order) == [0] * 9 + [1]
    assert made.spans(lambda _: True, CHUNK) == []


def test_short_prompts_share_an_iteration() -> None:
    left = 100, 9 * CHUNK, 60
    assert make(*left).spans(lambda _: True, CHUNK) == [(0, 100), (2, 60)], "they would wait for rows of 1"
    assert make(*left).spans(lambda _: True, 80) == [(2, 60)]
    assert make(*left).spans(lambda _: True, 0) == []


@pytest.mark.parametrize("left", [(32, 300, 72, 33), (320, 300, 72, 80), (320, 64, 20, 33)])
@pytest.mark.parametrize("able", range(4))
def test_whoever_has_no_room_is_passed_over(left: tuple[int, ...], able: int) -> None:
    """Three of four prompts have none for their next chunk, until the fourth gives its own back: however
    little each of them has left, that one gets its turn, and then the oldest, which may have room now."""
    made, tokens = make(*left), 32

    def turn_of(key: int) -> int:
        for _ in left:
            chosen = dict(made.spans(lambda _: True, tokens))
            if key in chosen:
                return chosen[key]
        raise AssertionError(f"{key} gets no turn")

    made.progress(able, tokens_left=left[able] - turn_of(able))
    assert able == 0 or turn_of(0)


def test_deadlines_hold_for_waiting_and_running_jobs() -> None:
    made = make(5)
    made.submit(1, tokens=5, deadline_s=3.0)
    assert made.expired(2.9) == []
    assert made.expired(3.0) == [1]
    assert made.expired(100.0) == [0, 1]
    made.remove(1)
    assert made.expired(3.0) == []


def with_background(*tokens: int) -> tuple[Scheduler, dict[int, int]]:
    """Job 0 is in the background, and came first."""
    made = Scheduler(max_queue=8, max_prompts=4)
    for job, length in enumerate(tokens):
        made.submit(job, tokens=length, deadline_s=100.0, background=job == 0)
        made.admit(job, tokens_left=length)
    return made, dict(enumerate(tokens))


def test_the_background_has_one_iteration_of_eight_beside_others() -> None:
    made, left = with_background(4 * CHUNK, 20 * CHUNK, 3 * CHUNK)
    order = run(made, left)
    assert order.index(0) == BACKGROUND_EVERY - 1
    last = max(at for at, job in enumerate(order) if job != 0)
    turns = [at for at, job in enumerate(order[:last]) if job == 0]
    assert turns == list(range(BACKGROUND_EVERY - 1, last, BACKGROUND_EVERY))
    assert set(order[last + 1 :]) == {0}, "the rest is its own"


def test_the_background_takes_nothing_from_the_turns_of_others() -> None:
    """Without its iterations the order is what it is alone."""
    made, left = with_background(100 * CHUNK, 20 * CHUNK, 10 * CHUNK, 5 * CHUNK)
    beside = [job for job in run(made, left) if job != 0]
    alone = Scheduler(max_queue=8, max_prompts=4)
    others = {1: 20 * CHUNK, 2: 10 * CHUNK, 3: 5 * CHUNK}
    for job, length in others.items():
        alone.submit(job, tokens=length, deadline_s=100.0)
        alone.admit(job, tokens_left=length)
    assert beside == run(alone, others)


def test_the_background_computes_while_others_wait_for_their_history() -> None:
    made, _ = with_background(4 * CHUNK, 4 * CHUNK)
    for _ in range(3):
        assert made.spans(lambda job: job == 0, CHUNK) == [(0, CHUNK)]
    assert made.spans(lambda _: True, CHUNK) == [(1, CHUNK)]


def test_memory_is_offered_to_the_background_last_and_it_takes_no_place_of_others() -> None:
    made = Scheduler(max_queue=8, max_prompts=2)
    for job in range(4):
        made.submit(job, tokens=CHUNK, deadline_s=100.0, background=job < 2)
    assert made.admissible() == [2, 3, 0, 1]
    for job in (0, 1):
        made.admit(job, tokens_left=CHUNK)
    assert made.admissible() == [2, 3], "though as many as may be are computed"
    for job in (2, 3):
        made.admit(job, tokens_left=CHUNK)
    made.submit(4, tokens=CHUNK, deadline_s=100.0)
    assert made.admissible() == []


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    """What the oldest has left would be one chunk, but takes several iterations behind so much context."""
    for one_chunk, expected in ((False, [(1, 60)]), (True, [(0, CHUNK - 100), (1, 60)])):
        made = make(4 * CHUNK - 100)
        for left in (3 * CHUNK - 100, 2 * CHUNK - 100, CHUNK - 100):
            assert made.spans(lambda _: True, CHUNK) == [(0, CHUNK)]
            made.progress(0, tokens_left=left)
        made.submit(1, tokens=60, deadline_s=1.0)
        made.admit(1, tokens_left=60)
        assert made.spans(lambda _: True, CHUNK, lambda key, ends=one_chunk: key == 1 or ends) == expected


def test_a_short_prompt_does_not_wait_for_any_of_several_long_ones() -> None:
    made = make(9 * CHUNK, 9 * CHUNK, 60)
    left = {0: 9 * CHUNK, 1: 9 * CHUNK, 2: 60}
    ends = made.spans(lambda _: True, CHUNK)
    while 2 in left:
        for key, tokens in ends:
            left[key] -= tokens
            made.progress(key, tokens_left=left[key])
        if not left[2]:
            break
        ends = made.spans(lambda _: True, CHUNK)
    assert ends == [(2, 60)]


def test_who_is_done_on_credit_does_not_wait_for_one_that_is_not_short() -> None:
    made = make(9 * CHUNK, 300, 60)
    assert made.spans(lambda _: True, CHUNK, lambda key: key == 2) == [(2, 60)]


def test_the_end_of_the_oldest_does_not_wait_for_thousands_of_iterations() -> None:
    """Of prompts that are all but found, one after the other, each with an iteration of its own."""
    made = make(CHUNK, max_running=10_000)
    for key in range(1, 200):
        made.submit(key, tokens=1, deadline_s=1.0)
        made.admit(key, tokens_left=1)
        spans = made.spans(lambda _: True, CHUNK, lambda key: key > 0)
        if any(one == 0 for one, _ in spans):
            assert key < 100
            return
        for one, _ in spans:
            made.progress(one, tokens_left=0)
            made.remove(one)
    raise AssertionError("it starves")
