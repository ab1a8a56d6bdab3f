"""Continuous batching in several batches, and whether several pay."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from services.decode.staggering.pipelines import (
    Division,
    Fixed,
    Rotational,
    Scheme,
    Staggering,
    Timing,
    period_s,
)


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


def test_every_batch_has_its_share_of_each_holder() -> None:
    """Section 5.1.1: of every batch the KV is divided evenly over the pool's devices. In the order in which
    sequences come, holders and batches alternate alike: every second holder would have all of a batch."""
    division, able = Division(), dict.fromkeys(range(36), 4096)
    holders = {key: key % 6 for key in able}
    division.spread(2)
    first, second = division.compose(0, able, holders), division.compose(1, able, holders)
    assert [Counter(holders[key] for key in keys) for keys in (first, second)] == [
        Counter(dict.fromkeys(range(6), 3))
    ] * 2
    alone = Division()
    alone.compose(0, able, holders)
    alone.spread(2)
    kept = Counter(holders[key] for key in alone.compose(0, able, holders))
    assert kept == Counter(dict.fromkeys(range(6), 3)), "and when one batch is divided"


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


def took(sequences: float) -> Timing:
    """A layer whose weights are read in 1 ms; 5 us a sequence, and 50 us for its 1,000 tokens of KV."""
    return Timing(slice_s=1e-3 + 5e-6 * sequences, attend_s=5e-5 * sequences, network_s=5e-5)


def learnt(scheme: Scheme, **more: int) -> Staggering:
    staggering = Staggering(scheme, **more)
    for sequences in range(4, 260, 4):
        staggering.took_alone(sequences, sequences * 1000, took(sequences))
    return staggering


def test_pipelining_is_on_only_where_the_batch_is_large_enough() -> None:
    """Section 6.1: with few sequences attention is short beside the reading of weights, which two batches
    would do twice."""
    assert Staggering(Rotational(2)).decide(64, 64_000) == 1, "nothing was measured"
    staggering = learnt(Rotational(2))
    assert [staggering.decide(size, size * 1000) for size in (4, 8, 16)] == [1, 1, 1]
    assert staggering.gain(8, 8000) < 0.75, "nearly twice the latency"
    assert staggering.decide(256, 256_000) == 2
    assert staggering.gain(256, 2_000) < 1, "short contexts: little attention to hide"
    assert staggering.decide(3, 900_000) == 1, "nothing to divide"


@pytest.mark.parametrize(("batches", "sequences"), [(2, 120), (3, 24)])
def test_the_gain_is_that_of_the_schedule(batches: int, sequences: int) -> None:
    scheme = Rotational(batches)
    whole_s = period_s(Fixed(scheme.replicas), took(sequences / scheme.replicas))
    wanted = whole_s / period_s(scheme, took(sequences / batches))
    assert learnt(scheme).gain(sequences, sequences * 1000) == pytest.approx(wanted, rel=0.02)
    assert wanted > 1.05


def test_what_was_promised_and_not_kept_is_given_up_and_tried_again() -> None:
    """Replicas and pool on the same cores: two batches at a time disturb each other."""
    staggering, alone_s = learnt(Rotational(2), retry_after=50), took(64).alone_s
    assert staggering.decide(64, 64_000) == 2
    for _ in range(6):
        staggering.took_staggered(64, 64_000, 3 * alone_s)  # until they are staggered
        assert staggering.decide(64, 64_000) == 2
    for _ in range(20):
        staggering.took_staggered(64, 64_000, 0.95 * alone_s)
        assert staggering.decide(64, 64_000) == 2, "what is on stays on while it loses nothing"
    for _ in range(20):
        staggering.took_staggered(64, 64_000, 1.2 * alone_s)
    assert staggering.decide(64, 64_000) == 1
    for _ in range(50):
        staggering.took_alone(64, 64_000, took(64))
        assert staggering.decide(64, 64_000) == 1
    assert staggering.gain(200, 200_000) > 1.1, "of such a batch nothing is known yet"
    staggering.took_alone(64, 64_000, took(64))
    assert staggering.decide(64, 64_000) == 2


def test_batches_of_one_size_say_nothing_of_others_so_a_trial_does() -> None:
    """Nothing is known of half the batch: that it takes half as long is the best that can be."""
    staggering = Staggering(Rotational(2))
    for _ in range(5):
        staggering.took_alone(64, 64_000, Timing(slice_s=1e-3, attend_s=1e-3, network_s=1e-4))
    assert staggering.gain(64, 64_000) == pytest.approx(2.1 / 1.1)
    assert staggering.decide(64, 64_000) == 2
    for _ in range(4 * 2):
        assert staggering.decide(64, 64_000) == 2
        staggering.took_staggered(64, 64_000, 2.2e-3)
    assert staggering.decide(64, 64_000) == 1


def test_where_even_the_best_does_not_pay_nothing_is_tried() -> None:
    staggering = Staggering(Rotational(2))
    for _ in range(100):
        staggering.took_alone(64, 64_000, Timing(slice_s=1e-3, attend_s=4e-5, network_s=2e-5))
        assert staggering.decide(64, 64_000) == 1


@pytest.mark.parametrize("seed", range(8))
def test_with_nobody_in_the_pool_nothing_is_tried(seed: int) -> None:
    """Whatever iterations took: others want the same cores, and what a line through that says of a smaller
    batch would be less than nothing."""
    staggering, draw = Staggering(Rotational(2)), random.Random(seed)
    for _ in range(400):
        sequences = draw.choice((4, 5, 6))
        disturbed = draw.choice((1.0, 1.0, 1.0, 4.0)) if sequences == 6 else 1.0
        staggering.took_alone(sequences, sequences * 100, Timing(slice_s=1e-4 * disturbed, attend_s=0.0))
        assert staggering.decide(sequences, sequences * 100) == 1


@pytest.mark.parametrize("batches", [2, 3])
def test_no_sequences_and_no_time_are_no_gain(batches: int) -> None:
    """Where nobody runs, attention and slices take nothing, and without a network nor does anything else."""
    here = Timing(slice_s=1e-3, attend_s=1e-4)
    for timing, staggered_s in ((here, None), (here, 0.0), (Timing(slice_s=0.0, attend_s=0.0), None)):
        staggering = Staggering(Rotational(batches))
        staggering.took_alone(64, 64_000, timing)
        if staggered_s is not None:
            staggering.took_staggered(64, 64_000, staggered_s)
        assert staggering.gain(0, 0) == 0.0
        assert staggering.decide(0, 0) == batches - 1
        if timing is not here or staggered_s is not None:
            assert staggering.gain(64, 64_000) == 0.0
