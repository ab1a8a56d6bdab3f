"""Sampling: greedy, noise by (seed, choice, position), filters, penalties, logprobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcommons.backend.choice import choose
from kvcommons.errors import InvalidInput, Unprocessable
from kvcommons.model.sampling import SamplingParams, SamplingRow, uniform
from kvcommons.model.sampling import sample as sample_on
from kvcommons.pb import common_pb2 as pb

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
NOISE = (0.721498101181894, 0.1666769848294164)  # of (0, 0, 0) and (2**64 - 1, 1, 123456)


def sample(logits: Tensor, rows: Sequence[SamplingRow], device: str = "cpu") -> list[pb.SampledToken]:
    """logits in host memory."""
    place = choose(device).device
    return sample_on(place.upload(logits), rows, place)


def row(position: int = 0, generated: dict[int, int] | None = None, **params: Any) -> SamplingRow:
    return SamplingRow(params=SamplingParams(**params), position=position, generated=generated or {})


def logits_of(shares: list[float], rows: int = 1) -> Tensor:
    return torch.tensor([shares]).log().expand(rows, -1).clone()


def draws(shares: list[float], count: int, **params: Any) -> Counter[int]:
    rows = [row(position, **({"temperature": 1.0} | params)) for position in range(count)]
    return Counter(one.token for one in sample(logits_of(shares, count), rows))


@pytest.mark.parametrize("device", DEVICES)
def test_temperature_zero_is_the_argmax(device: str) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    sampled = sample(logits, [row(position) for position in range(7, 12)], device)
    assert [one.token for one in sampled] == logits.argmax(-1).tolist()
    assert [one.position for one in sampled] == list(range(7, 12))
    assert not any(one.logprob or one.top for one in sampled)


def test_noise_is_pinned() -> None:
    """Other numbers would make resumed turns of an older process go on differently."""
    assert uniform(0, 0, 0) == NOISE[0]
    assert uniform(2**64 - 1, 1, 123456) == NOISE[1]
    numbers = [uniform(7, choice, position) for choice in range(4) for position in range(500)]
    assert len(set(numbers)) == 2000
    assert 0.48 < sum(numbers) / 2000 < 0.52


def test_draws_follow_the_distribution() -> None:
    counts = draws([0.5, 0.25, 0.2, 0.05], 8000)
    for token, share in enumerate([0.5, 0.25, 0.2, 0.05]):
        assert abs(counts[token] / 8000 - share) < 0.02
    sharper = draws([0.5, 0.25, 0.2, 0.05], 4000, temperature=0.5)
    assert abs(sharper[0] / 4000 - 0.25 / (0.25 + 0.0625 + 0.04 + 0.0025)) < 0.03
    assert draws([0.5, 0.3, 0.2], 200, temperature=1e-6) == {0: 200}


@pytest.mark.parametrize("device", DEVICES)
def test_a_draw_depends_on_nothing_but_its_row(device: str) -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    rows = [
        row(5, temperature=0.8, seed=9),
        row(5, temperature=0.8, seed=9, choice=1),
        row(6, temperature=1.2, seed=9, top_p=0.9),
        row(5),
        row(8, temperature=0.7, top_k=3),
        row(8, {4: 2}, temperature=0.7, presence_penalty=1.0, min_p=0.1),
    ]
    together = [one.token for one in sample(logits, rows, device)]
    alone = [sample(logits[i : i + 1], [rows[i]])[0].token for i in range(6)]
    assert together == alone
    backwards = [one.token for one in sample(logits.flip(0), rows[::-1], device)]
    assert together == backwards[::-1]


def test_choices_and_seeds_differ() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {
        sample(logits, [row(3, temperature=1.0, seed=seed, choice=choice)])[0].token
        for seed in range(5)
        for choice in range(5)
    }
    assert len(tokens) > 20


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 2}),
        ({"top_k": 1}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 2}),
        ({"top_p": 0.95}, {0, 1, 2}),
        ({"min_p": 0.55}, {0, 2}),
        ({"top_k": 3, "top_p": 0.87}, {0, 2}),  # of the three that are left, two have 0.88
        ({"top_p": 1e-9}, {0}),
    ],
)
def test_filters_keep_the_most_probable(params: dict[str, Any], kept: set[int]) -> None:
    assert set(draws([0.5, 0.12, 0.34, 0.04], 600, **params)) == kept


def test_a_flat_distribution_is_cut_right_beyond_the_likely_tokens() -> None:
    shares = torch.linspace(1, 2, 5000).double()
    shares /= shares.sum()
    rows = [row(position, temperature=1.0, top_p=0.5) for position in range(3000)]
    tokens = [one.token for one in sample(shares.log().float().expand(3000, -1), rows)]
    lowest = int((torch.cumsum(shares.flip(0), 0) < 0.5).sum())
    assert min(tokens) >= 5000 - lowest - 2
    assert min(tokens) < 5000 - lowest + 30


def test_bias_and_penalties_change_the_choice() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])

    def greedy(generated: dict[int, int] | None = None, **params: Any) -> int:
        return sample(logits, [row(0, generated, **params)])[0].token

    assert greedy() == 0
    assert greedy(logit_bias=((3, 5.0), (99, 100.0))) == 3
    assert greedy(logit_bias=((0, -100.0),)) == 1
    assert greedy({0: 3}, presence_penalty=0.9) == 0
    assert greedy({0: 3}, presence_penalty=1.1) == 1
    assert greedy({0: 3}, frequency_penalty=0.4) == 1
    assert greedy({0: 3, 1: 1}, frequency_penalty=0.9) == 1
    assert greedy({0: 9}, logit_bias=((0, 10.0),), presence_penalty=1.0) == 0
    assert torch.equal(logits, torch.tensor([[2.0, 1.0, 0.0, -1.0]]))


def test_a_repetition_penalty_divides_what_is_likely_and_multiplies_what_is_not() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])

    def greedy(seen: tuple[int, ...], penalty: float, **params: Any) -> int:
        params |= {"repetition_penalty": penalty}
        one = SamplingRow(params=SamplingParams(**params), position=0, generated={}, seen=seen)
        return sample(logits, [one])[0].token

    assert greedy((0,), 1.3) == 0
    assert greedy((0,), 1.4) == 1
    assert greedy((0, 1), 1.4) == 0
    assert greedy((0, 1), 1.4, logit_bias=((0, -100.0), (1, -100.0))) == 2
    assert greedy((0, 1, 2), 1.6, logit_bias=((0, -100.0), (1, -100.0))) == 3
    assert greedy((3,), 0.5, logit_bias=((0, -9.0), (1, -9.0))) == 3, "below 1 what came is likelier"
    assert torch.equal(logits, torch.tensor([[2.0, 1.5, -1.0, -1.5]]))


def test_tokens_that_are_withheld_do_not_come() -> None:
    logits = logits_of([0.9, 0.06, 0.04], 200)
    rows = [
        SamplingRow(
            params=SamplingParams(temperature=1.0, logit_bias=((0, 50.0),)),
            position=at,
            generated={},
            withheld=(0,),
        )
        for at in range(200)
    ]
    assert {one.token for one in sample(logits, rows)} == {1, 2}


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = logits_of([0.5, 0.3, 0.2], 3)
    sampled = sample(
        logits,
        [
            row(0, logprobs=True, top_logprobs=2, logit_bias=((2, 100.0),)),
            row(0, temperature=1.0, top_logprobs=3),
            row(0, {0: 1}, logprobs=True, frequency_penalty=2.0),
        ],
    )
    assert sampled[0].token == 2
    assert sampled[0].logprob == pytest.approx(math.log(0.2))
    assert [(top.token, round(math.exp(top.logprob), 4)) for top in sampled[0].top] == [(0, 0.5), (1, 0.3)]
    assert not sampled[1].top
    assert (sampled[2].token, len(sampled[2].top)) == (1, 0)
    assert sampled[2].logprob == pytest.approx(math.log(0.3))


def test_parameters_are_read_from_the_proto() -> None:
    message = pb.Sampling(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=2**63, choice=1, frequency_penalty=0.1,
        presence_penalty=0.2, logit_bias={5: 1.0, 3: -1.0}, logprobs=True, top_logprobs=2,
        repetition_penalty=1.5, min_tokens=7,
    )  # fmt: skip
    params = SamplingParams.of(message)
    assert params == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=2**63, choice=1, frequency_penalty=0.1,
        presence_penalty=0.2, logit_bias=((3, -1.0), (5, 1.0)), logprobs=True, top_logprobs=2,
        repetition_penalty=1.5, min_tokens=7,
    )  # fmt: skip
    assert SamplingParams.of(pb.Sampling()) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.inf), ("temperature", -1.0), ("temperature", math.nan), ("top_p", 1.5),
        ("min_p", -1.0), ("frequency_penalty", math.inf), ("presence_penalty", math.nan),
        ("repetition_penalty", -1.0), ("top_logprobs", 339_238_091),
    ],
)  # fmt: skip
def test_what_no_logits_can_be_changed_by_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=name) as refused:
        SamplingParams.of(pb.Sampling(**{name: value}))  # type: ignore[arg-type]
    assert refused.value.param == f"sampling.{name}"


def test_a_bias_is_a_number() -> None:
    with pytest.raises(InvalidInput, match="logit_bias"):
        SamplingParams.of(pb.Sampling(logit_bias={1: math.nan}))


def bits(*tokens: int) -> bytes:
    mask = bytearray(4)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_leaves_what_it_allows(device: str) -> None:
    """Rows beside it are drawn as without; the mask may be shorter and longer than the logits' rows."""
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(3))
    plain = [row(at, temperature=1.0, seed=at, logprobs=True, top_logprobs=3) for at in range(4)]
    held = [replace(plain[0], mask=lambda: bits(9, 30)), plain[1], *plain[2:]]
    held[3] = replace(plain[3], params=SamplingParams(logprobs=True), mask=lambda: bits(17) + bytes(9))
    without, masked = sample(logits, plain, device), sample(logits, held, device)
    assert masked[1:3] == without[1:3]
    assert masked[0].token in (9, 30)
    assert {one.token for one in masked[0].top} == {9, 30}
    assert math.isclose(sum(math.exp(one.logprob) for one in masked[0].top), 1.0, rel_tol=1e-5)
    assert (masked[3].token, masked[3].logprob) == (17, 0.0)


def test_a_mask_that_fails_is_its_rows_error() -> None:
    def fail() -> bytes:
        raise Unprocessable("too complex")

    rows = [row(5), replace(row(6), mask=fail), replace(row(7), mask=lambda: bits(1))]
    sampled = sample(torch.randn(3, 20, generator=torch.Generator().manual_seed(4)), rows)
    assert [one.HasField("error") for one in sampled] == [False, True, False]
    assert (sampled[1].error.code, sampled[1].error.message) == ("unprocessable_entity", "too complex")
    assert sampled[2].token == 1
