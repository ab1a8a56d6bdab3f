"""What decode sends waits for prefill's account of what it reused, and not for ever."""

from __future__ import annotations

import pytest

from kvcommons.model.tokenizer import Tokenizer
from services.router.turn import events as ev
from services.router.turn.choice import Choice
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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_tokenizer()


def test_an_answer_that_is_whole_waits_for_prefills_account(tokenizer: Tokenizer) -> None:
    """Decode's stream may be over before prefill's word comes over its own connection."""
    answer = tokenizer.encode_text("one two three")
    for reason in ("length", "stop"):
        choice = choice_of(tokenizer)
        choice.start()
        assert choice.handle(tokens(1, answer), 1) == []
        assert choice.handle(finished(1, reason), 2) == []
        assert not choice.ended
        assert shown(choice.handle(first_of(1, answer[0], cached=2), 3)) == "one two three"
        assert choice.finish_reason == reason
        assert choice.answer.kept == answer
        assert choice.reuse is not None
        assert choice.reuse.cached_tokens == 2


def test_an_answer_of_one_token_tells_what_was_cached(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode_text("a")
    for decode in ([tokens(1, [token])], [tokens(1, [token]), finished(1)]):
        for at in range(len(decode) + 1):
            choice = choice_of(tokenizer, capacity=1)
            choice.start()
            actions = [
                action
                for event in [*decode[:at], first_of(1, token, cached=1), *decode[at:]]
                for action in choice.handle(event, 0)
            ]
            assert shown(actions) == "a"
            assert actions.count(ev.Linger(choice=0, attempt=1)) == 1
            assert choice.finish_reason == "length"
            assert choice.reuse is not None
            assert choice.reuse.cached_tokens == 1, (decode, at)


def test_what_decode_sent_before_it_failed_counts_though_it_was_held(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two three")
    choice = choice_of(tokenizer)
    choice.start()
    choice.handle(tokens(1, answer[:2]), 1)
    choice.handle(tokens(1, [50], first=3), 1)
    actions = choice.handle(decode_failed(1), 2)
    assert [type(action) for action in actions] == [ev.Delta, ev.Release, ev.Retry]
    text = shown(actions)
    choice.handle(ev.RetryDue(choice=0, attempt=1), 2)
    assert list(choice.tokens) == [*PROMPT, *answer[:2]], "what lies behind a gap is computed again"
    assert choice.handle(tokens(2, answer[2:], first=2), 3) == []
    assert choice.handle(finished(2), 3) == []
    actions = choice.handle(first_of(2, answer[2], at=2), 4)
    assert text + shown(actions) == "one two three"
    assert (choice.answer.kept, choice.resumptions) == (answer, 1)


def test_a_failure_after_the_last_token_fails_nothing(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer, capacity=2)
    choice.start()
    choice.handle(tokens(1, [50, 51]), 1)
    actions = choice.handle(decode_failed(1), 2)
    assert (choice.finish_reason, choice.error) == ("length", None)
    assert not [action for action in actions if isinstance(action, ev.Retry)]


def test_once_it_is_known_what_was_cached_nothing_is_held(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two three")
    choice = choice_of(tokenizer)
    choice.start()
    text = shown(choice.handle(first_of(1, answer[0], cached=2), 0))
    choice.handle(decode_failed(1), 0)
    choice.handle(ev.RetryDue(choice=0, attempt=1), 0)
    text += shown(choice.handle(tokens(2, answer[1:], first=1), 0))
    assert text + shown(choice.handle(finished(2), 0)) == "one two three"


def test_a_prefill_that_does_not_give_its_account_is_not_waited_for(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two three")
    choice = choice_of(tokenizer)
    choice.start()
    choice.handle(tokens(1, answer[:2]), 10)
    assert choice.tick(11) == []
    text = shown(choice.tick(12))
    assert choice.answer.tokens == answer[:2]
    text += shown(choice.handle(tokens(1, answer[2:], first=2), 13))
    assert text == "one two three"
    choice.handle(first_of(1, answer[0], cached=1), 14)
    assert choice.reuse is not None
    assert choice.reuse.cached_tokens == 1, "late, and in time all the same"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_end_of_an_answer_waits_for_a_late_account(tokenizer: Tokenizer, reason: str) -> None:
    """Its text does not: a call of prefill's that was lost and made again takes seconds."""
    answer = tokenizer.encode_text("one two three")
    for capacity, decode in ((len(answer), []), (100, [finished(1, reason)])):
        choice = choice_of(tokenizer, capacity=capacity, stall_s=5)
        choice.start()
        for event in (tokens(1, answer), *decode):
            assert choice.handle(event, 10) == []
        actions = choice.tick(12)
        assert [type(action) for action in actions] == [ev.Delta]
        assert shown(actions) == "one two three"
        assert choice.finish_reason is not None
        assert (choice.done, choice.tick(16)) == (False, [])
        assert choice.handle(decode_failed(1), 16) == [], "the answer is whole"
        assert choice.handle(first_of(1, answer[0], cached=2), 16) == [ev.Linger(choice=0, attempt=1)]
        assert choice.done
        assert choice.reuse is not None
        assert choice.reuse.cached_tokens == 2
        assert (choice.tick(30), choice.handle(first_of(1, answer[0]), 30)) == ([], [])


def test_the_end_does_not_wait_for_an_account_that_is_lost(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two three")

    def whole() -> Choice:
        choice = choice_of(tokenizer, stall_s=5)
        choice.start()
        choice.handle(tokens(1, answer), 10)
        choice.handle(finished(1), 10)
        return choice

    hangs = whole()
    assert shown(hangs.tick(12)) == "one two three"
    assert (hangs.tick(16.9), hangs.done) == ([], False)
    assert (hangs.tick(17), hangs.done) == ([ev.Linger(choice=0, attempt=1)], True)
    dies = whole()
    dies.tick(12)
    assert (dies.handle(prefill_failed(1), 13), dies.done) == ([ev.Linger(choice=0, attempt=1)], True)
    early = whole()
    assert shown(early.handle(prefill_failed(1), 11)) == "one two three"
    assert (early.finish_reason, early.done) == ("length", True)
