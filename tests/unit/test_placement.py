from __future__ import annotations

import pytest

from kvcommons.engine.iteration_costs import IterationCosts, IterationWork
from kvcommons.engine.predictor import Predictor
from kvcommons.errors import CapacityExhausted, InvalidInput
from kvcommons.placement.auto import Auto, Costs
from kvcommons.placement.base import FreeBlocks, Next, PlacedPiece, Placement, SequenceLayout
from kvcommons.placement.choice import POLICIES, placement_of
from kvcommons.placement.fixed import Grow

COSTS = Costs(Predictor(), layers=2, block_bytes=1 << 20)


def policy(name: str, *, holder_blocks: int = 4) -> Placement:
    return placement_of(name, costs=COSTS, holder_blocks=holder_blocks)


def memory(free: int, sequences: int = 0) -> FreeBlocks:
    return FreeBlocks(free_blocks=free, sequences=sequences)


def pieces(layout: SequenceLayout) -> list[tuple[int, str]]:
    return [(piece.blocks, "away" if piece.away else "here") for piece in layout.pieces]


@pytest.mark.parametrize("name", ["local", "overflow"])
def test_what_fits_stays_here(name: str) -> None:
    placed = policy(name).arrive(blocks=8, found=0, free=memory(8, 3))
    assert placed == SequenceLayout(pieces=(PlacedPiece(blocks=8, away=False),))


def test_local_refuses_what_does_not_fit() -> None:
    with pytest.raises(CapacityExhausted, match="needs 9 blocks and this decode instance has 8 free"):
        policy("local").arrive(blocks=9, found=0, free=memory(8))
    assert policy("local").next_block(blocks=9, tail_blocks=9, tail_away=False) is Next.HERE


def test_overflow_keeps_the_newest_blocks_and_leaves_the_others_a_block_each() -> None:
    placed = policy("overflow").arrive(blocks=20, found=0, free=memory(8, 3))
    assert pieces(placed) == [(16, "away"), (4, "here")]
    assert pieces(policy("overflow").arrive(blocks=20, found=0, free=memory(2, 5))) == [(20, "away")]
    assert policy("overflow").next_block(blocks=9, tail_blocks=9, tail_away=True) is Next.HERE_FIRST


def test_offload_puts_all_on_the_pool_and_goes_on_there() -> None:
    placed = policy("offload").arrive(blocks=8, found=0, free=memory(100))
    assert (pieces(placed), placed.balance) == ([(8, "away")], True)
    assert policy("offload").next_block(blocks=8, tail_blocks=8, tail_away=True) is Next.AWAY


@pytest.mark.parametrize(
    ("blocks", "found", "free", "expected"),
    [
        (3, 0, 100, [(3, "here")]),
        (11, 0, 100, [(4, "here"), (4, "away"), (3, "away")]),
        (11, 3, 100, [(1, "here"), (4, "away"), (4, "away"), (2, "away")]),
        (5, 6, 100, [(4, "away"), (1, "away")]),  # found more than its share
        (5, 0, 3, [(2, "here"), (3, "away")]),
    ],
)
def test_grow_takes_a_holder_for_each_share(
    blocks: int, found: int, free: int, expected: list[tuple[int, str]]
) -> None:
    placed = policy("grow").arrive(blocks=blocks, found=found, free=memory(free))
    assert (pieces(placed), placed.spread) == (expected, True)


@pytest.mark.parametrize(
    ("tail_blocks", "tail_away", "where"),
    [
        (3, False, Next.HERE_FIRST),
        (3, True, Next.AWAY),
        (4, True, Next.NEW_HOLDER),
        (4, False, Next.NEW_HOLDER),
    ],
)
def test_grow_goes_to_a_new_holder_when_the_last_has_its_share(
    tail_blocks: int, tail_away: bool, where: Next
) -> None:
    assert policy("grow").next_block(blocks=20, tail_blocks=tail_blocks, tail_away=tail_away) is where


def costs(**known: float) -> Costs:
    """`known`: seconds of one of each amount; of others nothing was measured."""
    predictor = Predictor()
    predictor.costs = IterationCosts.of(known)
    predictor.most = IterationWork(**dict.fromkeys(known, 1))
    return Costs(predictor, layers=10, block_bytes=1 << 20)


def auto(**known: float) -> Auto:
    return Auto(costs(**known), holder_blocks=256, holders_max=16)


def test_auto_keeps_here_what_fits_where_rates_are_alike() -> None:
    chosen = auto().of(blocks=200, found=0, free=memory(1000))
    assert chosen.name == "overflow"
    assert pieces(chosen.arrive(blocks=200, found=0, free=memory(1000))) == [(200, "here")]


def test_auto_offloads_to_much_faster_memory_and_not_for_a_short_context() -> None:
    fast = auto(away_bytes=1e-11, exchanges=500e-6)
    assert fast.of(blocks=200, found=0, free=memory(1000)).name == "offload"
    assert fast.of(blocks=2, found=0, free=memory(1000)).name == "overflow"


def test_auto_spreads_a_long_context_over_holders_that_compute_at_once() -> None:
    chosen = auto().of(blocks=4096, found=0, free=memory(256))
    assert isinstance(chosen, Grow)


def test_the_query_goes_to_the_kv_for_few_tokens_and_the_kv_comes_for_many() -> None:
    """As in figures 11 and 12: moving KV costs more the longer the context is, a query does not."""
    slow = costs(exchanges=10e-3)
    assert not slow.pays_to_fetch(blocks=1000, tokens_left=10)
    assert slow.pays_to_fetch(blocks=1000, tokens_left=1000)
    assert slow.pays_to_fetch(blocks=1, tokens_left=10)
    assert slow.fetch_s(200) == pytest.approx(2 * slow.fetch_s(100))


def test_costs_follow_what_iterations_and_moves_take() -> None:
    predictor = Predictor()
    made = Costs(predictor, layers=10, block_bytes=1 << 20)
    assumed_s = made.token_s(here_blocks=0, away_blocks=100, holders=1)
    for blocks in (1, 200, 50, 100) * 100:
        here = IterationWork(rows=1, read_bytes=blocks << 20)
        predictor.learn(here, 1e-3 + blocks * 1e-4)
        away = IterationWork(rows=1, exchanges=1, away_bytes=blocks << 20)
        predictor.learn(away, 1e-3 + 20e-3 + blocks * 2e-4)
        made.moved(1 << 20, 3e-3)
    assert made.token_s(here_blocks=100, away_blocks=0, holders=1) == pytest.approx(10e-3, rel=0.1)
    assert made.token_s(here_blocks=0, away_blocks=100, holders=1) == pytest.approx(40e-3, rel=0.1)
    assert made.token_s(here_blocks=0, away_blocks=100, holders=4) == pytest.approx(25e-3, rel=0.1)
    assert assumed_s < 20e-3
    assert made.fetch_s(10) == pytest.approx(30e-3, rel=0.01)


@pytest.mark.parametrize("name", ["local", "overflow", "offload", "grow"])
def test_only_auto_has_another_way_where_nobody_lends(name: str) -> None:
    assert policy(name).otherwise() is None
    other = auto().otherwise()
    assert other.name == "overflow"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not one of local, overflow, offload, grow, auto"):
        policy("nearest")


def test_what_a_policy_asks_of_other_holders_agrees_with_what_it_does() -> None:
    """By `borrows` and `offloads` a stack is planned, before there is a policy with its costs."""
    for name in POLICIES:
        one = policy(name)
        small = one.arrive(blocks=2, found=0, free=memory(100))
        assert one.offloads == (small.local_blocks == 0)
        away = {one.next_block(blocks=4, tail_blocks=4, tail_away=there) for there in (False, True)}
        assert one.borrows == bool(away & {Next.HERE_FIRST, Next.AWAY, Next.NEW_HOLDER})
