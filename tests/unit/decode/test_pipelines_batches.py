"""Continuous batching in several batches, and whether several pay."""

from __future__ import annotations

import random

import pytest

from services.decode.pipelines import Division, Fixed, Rotational, Staggering, Timing, period_s


def test_one_batch_has_all() -> None:
    division = Division()
    assert division.compose(0, {3: 10, 1: 500, 2: 7}) == [1, 2, 3]
    assert division.compose(0, {3: 11, 2: 8, 4: 1}) == [2, 3, 4]


def test_spreading_divides_sequences_and_their_kv() -> None:
    division, able = Division(), dict.fromkeys(range(8), 100)
    division.compose(0, able)
    division.spread(2)
    assert division.compose(0, able) == [0, 1, 2, 3], "the youngest go over"
    assert division.compose(1, able) == [4, 5, 6, 7]
    division.spread(1)
    assert division.compose(1, able) == []
    assert division.compose(0, able) == list(range(8))


def test_a_new_sequence_joins_the_lighter_batch() -> None:
    division = Division()
    division.spread(2)
    able = dict.fromkeys(range(4), 100)
    first, second = division.compose(0, able), division.compose(1, able)
    assert len(first) == len(second) == 2
    for gone in first:
        division.leave(gone)
        del able[gone]
    able |= {9: 100}
    assert division.compose(1, able) == second
    assert division.compose(0, able) == [9]


def test_long_sequences_do_not_stand_together() -> None:
    division = Division()
    division.spread(2)
    able = {key: 8000 if key < 4 else 100 for key in range(16)}
    batches = [division.compose(0, able), division.compose(1, able)]
    batches[0] = division.compose(0, able)
    assert [sum(key < 4 for key in batch) for batch in batches] == [2, 2]
    assert sorted(map(len, batches)) == [8, 8]


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_runs_twice_or_never_and_batches_stay_even(seed: int) -> None:
    """Batches take turns while sequences come, go and grow, and the number of batches changes."""
    dice, division, able = random.Random(seed), Division(), dict[int, int]()
    under_way: dict[int, list[int]] = {}
    waited: dict[int, int] = {}
    for step in range(600):
        for _ in range(dice.choice((0, 0, 1, 4))):
            if len(able) < 40:
                able[len(waited)] = dice.choice((50, 100, 3000))
                waited[len(waited)] = 0
        if step % 100 == 99:
            division.spread(dice.choice((1, 2, 3)))
        batch = step % 3
        for key in under_way.pop(batch, []):
            if dice.random() < 0.05:
                division.leave(key)
                del able[key]
            else:
                able[key] += 1
        chosen = division.compose(batch, able)
        assert chosen == sorted(set(chosen) & able.keys())
        assert not set(chosen) & {key for keys in under_way.values() for key in keys}
        under_way[batch] = chosen
        for key in able:
            waited[key] = 0 if any(key in keys for keys in under_way.values()) else waited[key] + 1
        assert all(waited[key] <= 6 for key in able), "each runs within two rounds"
        if 90 < step % 100 < 99 and len(able) > 12:
            loads = [
                sum(1 / len(able) + able[key] / sum(able.values()) for key in keys if key in able)
                for number, keys in under_way.items()
                if number < division.batches
            ]
            assert max(loads) - min(loads) < 0.6 * 2 / division.batches


def measured(pair: Staggering, sequences: int, tokens: int, *, contended: float = 1.0) -> None:
    """A layer whose weights are read in 1 ms: 5 us a sequence, 1 us for 20 tokens of KV."""
    slow = contended if pair.on else 1.0
    pair.observe(
        sequences,
        tokens,
        Timing(
            slice_s=slow * (1e-3 + 5e-6 * sequences), attend_s=slow * tokens * 5e-8, network_s=slow * 5e-5
        ),
    )


def test_pipelining_is_on_only_where_the_batch_is_large_enough() -> None:
    """Section 6.1: with few sequences attention is short beside the reading of weights, which two batches
    would do twice."""
    pair = Staggering(Rotational(2))
    assert pair.decide(64, 64 * 1000) == 1, "nothing was measured"
    for sequences in range(4, 260, 4):
        measured(pair, sequences, sequences * 1000)
    assert [pair.decide(size, size * 1000) for size in (4, 8, 16)] == [1, 1, 1]
    assert pair.gain(8, 8000) < 0.75, "nearly twice the latency"
    assert pair.decide(256, 256_000) == 2
    assert pair.gain(64, 64_000) == pytest.approx((1e-3 + 64 * 5e-6 + 3.2e-3 + 5e-5) / 3.2e-3, rel=0.02), (
        "the pool is busy all the time then"
    )
    assert pair.decide(256, 2_000) == 1, "short contexts: little attention to hide"
    assert pair.decide(3, 900_000) == 1, "nothing to divide"


def test_what_was_promised_and_not_kept_is_given_up() -> None:
    """Replicas and pool on the same cores: two batches at a time disturb each other."""
    pair = Staggering(Rotational(2), retry_after=50)
    for sequences in range(4, 130, 4):
        measured(pair, sequences, sequences * 1000)
    assert pair.decide(64, 64_000) == 2
    for _ in range(20):
        measured(pair, 32, 32_000, contended=2.0)
    assert pair.decide(64, 64_000) == 1
    for _ in range(50):
        measured(pair, 64, 64_000)
        assert pair.decide(64, 64_000) == 1
    measured(pair, 64, 64_000)
    assert pair.decide(64, 64_000) == 2, "it is tried again later"


def test_the_gain_is_that_of_the_schedule() -> None:
    pair = Staggering(Rotational(3))
    for sequences in range(4, 400, 4):
        measured(pair, sequences, sequences * 1000)

    def timing(sequences: float) -> Timing:
        return Timing(slice_s=1e-3 + 5e-6 * sequences, attend_s=sequences * 5e-5, network_s=5e-5)

    wanted = period_s(Fixed(2), timing(60)) / period_s(Rotational(3), timing(40))
    assert pair.gain(120, 120_000) == pytest.approx(wanted, rel=0.02)
