"""Who asks decode for room next, and when."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from services.router.capacity.queue import BACK_S, TRY_S, Line, Ticket

PAUSE_S = 0.7


def line_of(*blocks: int) -> tuple[Line, list[Ticket]]:
    """A line in which choices of so many blocks wait, the first of which was refused at 0 s."""
    line = Line(pause_s=lambda: PAUSE_S)
    tickets = [Ticket(order=(number, 0)) for number in range(len(blocks))]
    line.join(tickets[0], blocks[0])
    assert line.advance(0, 0.0) is tickets[0]
    line.refused(tickets[0], 0.0)
    for ticket, size in zip(tickets, blocks, strict=True):
        line.join(ticket, size)
        assert line.advance(0, 0.0) is None
    return line, tickets


def test_with_room_for_all_nobody_waits_for_another() -> None:
    line, room = Line(pause_s=lambda: PAUSE_S), 30
    for number in range(3):
        ticket = Ticket(order=(number, 0))
        line.join(ticket, 10)
        assert line.advance(room, 0.0) is ticket
        room -= 10
    assert line.due_s is None
    last = Ticket(order=(3, 0))
    line.join(last, 10)
    assert line.advance(room, 0.0) is None, "there is none left, and the others have not been answered"
    line.leave(Ticket(order=(9, 0)))


def test_who_comes_when_nobody_waits_asks_whatever_is_known_of_room() -> None:
    line, ticket = Line(pause_s=lambda: PAUSE_S), Ticket(order=(0, 0))
    line.join(ticket, 10)
    assert line.advance(0, 0.0) is ticket


def test_they_ask_in_the_order_of_arrival_as_room_comes() -> None:
    line, (first, second, third) = line_of(5, 5, 5)
    assert line.advance(4, 0.1) is None
    assert line.advance(14, 0.1) is first
    assert line.advance(9, 0.1) is second, "there is room beside the first, whatever that hears"
    assert line.advance(4, 0.1) is None
    line.placed(first)
    line.refused(second, 0.1)
    assert line.advance(4, 0.1) is None
    line.join(second, 5)
    assert line.advance(5, 0.2) is second
    line.placed(second)
    assert line.advance(5, 0.2) is third


def test_one_that_comes_back_is_before_those_that_came_later() -> None:
    line, (first, second, third) = line_of(5, 5, 5)
    line.leave(second)
    assert line.advance(5, 0.1) is first
    line.placed(first)
    again = Ticket(order=second.order)  # its instance has died
    line.join(again, 6)
    assert line.advance(4, 0.2) is None
    assert line.advance(6, 0.3) is again
    line.placed(again)
    assert line.advance(6, 0.3) is third


@pytest.mark.parametrize("how", ["refused", "leaves", "leaves while it asks"])
def test_word_of_room_that_leads_nowhere_goes_on_to_the_next(how: str) -> None:
    line, (first, second) = line_of(5, 5)
    if how == "leaves":
        line.leave(first)
    else:
        assert line.advance(5, 0.1) is first
        assert line.advance(0, 0.1) is None
    if how == "refused":
        line.refused(first, 0.1)
        line.leave(first)  # and gives up
    elif how == "leaves while it asks":
        line.leave(first)
    assert line.advance(5, 0.1) is second


def test_smaller_ones_pass_a_large_one_up_to_its_own_size() -> None:
    line, (large, *small) = line_of(10, 4, 4, 4, 2)
    assert line.advance(4, 0.1) is small[0]
    line.refused(small[0], 0.1)
    assert large.passed_blocks == 0
    line.join(small[0], 4)
    for ticket in small[:2]:
        assert line.advance(4, 0.2) is ticket
        line.placed(ticket)
    assert line.advance(4, 0.1) is small[3], "4 more would be too many, 2 are not"
    line.placed(small[3])
    assert large.passed_blocks == 10
    assert line.advance(9, 0.1) is None
    assert line.advance(10, 0.1) is large
    line.placed(large)
    assert line.advance(4, 0.1) is small[2]


def test_the_first_asks_once_in_a_while_without_word_of_room() -> None:
    line, (first, second, third) = line_of(5, 5, 5)
    assert line.advance(0, 0.1) is None
    assert line.due_s == PAUSE_S
    assert line.advance(0, PAUSE_S - 0.01) is None
    assert line.advance(0, PAUSE_S) is first
    line.refused(first, 1.0)
    assert line.advance(0, 1.0) is None
    line.join(first, 5)
    assert line.advance(0, 1.2) is None
    assert line.due_s == 1.0 + PAUSE_S
    assert line.advance(0, 1.0 + PAUSE_S) is first
    assert line.advance(0, 1.0 + PAUSE_S) is None
    line.placed(first)
    assert line.advance(0, 2.0) is second, "what was known of room is wrong: the next one need not wait"
    line.refused(second, 2.0)
    line.join(second, 5)
    assert line.advance(0, 2.0 + PAUSE_S - 0.01) is None
    line.leave(second)
    assert line.advance(0, 2.5) is None, "the pause begins anew for whoever has become the first"
    assert line.advance(0, 2.5 + PAUSE_S) is third


def test_a_question_without_an_answer_holds_nobody_up_for_long() -> None:
    line, (first, second) = line_of(5, 5)
    assert line.advance(5, 0.1) is first
    assert line.advance(0, 1.0) is None
    assert line.due_s == 1.0 + PAUSE_S
    assert line.advance(0, 1.0 + PAUSE_S) is None, "not another one while the first may be answered"
    assert line.due_s == 0.1 + TRY_S
    assert line.advance(0, 0.1 + TRY_S) is second
    line.placed(second)
    line.placed(first)
    assert len(line) == 0


def test_one_that_is_refused_again_and_again_though_there_seems_to_be_room_asks_ever_less() -> None:
    line, ticket = Line(pause_s=lambda: PAUSE_S), Ticket(order=(0, 0))
    line.join(ticket, 5)
    asked_s, now_s = [], 0.0
    while now_s < 3:
        if line.advance(99, now_s) is ticket:
            asked_s.append(now_s)
            line.refused(ticket, now_s)
            line.join(ticket, 5)
            assert line.advance(99, now_s) is None
        assert line.due_s is not None
        now_s = line.due_s
    assert [round(later - sooner, 9) for sooner, later in pairwise(asked_s)] == [
        0.05,
        0.1,
        0.2,
        0.4,
        0.8,
        0.8,
    ]
    line.placed(ticket)
    line.refused(ticket, 4.0)
    line.join(ticket, 5)


def test_one_that_was_refused_and_does_not_come_back_holds_nobody_up_for_long() -> None:
    line, (first, second, third) = line_of(5, 5, 5)
    assert line.advance(5, 0.1) is first
    line.refused(first, 0.1)
    assert line.advance(5, 0.2) is second, "as much as the first one wants may pass it"
    line.placed(second)
    assert line.advance(5, 0.3) is None
    assert line.due_s == pytest.approx(0.1 + BACK_S)
    assert line.advance(5, 0.1 + BACK_S) is third
    line.placed(third)
    line.join(first, 5)
    assert line.advance(5, 2.0) is first


def test_a_large_one_is_passed_no_more_often_while_it_asks() -> None:
    line, (large, *small) = line_of(10, *[5] * 4)
    assert line.advance(5, 0.1) is small[0]
    line.placed(small[0])
    assert line.advance(0, PAUSE_S) is large, "though there seems to be no room"
    assert line.advance(5, PAUSE_S) is small[1]
    line.placed(small[1])
    assert line.advance(5, PAUSE_S) is None
    line.refused(large, PAUSE_S)
    line.join(large, 10)
    assert line.advance(5, 2 * PAUSE_S + 1) is large


def test_where_there_is_nobody_to_ask_all_may_hear_that() -> None:
    line, tickets = line_of(5, 5, 5)
    assert [line.advance(None, 0.1) for _ in range(4)] == [*tickets, None]


@pytest.mark.parametrize("seed", range(20))
def test_all_get_their_places_and_few_are_refused(seed: int) -> None:
    """A memory of 64 blocks that the line knows of only now and then, and which others use too. A step takes
    half of the pause."""
    dice, line = random.Random(seed), Line(pause_s=lambda: PAUSE_S)
    free, known, ends = 64, 64, {0: [0]}
    came: dict[Ticket, int] = {}
    passed: dict[Ticket, int] = {}
    places = refusals = news = 0
    step = 0
    while step < 40 or len(line):
        assert step < 2000, "somebody starves"
        freed = sum(ends.pop(step, []))
        free += freed
        if freed and dice.random() < 0.7:  # else it was another router's
            known, news = free, news + 1
        if step < 40:
            for _ in range(dice.randint(0, 3)):
                came[ticket := Ticket(order=(len(came), 0))] = step
                line.join(ticket, dice.choice((3, 5, 8, 60)))
        while (ticket := line.advance(known, step * PAUSE_S / 2)) is not None:
            if ticket.blocks > free:
                refusals, known = refusals + 1, min(known, ticket.blocks - 1)
                line.refused(ticket, step * PAUSE_S / 2)
                line.join(ticket, ticket.blocks)
                continue
            for other in came:
                if other.order < ticket.order and not other.has_place:
                    passed[other] = passed.get(other, 0) + ticket.blocks
            places, free, known = places + 1, free - ticket.blocks, max(known - ticket.blocks, 0)
            line.placed(ticket)
            ends.setdefault(step + dice.randint(1, 6), []).append(ticket.blocks)
        step += 1
    assert places == len(came)
    assert all(blocks <= ticket.blocks for ticket, blocks in passed.items())
    assert refusals <= news + step, "one for each word of room, or pause"
