"""Logprobs of a prompt at the router: what a choice waits for, and what is written of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb
from services.router.api.prompts import EchoedPrompt, prompt_logprobs_body, top_logprobs_body
from services.router.turn import events as ev
from services.router.turn.choice import Choice
from services.router.turn.prompt_logprobs import LogprobsOfPrompt
from tests.unit.router.choices import (
    PROMPT,
    choice_of,
    decode_failed,
    demo_tokenizer,
    finished,
    first_of,
    prefill_failed,
    shown,
    tokens,
)

LOGPROBS = (
    pb.PromptLogprobs(first=1, logprobs=[-1.0], ranks=[2], top=1, top_tokens=[9], top_logprobs=[-0.5]),
    pb.PromptLogprobs(first=2, logprobs=[-2.0], ranks=[1], top=1, top_tokens=[7], top_logprobs=[-2.0]),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


def begun(tokenizer: Tokenizer, *, capacity: int = 2, stall_s: float = 5) -> Choice:
    choice = choice_of(tokenizer, capacity=capacity, stall_s=stall_s, prompt_logprobs=LogprobsOfPrompt(top=1))
    choice.start()
    choice.handle(ev.Reserved(choice=0, attempt=1, push_from_block=0, instance="d"), 0.0)
    return choice


def kinds(actions: Sequence[ev.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_decode_that_overtakes_prefill_is_held_until_they_are_there(tokenizer: Tokenizer) -> None:
    """However long: an answer without them is none."""
    ids = tokenizer.encode_text("one two")[:2]
    choice = begun(tokenizer)
    assert choice.handle(tokens(1, ids), 0.1) == []
    assert choice.tick(3.0) == []
    assert choice.handle(finished(1), 3.1) == []
    actions = choice.handle(first_of(1, ids[0], logprobs=LOGPROBS), 3.2)
    assert shown(actions) == tokenizer.decode(ids)
    assert choice.done
    assert choice.prompt_logprobs is not None
    assert choice.prompt_logprobs.found == LOGPROBS


def test_where_prefill_falls_silent_behind_a_whole_answer_it_is_tried_again(tokenizer: Tokenizer) -> None:
    choice = begun(tokenizer)
    choice.handle(tokens(1, [5, 6]), 0.1)
    choice.handle(finished(1), 0.2)
    assert choice.tick(4.0) == []
    assert kinds(choice.tick(5.5)) == ["Release", "Retry"]


@pytest.mark.parametrize("event", [prefill_failed(1), decode_failed(1)])
def test_a_failure_before_they_are_there_asks_for_them_anew(tokenizer: Tokenizer, event: ev.Event) -> None:
    """What decode has sent meanwhile comes again, behind the same prompt."""
    choice = begun(tokenizer)
    choice.handle(tokens(1, [5]), 0.1)
    assert kinds(choice.handle(event, 0.2)) == ["Release", "Retry"]
    assert choice.lacks_prompt_logprobs
    assert list(choice.tokens) == PROMPT
    choice.handle(ev.RetryDue(choice=0, attempt=1), 0.3)
    choice.handle(first_of(2, 5, logprobs=LOGPROBS), 0.4)
    assert not choice.lacks_prompt_logprobs
    choice.handle(decode_failed(2), 0.5)
    choice.handle(ev.RetryDue(choice=0, attempt=2), 0.6)
    assert choice.handle(tokens(3, [6], first=1), 0.7)
    assert choice.prompt_logprobs is not None
    assert choice.prompt_logprobs.found == LOGPROBS


@pytest.mark.parametrize("messages", [(), LOGPROBS[:1], LOGPROBS[1:], LOGPROBS[::-1], LOGPROBS * 2])
def test_those_of_a_part_of_the_prompt_are_none(
    tokenizer: Tokenizer, messages: tuple[pb.PromptLogprobs, ...]
) -> None:
    choice = begun(tokenizer)
    assert kinds(choice.handle(first_of(1, 5, logprobs=messages), 0.1)) == ["Release", "Retry"]
    assert choice.waits_for is not None
    assert "whole prompt" in choice.waits_for.message


def test_a_choice_that_generates_nothing_ends_with_its_prompt(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer, capacity=0)
    assert not choice.generates
    choice.start()
    choice.handle(ev.PrefillStarted(choice=0, attempt=1), 0.1)
    assert kinds(choice.handle(first_of(1, 5), 0.2)) == ["Linger"]
    assert (choice.done, choice.finish_reason, choice.answer.tokens) == (True, "length", [])
    assert choice.first_token_s == 0.2


def test_vllms_shape(tokenizer: Tokenizer) -> None:
    read = LogprobsOfPrompt(top=1, found=LOGPROBS)
    name = tokenizer.token_text
    assert prompt_logprobs_body(tokenizer, PROMPT, read, 1) == [
        None,
        {
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": name(6)},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": name(9)},
        },
        {"7": {"logprob": -2.0, "rank": 1, "decoded_token": name(7)}},
    ]
    assert [len(one) for one in prompt_logprobs_body(tokenizer, PROMPT, read, 0)[1:] if one] == [1, 1]


def test_of_tokens_that_read_alike_the_likeliest_one_stands(tokenizer: Tokenizer) -> None:
    """Parts of a character read alike, and the largest number says whether a token was the best."""
    parts = [token for token in range(1024) if tokenizer.token_text(token) == "\N{REPLACEMENT CHARACTER}"]
    assert len(parts) > 1
    top = [(parts[0], -0.1), (parts[1], -3.0)]
    assert top_logprobs_body(tokenizer, parts[0], -0.1, top) == {"\N{REPLACEMENT CHARACTER}": -0.1}
    assert top_logprobs_body(tokenizer, 5, -math.inf, [])[tokenizer.token_text(5)] == -9999.0


def test_pieces_of_an_echo_are_bounded_and_make_the_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} and so on, " * 5
    ids = tokenizer.encode_prompt(text)
    count = len(ids) - 1
    found = pb.PromptLogprobs(first=1, logprobs=[-1.0] * count, ranks=[1] * count)
    read = LogprobsOfPrompt(top=0, found=(found,))

    def pieces() -> list[tuple[str, dict[str, list[object]]]]:
        echo = EchoedPrompt(tokenizer=tokenizer, tokens=ids, text=text, read=read)
        return [(piece, logprobs) for piece, logprobs in echo.pieces() if logprobs is not None]

    ((_, whole),) = pieces()
    monkeypatch.setattr("services.router.api.prompts._PIECE_TOKENS", 7)
    several = pieces()
    assert len(several) == math.ceil(len(ids) / 7)
    assert "".join(piece for piece, _ in several) == text
    assert {name: [one for _, part in several for one in part[name]] for name in whole} == whole
    assert whole["token_logprobs"] == [None, *[-1.0] * count]
