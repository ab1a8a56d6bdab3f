"""A prediction changes how many tokens an iteration brings, and no token: real instances beside transformers,
and beside instances that verify nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from kvcommons.pb import common_pb2
from tests.contract.engine_drafts import MOST, counted, outcome
from tests.contract.engine_stack import Stack
from tests.contract.engine_turns import Turn, prompt, turn

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("all_drafts")]
pytest_plugins = ("tests.contract.engine_fixtures",)

NEW = 60
# Of a model that was never trained, such an answer repeats nothing of its own.
SEEDED = common_pb2.Sampling(temperature=1.0, top_p=0.95, seed=7, choice=1)
TENANTS = itertools.count()


def used(made: Turn) -> tuple[int, int]:
    """Predicted tokens that were accepted, and rejected."""
    accepted = sum(token.accepted_prediction for token in made.sampled)
    return accepted, sum(token.rejected_prediction_tokens for token in made.sampled)


def half_right(answer: Sequence[int]) -> list[int]:
    """A token is another one, one is left out, one is put in, and the end is another one."""
    wrong = [1] * 10
    return [*answer[:9], 1, *answer[10:20], *answer[21:30], 1, *answer[30:40], *wrong]


class Asked:
    """The same prompt again and again, each time by a tenant whose earlier answers nobody knows."""

    def __init__(
        self, engines: Stack, prefill: Any, decode: Any, tokens: Sequence[int], **changes: Any
    ) -> None:
        self._of = prefill, decode, engines.model, tokens
        self._changes = changes

    async def __call__(self, prediction: Sequence[int] = (), **changes: Any) -> Turn:
        tenant = f"t{next(TENANTS)}"
        known = {"prediction": prediction, "tenant": tenant} | self._changes | changes
        return await turn(*self._of, NEW, **known).run()


@pytest.mark.parametrize("local", [False, True], ids=["prefill", "decode computes"])
async def test_tokens_are_the_reference(engines: Stack, local: bool) -> None:
    """Whoever computes the prompt."""
    prefill = None if local else await engines.prefill()
    decode = await engines.decode(max_draft_tokens=MOST, max_local_prefill_tokens=4096 if local else 0)
    tokens, expected = engines.reference.prompt(40, NEW)
    ask = Asked(engines, prefill, decode, tokens)
    for prediction in ((), expected, half_right(expected), prompt(NEW, 5), expected[:5], [*expected, 7, 8]):
        made = await ask(prediction)
        assert made.tokens == expected
        assert bool(used(made)[0]) == (list(prediction[:2]) == expected[:2])
    await engines.idle("decode")


async def undrafted(engines: Stack) -> tuple[Any, Any, list[int], list[int]]:
    """An instance for prompts, one that drafts nothing, a prompt, and what its seeded answer is."""
    prefill, plain = await engines.prefill(), await engines.decode("plain", max_draft_tokens=0)
    of = prompt(30, 1)
    return prefill, plain, of, (await Asked(engines, prefill, plain, of, sampling=SEEDED)()).tokens


async def test_tokens_are_those_without_and_come_sooner(engines: Stack) -> None:
    prefill, plain, of, expected = await undrafted(engines)
    decode = await engines.decode(max_draft_tokens=MOST)
    ask = Asked(engines, prefill, decode, of, sampling=SEEDED)

    async def asked(prediction: Sequence[int]) -> tuple[int, int, int]:
        """Predicted tokens that were accepted and rejected, and iterations."""
        with counted() as rows:
            made = await ask(prediction)
        assert made.tokens == expected
        return *used(made), len(rows)

    accepted, rejected, iterations = await asked(expected)
    assert (accepted, rejected) == ((NEW - 1) * MOST // (MOST + 1), 0), "all but the one behind each draft"
    assert iterations <= (NEW - 1) // (MOST + 1) + 3, "prefill's chunk among them"
    accepted, rejected, iterations = await asked(half_right(expected))
    assert 20 < accepted < 45
    assert 0 < rejected <= 5 * MOST
    assert iterations < NEW - 15
    accepted, _, iterations = await asked(prompt(NEW, 5))
    assert accepted <= 2
    assert iterations > NEW - 10
    accepted, rejected, _ = await asked(())
    assert (accepted, rejected) == (0, 0), "of other drafts nothing is said"
    without = await Asked(engines, prefill, plain, of, sampling=SEEDED)(expected)
    assert (without.tokens, used(without)) == (expected, (0, 0)), (
        "where nothing is verified it changes nothing"
    )
    assert outcome(engines)[0] > 60
    await engines.idle("decode")


async def test_a_resumed_answer_is_predicted_behind_what_came(engines: Stack) -> None:
    prefill, _, of, expected = await undrafted(engines)
    decode = await engines.decode(max_draft_tokens=MOST)
    for cut in (1, 23, 50):
        tokens = [*of, *expected[:cut]]
        ask = Asked(engines, prefill, decode, tokens, sampling=SEEDED, prompt_tokens=len(of))
        made = await ask(expected, max_position=len(of) + NEW)
        assert made.tokens == expected[cut:]
        left = NEW - cut - 1  # behind the first one, which prefill gives
        assert used(made)[0] >= left - left // MOST - 1
    await engines.idle("decode")


async def test_an_answer_ends_before_its_prediction(engines: Stack) -> None:
    """With its stop token, or at its last position."""
    prefill, decode = await engines.prefill(), await engines.decode(max_draft_tokens=MOST)
    tokens, expected = engines.reference.prompt(40, NEW)
    stop = next(token for at, token in enumerate(expected) if at > 10 and token not in expected[:at])
    at = expected.index(stop)
    sampling = common_pb2.Sampling(temperature=0.0, top_p=1.0, stop_token_ids=[stop])
    made = await Asked(engines, prefill, decode, tokens, sampling=sampling)(expected)
    assert made.tokens == expected[: at + 1]
    made = await Asked(engines, prefill, decode, tokens)(expected, max_position=len(tokens) + 4)
    assert made.tokens == expected[:4]
    assert used(made)[1] == 0
    await engines.idle("decode")
