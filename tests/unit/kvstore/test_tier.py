from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.tier import PAGE_BYTES, BlockShape, Slot, Tier

SMALL = BlockShape(model=b"s", layers=1, object_bytes=100)  # one page
LARGE = BlockShape(model=b"l", layers=3, object_bytes=PAGE_BYTES)  # three


def grow(tier: Tier, shape: BlockShape) -> int:
    slots = tier.growth_slots(shape)
    if slots:
        tier.add(tier.next_number(), shape, slots)
    return slots


def take_all(tier: Tier, shape: BlockShape) -> list[Slot]:
    taken = []
    while (slot := tier.take(shape)) is not None:
        taken.append(slot)
    return taken


@given(
    st.integers(0, 40),
    st.integers(1, 10),
    st.sampled_from([0, PAGE_BYTES]),
    st.lists(st.sampled_from([SMALL, LARGE]), max_size=20),
)
def test_growth_never_passes_the_capacity(
    pages: int, region_pages: int, overhead: int, shapes: list[BlockShape]
) -> None:
    tier = Tier(pages * PAGE_BYTES, region_pages * PAGE_BYTES, overhead_bytes=overhead)
    for shape in shapes:
        if grow(tier, shape):
            assert tier.fits(shape)
        assert tier.used_bytes <= tier.capacity_bytes
    slots = take_all(tier, SMALL) + take_all(tier, LARGE)
    assert len(set(slots)) == len(slots) == tier.occupied


def test_small_capacities_are_used_to_the_last_slot() -> None:
    tier = Tier(10 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert [grow(tier, SMALL) for _ in range(4)] == [4, 4, 2, 0]
    assert len(take_all(tier, SMALL)) == 10


def test_slots_come_back_and_models_do_not_mix() -> None:
    tier = Tier(6 * PAGE_BYTES, 3 * PAGE_BYTES)
    grow(tier, SMALL)
    grow(tier, LARGE)
    first, second, third = take_all(tier, SMALL)
    assert tier.take(LARGE) == Slot(2, 0)
    tier.give(second)
    assert tier.take(SMALL) == second
    assert tier.take(SMALL) is None
    assert {first, second, third} == {Slot(1, 0), Slot(1, 1), Slot(1, 2)}


def test_the_free_list_is_rebuilt_from_what_is_taken() -> None:
    tier = Tier(8 * PAGE_BYTES, 8 * PAGE_BYTES)
    tier.add(7, SMALL, 8)
    tier.restore(7, [1, 4])
    assert tier.occupied == 2
    assert [slot.place for slot in take_all(tier, SMALL)] == [0, 2, 3, 5, 6, 7]
    assert tier.next_number() == 8


def test_frozen_growth_leaves_slots_written_before() -> None:
    tier = Tier(8 * PAGE_BYTES, 4 * PAGE_BYTES)
    grow(tier, SMALL)
    written, failed = tier.take(SMALL), tier.take(SMALL)
    assert written is not None
    assert failed is not None
    tier.give_unwritten(failed)
    tier.growth_bytes = 0
    assert tier.take(SMALL) is None
    assert tier.growth_slots(SMALL) == 0
    tier.give(written)
    assert tier.take(SMALL) == written
    tier.growth_bytes = 3 * PAGE_BYTES
    assert tier.take(SMALL) == failed
    assert len(take_all(tier, SMALL)) == 2


def test_the_region_unused_for_longest_is_given_up() -> None:
    tier = Tier(8 * PAGE_BYTES, 2 * PAGE_BYTES)
    grow(tier, SMALL)
    grow(tier, SMALL)
    tier.used(Slot(1, 0), 5)
    tier.used(Slot(2, 0), 4)
    region = tier.oldest_other(LARGE)
    assert region is not None
    assert region.number == 2
    assert tier.oldest_other(SMALL) is None
