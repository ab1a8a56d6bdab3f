"""Who asks decode for room next, and when."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from services.router.capacity.queue import ANSWER_TIMEOUT_S, RETURN_TIMEOUT_S, CapacityQueue, Ticket

PAUSE_S = 0.7


def queue_of(*blocks: int) -> tuple[CapacityQueue, list[Ticket]]:
    """A line in which choices of so many blocks wait, the first of which was refused at 0 s."""
    queue = CapacityQueue(pause_s=lambda: PAUSE_S)
    tickets = [Ticket(order=(number, 0)) for number in range(len(blocks))]
    queue.join(tickets[0], blocks[0])
    assert queue.advance(0, 0.0) is tickets[0]
    queue.refused(tickets[0], 0.0)
    for ticket, size in zip(tickets, blocks, strict=True):
        queue.join(ticket, size)
        assert queue.advance(0, 0.0) is None
    return queue, tickets


def test_with_room_for_all_nobody_waits_for_another() -> None:
    queue, free_blocks = CapacityQueue(pause_s=lambda: PAUSE_S), 30
    for number in range(3):
        ticket = Ticket(order=(number, 0))
        queue.join(ticket, 10)
        assert queue.advance(free_blocks, 0.0) is ticket
        free_blocks -= 10
    assert queue.due_s is None
    last = Ticket(order=(3, 0))
    queue.join(last, 10)
    assert queue.advance(free_blocks, 0.0) is None, (
        "there is none left, and the others have not been answered"
    )
    queue.leave(Ticket(order=(9, 0)))


def test_who_comes_when_nobody_waits_asks_whatever_is_known_of_room() -> None:
    queue, ticket = CapacityQueue(pause_s=lambda: PAUSE_S), Ticket(order=(0, 0))
    queue.join(ticket, 10)
    assert queue.advance(0, 0.0) is ticket


def test_they_ask_in_the_order_of_arrival_as_room_comes() -> None:
    queue, (first, second, third) = queue_of(5, 5, 5)
    assert queue.advance(4, 0.1) is None
    assert queue.advance(14, 0.1) is first
    assert queue.advance(9, 0.1) is second, "there is room beside the first, whatever that hears"
    assert queue.advance(4, 0.1) is None
    queue.reserved(first)
    queue.refused(second, 0.1)
    assert queue.advance(4, 0.1) is None
    queue.join(second, 5)
    assert queue.advance(5, 0.2) is second
    queue.reserved(second)
    assert queue.advance(5, 0.2) is third


def test_one_that_comes_back_is_before_those_that_came_later() -> None:
    queue, (first, second, third) = queue_of(5, 5, 5)
    queue.leave(second)
    assert queue.advance(5, 0.1) is first
    queue.reserved(first)
    again = Ticket(order=second.order)  # its instance has died
    queue.join(again, 6)
    assert queue.advance(4, 0.2) is None
    assert queue.advance(6, 0.3) is again
    queue.reserved(again)
    assert queue.advance(6, 0.3) is third


@pytest.mark.parametrize("how", ["refused", "leaves", "leaves while it asks"])
def test_word_of_room_that_leads_nowhere_goes_on_to_the_next(how: str) -> None:
    queue, (first, second) = queue_of(5, 5)
    if how == "leaves":
        queue.leave(first)
    else:
        assert queue.advance(5, 0.1) is first
        assert queue.advance(0, 0.1) is None
    if how == "refused":
        queue.refused(first, 0.1)
        queue.leave(first)  # and gives up
    elif how == "leaves while it asks":
        queue.leave(first)
    assert queue.advance(5, 0.1) is second


def test_smaller_ones_pass_a_large_one_up_to_its_own_size() -> None:
    queue, (large, *small) = queue_of(10, 4, 4, 4, 2)
    assert queue.advance(4, 0.1) is small[0]
    queue.refused(small[0], 0.1)
    assert large.passed_blocks == 0
    queue.join(small[0], 4)
    for ticket in small[:2]:
        assert queue.advance(4, 0.2) is ticket
        queue.reserved(ticket)
    assert queue.advance(4, 0.1) is small[3], "4 more would be too many, 2 are not"
    queue.reserved(small[3])
    assert large.passed_blocks == 10
    assert queue.advance(9, 0.1) is None
    assert queue.advance(10, 0.1) is large
    queue.reserved(large)
    assert queue.advance(4, 0.1) is small[2]


def test_the_first_asks_once_in_a_while_without_word_of_room() -> None:
    queue, (first, second, third) = queue_of(5, 5, 5)
    assert queue.advance(0, 0.1) is None
    assert queue.due_s == PAUSE_S
    assert queue.advance(0, PAUSE_S - 0.01) is None
    assert queue.advance(0, PAUSE_S) is first
    queue.refused(first, 1.0)
    assert queue.advance(0, 1.0) is None
    queue.join(first, 5)
    assert queue.advance(0, 1.2) is None
    assert queue.due_s == 1.0 + PAUSE_S
    assert queue.advance(0, 1.0 + PAUSE_S) is first
    assert queue.advance(0, 1.0 + PAUSE_S) is None
    queue.reserved(first)
    assert queue.advance(0, 2.0) is second, "what was known of room is wrong: the next one need not wait"
    queue.refused(second, 2.0)
    queue.join(second, 5)
    assert queue.advance(0, 2.0 + PAUSE_S - 0.01) is None
    queue.leave(second)
    assert queue.advance(0, 2.5) is None, "the pause begins anew for whoever has become the first"
    assert queue.advance(0, 2.5 + PAUSE_S) is third


def test_a_question_without_an_answer_holds_nobody_up_for_long() -> None:
    queue, (first, second) = queue_of(5, 5)
    assert queue.advance(5, 0.1) is first
    assert queue.advance(0, 1.0) is None
    assert queue.due_s == 1.0 + PAUSE_S
    assert queue.advance(0, 1.0 + PAUSE_S) is None, "not another one while the first may be answered"
    assert queue.due_s == 0.1 + ANSWER_TIMEOUT_S
    assert queue.advance(0, 0.1 + ANSWER_TIMEOUT_S) is second
    queue.reserved(second)
    queue.reserved(first)
    assert len(queue) == 0


def test_one_that_is_refused_again_and_again_though_there_seems_to_be_room_asks_ever_less() -> None:
    queue, ticket = CapacityQueue(pause_s=lambda: PAUSE_S), Ticket(order=(0, 0))
    queue.join(ticket, 5)
    asked_s, now_s = [], 0.0
    while now_s < 3:
        if queue.advance(99, now_s) is ticket:
            asked_s.append(now_s)
            queue.refused(ticket, now_s)
            queue.join(ticket, 5)
            assert queue.advance(99, now_s) is None
        assert queue.due_s is not None
        now_s = queue.due_s
    assert [round(later - sooner, 9) for sooner, later in pairwise(asked_s)] == [
        0.05,
        0.1,
        0.2,
        0.4,
        0.8,
        0.8,
    ]
    queue.reserved(ticket)
    queue.refused(ticket, 4.0)
    queue.join(ticket, 5)


def test_one_that_was_refused_and_does_not_come_back_holds_nobody_up_for_long() -> None:
    queue, (first, second, third) = queue_of(5, 5, 5)
    assert queue.advance(5, 0.1) is first
    queue.refused(first, 0.1)
    assert queue.advance(5, 0.2) is second, "as much as the first one wants may pass it"
    queue.reserved(second)
    assert queue.advance(5, 0.3) is None
    assert queue.due_s == pytest.approx(0.1 + RETURN_TIMEOUT_S)
    assert queue.advance(5, 0.1 + RETURN_TIMEOUT_S) is third
    queue.reserved(third)
    queue.join(first, 5)
    assert queue.advance(5, 2.0) is first


def test_a_large_one_is_passed_no_more_often_while_it_asks() -> None:
    queue, (large, *small) = queue_of(10, *[5] * 4)
    assert queue.advance(5, 0.1) is small[0]
    queue.reserved(small[0])
    assert queue.advance(0, PAUSE_S) is large, "though there seems to be no room"
    assert queue.advance(5, PAUSE_S) is small[1]
    queue.reserved(small[1])
    assert queue.advance(5, PAUSE_S) is None
    queue.refused(large, PAUSE_S)
    queue.join(large, 10)
    assert queue.advance(5, 2 * PAUSE_S + 1) is large


def test_where_there_is_nobody_to_ask_all_may_hear_that() -> None:
    queue, tickets = queue_of(5, 5, 5)
    assert [queue.advance(None, 0.1) for _ in range(4)] == [*tickets, None]


@pytest.mark.parametrize("seed", range(20))
def test_all_get_their_places_and_few_are_refused(seed: int) -> None:
    """A memory of 64 blocks that the queue knows of only now and then, and which others use too. A step takes
    half of the pause."""
    dice, queue = random.Random(seed), CapacityQueue(pause_s=lambda: PAUSE_S)
    free, known, ends = 64, 64, {0: [0]}
    came: dict[Ticket, int] = {}
    passed: dict[Ticket, int] = {}
    places = refusals = news = 0
    step = 0
    while step < 40 or len(queue):
        assert step < 2000, "somebody starves"
        freed = sum(ends.pop(step, []))
        free += freed
        if freed and dice.random() < 0.7:  # else it was another router's
            known, news = free, news + 1
        if step < 40:
            for _ in range(dice.randint(0, 3)):
                came[ticket := Ticket(order=(len(came), 0))] = step
                queue.join(ticket, dice.choice((3, 5, 8, 60)))
        while (ticket := queue.advance(known, step * PAUSE_S / 2)) is not None:
            if ticket.blocks > free:
                refusals, known = refusals + 1, min(known, ticket.blocks - 1)
                queue.refused(ticket, step * PAUSE_S / 2)
                queue.join(ticket, ticket.blocks)
                continue
            for other in came:
                if other.order < ticket.order and not other.has_reservation:
                    passed[other] = passed.get(other, 0) + ticket.blocks
            places, free, known = places + 1, free - ticket.blocks, max(known - ticket.blocks, 0)
            queue.reserved(ticket)
            ends.setdefault(step + dice.randint(1, 6), []).append(ticket.blocks)
        step += 1
    assert places == len(came)
    assert all(blocks <= ticket.blocks for ticket, blocks in passed.items())
    assert refusals <= news + step, "one for each word of room, or pause"
