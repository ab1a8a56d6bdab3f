"""A request's choices together."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.errors import InvalidInput
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb
from services.router.answer.text import AnswerText
from services.router.turn import events as ev
from services.router.turn.choice import Choice, Patience
from services.router.turn.turn import Turn


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(Path(__file__).parents[3] / "demo" / "model")


def turn_of(tokenizer: Tokenizer, prompts: list[list[int]], n: int) -> Turn:
    def choice(index: int, prompt: list[int]) -> Choice:
        return Choice(
            index=index,
            prompt=prompt,
            max_position=len(prompt) + 2,
            sampling=pb.Sampling(),
            text=AnswerText(tokenizer, stops=(), stop_ids=tokenizer.eos_ids),
            patience=Patience(resume_s=10, stall_s=5),
        )

    return Turn([[choice(at * n + of, prompt) for of in range(n)] for at, prompt in enumerate(prompts)])


def first(index: int, position: int, cached: int) -> ev.First:
    return ev.First(
        choice=index,
        attempt=1,
        token=pb.SampledToken(token=60, position=position),
        cached_tokens=cached,
        device_tokens=0,
        queue_us=0,
        compute_us=0,
        load_wait_us=0,
    )


def starts(actions: list[ev.Action]) -> list[int]:
    return [action.choice for action in actions if isinstance(action, ev.Start)]


def test_others_wait_for_the_first_choices_prefill(tokenizer: Tokenizer) -> None:
    turn = turn_of(tokenizer, [[1, 2, 3], [4, 5]], n=3)
    assert starts(turn.begin()) == [0, 3]
    assert starts(turn.handle(ev.PrefillStarted(choice=3, attempt=1), 0)) == []
    assert starts(turn.handle(first(3, 2, cached=1), 0)) == [4, 5]
    assert starts(turn.handle(first(0, 3, cached=2), 0)) == [1, 2]
    assert starts(turn.handle(first(0, 3, cached=2), 0)) == []


def test_usage_counts_each_prompt_once_and_its_first_prefills_cache(tokenizer: Tokenizer) -> None:
    turn = turn_of(tokenizer, [[1, 2, 3], [4, 5]], n=2)
    turn.begin()
    turn.handle(first(0, 3, cached=2), 0)
    turn.handle(first(1, 3, cached=2), 0)
    turn.handle(first(2, 2, cached=0), 0)
    usage = turn.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 3, 2)


def test_one_choices_error_ends_all(tokenizer: Tokenizer) -> None:
    turn = turn_of(tokenizer, [[1, 2, 3]], n=2)
    turn.begin()
    turn.handle(first(0, 3, cached=0), 0)
    actions = turn.handle(ev.DecodeFailed(choice=1, attempt=1, error=InvalidInput("no")), 0)
    assert turn.error is not None
    assert {action.choice for action in actions if isinstance(action, ev.Release)} == {0, 1}
    assert not turn.done
