"""Rows of plans, and changes of one plan into the next."""

from __future__ import annotations

import random

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.holder.plan import PlanRow, arrangement, difference
from kvcommons.holder.segments import SegmentRef
from kvcommons.pb import data_pb2 as pb


def row(handle: int, position: int = 5) -> PlanRow:
    return PlanRow.of(SegmentRef(handle=handle, epoch=7), position=position, length=position + 1, append=True)


def test_a_row_moves_on_by_a_token_a_step() -> None:
    appends, stays = row(1), row(2)._replace(append=False)
    assert (appends.moved(3).position, appends.moved(3).length) == (8, 9)
    assert (stays.moved(3).position, stays.moved(3).length) == (8, 6)
    assert appends.moved(3).moved(-3) == appends
    assert PlanRow.read(appends.message()) == appends


@pytest.mark.parametrize("seed", range(20))
def test_a_difference_makes_the_rows_after_of_those_before(seed: int) -> None:
    """Whatever is removed, added, moved, or there twice; and it says nothing of what stays."""
    chance = random.Random(seed)
    for _ in range(50):
        before = [row(chance.randrange(12)) for _ in range(chance.randint(1, 10))]
        after = [row(chance.randrange(12)) for _ in range(chance.randint(1, 10))]
        if chance.random() < 0.5:
            after = [one for one in before if chance.random() < 0.8]
        change = difference(before, after)
        order = arrangement(len(before), change.removed, [index for index, _ in change.placed])
        placed = dict(change.placed)
        assert [placed[at] if index is None else before[index] for at, index in enumerate(order)] == after
    unique = [row(handle) for handle in range(9)]
    assert difference(unique, unique) == ([], [])
    assert difference(unique, [*unique[:4], *unique[5:], row(77)]) == ([4], [(8, row(77))])


def test_a_change_says_no_more_than_what_changes() -> None:
    """Of 96 rows two have new blocks, about as many as fill them in an iteration."""
    rows = [row(handle) for handle in range(96)]
    after = [one.moved(1) for one in rows]
    for index in (17, 80):
        after[index] = after[index]._replace(generation=after[index].generation + 1)
    removed, placed = difference([one.moved(1) for one in rows], after)
    assert (removed, [index for index, _ in placed]) == ([17, 80], [17, 80])
    opening = pb.OpenPlan(plan=1, rows=[one.message() for one in rows])
    change = pb.ChangePlan(plan=1, revision=1, step=1, removed=removed)
    for index, one in placed:
        change.placed.add(index=index, row=one.message())
    assert change.ByteSize() < opening.ByteSize() / 20


@pytest.mark.parametrize(
    ("removed", "placed"),
    [([3], []), ([1, 0], []), ([0, 0], []), ([], [4]), ([], [1, 1]), ([0], [1, 0])],
)
def test_a_change_that_cannot_be_is_refused(removed: list[int], placed: list[int]) -> None:
    with pytest.raises(InvalidInput, match="out of order, or beyond"):
        arrangement(3, removed, placed)
