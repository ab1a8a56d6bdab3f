"""How many mini-batches pay, by what messages and attention were measured to take."""

from __future__ import annotations

import pytest

from kvcommons.config import load
from kvcommons.engine.remote.division import ExchangeSize
from kvcommons.errors import InvalidInput
from services.decode.config import DecodeConfig
from services.decode.staggering.mini_batches import MiniBatches

KV_BYTE_S = 1e-10  # 10 GB/s
LATENCY_S = 100e-6


def exchange(rows: int, *, tokens: int = 512) -> ExchangeSize:
    """Of a model with 32 heads of 128 in float32 on the wire, 8 of KV in bfloat16."""
    return ExchangeSize(
        rows=rows,
        asked_bytes=rows * (32 * 128 * 4 + 2 * 8 * 128 * 2),
        answered_bytes=rows * 32 * 129 * 4,
        read_bytes=rows * tokens * 2 * 8 * 128 * 2,
    )


def measured(network_byte_s: float, *sizes: int) -> MiniBatches:
    decision = MiniBatches()
    for _ in range(200):
        for rows in sizes:
            one = exchange(rows)
            size = one.asked_bytes + one.answered_bytes
            decision.observe(
                one,
                network_s=LATENCY_S + size * network_byte_s,
                computed_s=one.read_bytes * KV_BYTE_S,
            )
    return decision


def test_one_before_anything_was_measured() -> None:
    assert MiniBatches().decide(exchange(64)) == 1


def test_as_many_as_was_set() -> None:
    assert MiniBatches(4).decide(exchange(1)) == 4
    assert MiniBatches(4).decide(exchange(1), busy=True) == 4


def test_more_than_connections_are_kept_for_cannot_be_set() -> None:
    with pytest.raises(InvalidInput, match="mini_batches"):
        load("decode", DecodeConfig, environ={}, flags={"mini_batches": "9"})


def test_one_where_bytes_cost_little() -> None:
    """Shared memory: 10 GB a second, while attention reads as fast 16 times as much."""
    assert measured(1e-10, 20, 64).decide(exchange(64)) == 1
    # And where messages are small, however slow the network is.
    assert measured(1e-8, 1).decide(exchange(1, tokens=2048)) == 1
    assert measured(1e-7, 8).decide(exchange(3, tokens=2048)) == 2  # no more than rows


def test_several_over_a_network() -> None:
    """A gigabyte a second: 2.5 ms for messages beside 13 of attention; with less attention to hide behind,
    and so a larger share that can be hidden, more."""
    few = measured(1e-9, 64).decide(exchange(64))
    assert few >= 2
    assert measured(1e-9, 64).decide(exchange(64), busy=True) == 1
    assert measured(4e-9, 64).decide(exchange(64)) > few


@pytest.mark.parametrize("sizes", [(64,), (8, 32, 64)])
def test_the_line_through_what_was_observed(sizes: tuple[int, ...]) -> None:
    """Of one size alone, an empty message counts as what it takes on one host."""
    decision = measured(2e-9, *sizes)
    assert decision.byte_s == pytest.approx(2e-9, rel=0.01)
    assert decision.empty_s == pytest.approx(LATENCY_S, rel=0.05)


def test_stages_overlap() -> None:
    """Three equal stages: 3 with one mini-batch, 1 + 2 / n with n."""
    decision = measured(1e-9, 16, 64)
    size = 1_000_000
    even = ExchangeSize(rows=64, asked_bytes=size, answered_bytes=size, read_bytes=10 * size)
    stage_s = size * decision.byte_s
    for number in (1, 2, 4):
        expected_s = number * decision.empty_s + stage_s * (1 + 2 / number)
        assert decision.seconds(even, number) == pytest.approx(expected_s, rel=0.01)


def test_what_is_about_as_good_is_kept() -> None:
    decision = measured(4e-9, 16, 64)
    chosen = decision.decide(exchange(64))
    assert chosen > 2
    assert decision.decide(exchange(48)) == chosen
    assert decision.decide(exchange(1)) == 1


def test_numbers_that_take_longer_than_computed_are_given_up_and_tried_again() -> None:
    """All but two take three times what was computed."""
    decision, whole = measured(4e-9, 16, 64), exchange(64)
    truth = {n: decision.seconds(whole, n) * (1.0 if n <= 2 else 3.0) for n in (1, 2, 4, 8)}
    chosen = []
    for _ in range(1500):
        chosen.append(decision.decide(whole))
        for _ in range(16):
            decision.took(whole, chosen[-1], truth[chosen[-1]])
    assert chosen[0] > 2
    assert chosen[10:100] == [2] * 90
    assert max(chosen[100:]) > 2
    assert chosen.count(2) > 1300


def test_a_network_that_recovers_is_noticed() -> None:
    """50 MB a second for some thousand iterations, then 2 GB: what divided messages take does not tell."""
    decision, whole, layers = MiniBatches(), exchange(16), 16

    def iterate(network_byte_s: float) -> int:
        number = decision.decide(whole)
        there_s, back_s = whole.asked_bytes * network_byte_s, whole.answered_bytes * network_byte_s
        attend_s = whole.read_bytes * KV_BYTE_S
        stages_s = there_s + attend_s + back_s
        pieces_s = (stages_s + (number - 1) * max(there_s, attend_s, back_s)) / number
        for _ in range(layers):
            if number == 1:
                decision.observe(whole, network_s=LATENCY_S + there_s + back_s, computed_s=attend_s)
            # Messages that follow each other disturb each other.
            decision.took(whole, number, number * 4 * LATENCY_S - 3 * LATENCY_S + pieces_s)
        return number

    slow = [iterate(2e-8) for _ in range(3000)]
    assert 0 < slow[1000:].count(1) <= 2000 / 50  # of whole ones not many
    quick = [iterate(5e-10) for _ in range(2000)]
    assert quick[-500:].count(1) == 500
