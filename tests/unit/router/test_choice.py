"""One choice's state machine: positions, stops, lengths, failures. No I/O, no clock but the test's."""

from __future__ import annotations

import random

import pytest

from kvcommons.errors import CapacityExhausted, ContextLengthExceeded, InvalidInput, Unavailable
from kvcommons.model.tokenizer import Tokenizer
from services.router.turn import events as ev
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


def test_a_turn_without_failures(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("hello, my friend")
    eos = min(tokenizer.eos_ids)
    choice = choice_of(tokenizer)
    assert choice.start() == [ev.Start(choice=0, attempt=1)]
    assert choice.handle(ev.Reserved(choice=0, attempt=1, push_from_block=3), 0) == [
        ev.Compute(choice=0, attempt=1, push_from_block=3)
    ]
    text = shown(choice.handle(first_of(1, answer[0]), 1.5))
    actions = choice.handle(tokens(1, [*answer[1:], eos], first=1), 2)
    assert text + shown(actions) == "hello, my friend"
    assert actions[-1] == ev.Linger(choice=0, attempt=1)
    assert choice.finish_reason == "stop"
    assert choice.first_token_s == 1.5
    assert choice.answer.kept == [*answer, eos]
    assert choice.reuse is not None
    assert choice.reuse.cached_tokens == 2


def test_what_decode_lacks_is_pushed_after_the_first_token(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    choice.handle(ev.Reserved(choice=0, attempt=1, push_from_block=4), 0)
    assert choice.handle(ev.Missing(choice=0, attempt=1, push_from_block=1), 0) == []
    again = ev.Compute(choice=0, attempt=1, push_from_block=1)
    assert choice.handle(first_of(1, 50, cached=1), 0)[-1] == again
    choice.handle(first_of(1, 50, cached=2), 0)
    assert choice.reuse is not None
    assert choice.reuse.cached_tokens == 1, "the second job finds what the first has computed"
    assert choice.handle(ev.Missing(choice=0, attempt=1, push_from_block=0), 0) == [
        ev.Compute(choice=0, attempt=1, push_from_block=0)
    ]


def test_no_prefill_is_called_for_a_prompt_that_decode_computes(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    here = ev.Reserved(choice=0, attempt=1, push_from_block=2, computes=True)
    assert choice.handle(here, 0) == []
    assert choice.handle(ev.Missing(choice=0, attempt=1, push_from_block=2), 0) == [
        ev.Compute(choice=0, attempt=1, push_from_block=2)
    ], "it does not after all"
    choice = choice_of(tokenizer)
    choice.start()
    choice.handle(here, 0)
    choice.handle(first_of(1, 50, cached=2), 0)
    assert choice.reuse is not None
    assert choice.reuse.cached_tokens == 2


def test_cached_tokens_never_reach_the_last_one(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    choice.handle(first_of(1, 50, cached=99), 0)
    assert choice.reuse is not None
    assert choice.reuse.cached_tokens == len(PROMPT) - 1


def test_any_order_and_any_repetition_give_each_token_once(tokenizer: Tokenizer) -> None:
    """Prefill's first token and decode's stream come over two connections, and decode may repeat the
    first."""
    answer = tokenizer.encode_text("one two three four five")
    eos = min(tokenizer.eos_ids)
    whole = [*answer, eos]
    for seed in range(50):
        rng = random.Random(seed)
        choice = choice_of(tokenizer)
        choice.start()
        heard: list[ev.Event] = [tokens(1, [token], at) for at, token in enumerate(whole)]
        heard += [first_of(1, whole[0]), *rng.sample(heard, 3)]
        rng.shuffle(heard)
        text = "".join(shown(choice.handle(event, 0)) for event in heard)
        assert text == "one two three four five", seed
        assert choice.reuse is not None, seed
        assert choice.answer.kept == whole, seed
        assert choice.finish_reason == "stop", seed


def test_a_failure_at_every_token_resumes_with_what_was_generated(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two 🙂 three")
    whole = [*answer, min(tokenizer.eos_ids)]
    for broken_at in range(len(whole)):
        choice = choice_of(tokenizer, stops=("zzz",))
        choice.start()
        text = shown(choice.handle(first_of(1, whole[0]), 1)) if broken_at else ""
        text += shown(choice.handle(tokens(1, whole[:broken_at]), 1))
        actions = choice.handle(decode_failed(1), 2)
        assert actions == [
            ev.Release(choice=0, attempt=1),
            ev.Retry(choice=0, attempt=1, delay_s=0.0),
        ]
        assert choice.handle(decode_failed(1), 2) == [], "an attempt fails once"
        assert choice.handle(ev.RetryDue(choice=0, attempt=1), 2) == [ev.Start(choice=0, attempt=2)]
        assert list(choice.tokens) == [*PROMPT, *whole[:broken_at]]
        assert choice.handle(tokens(1, whole[broken_at:], broken_at), 3) == [], "from an attempt given up"
        text += shown(choice.handle(first_of(2, whole[broken_at], broken_at), 3))
        text += shown(choice.handle(tokens(2, whole[broken_at:], broken_at), 3))
        assert text == "one two 🙂 three"
        assert choice.answer.kept == whole
        assert choice.resumptions == 1


def test_failures_without_progress_end_after_the_patience(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    now_s, delays = 0.0, []
    while not choice.ended:
        actions = choice.handle(decode_failed(choice.attempt), now_s)
        for action in actions:
            if isinstance(action, ev.Retry):
                delays.append(action.delay_s)
                now_s += action.delay_s
                choice.handle(ev.RetryDue(choice=0, attempt=choice.attempt), now_s)
    assert isinstance(choice.error, Unavailable)
    assert 10 <= now_s < 12
    assert delays == sorted(delays)
    assert delays[0] == 0
    assert delays[-1] == 1


def test_progress_renews_the_patience(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    for at in range(30):
        choice.handle(tokens(choice.attempt, [50], first=at), at * 3.0)
        choice.handle(decode_failed(choice.attempt), at * 3.0 + 1)
        assert choice.error is None
        choice.handle(ev.RetryDue(choice=0, attempt=choice.attempt), at * 3.0 + 1)


def test_a_request_that_kills_instances_gets_few_of_them(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    attempts = 0
    while not choice.ended:
        attempts += 1
        choice.handle(ev.PrefillStarted(choice=0, attempt=choice.attempt), 0)
        choice.handle(ev.PrefillFailed(choice=0, attempt=choice.attempt, error=Unavailable("died")), 0)
        choice.handle(ev.RetryDue(choice=0, attempt=choice.attempt), 0)
    assert attempts == 4


def test_errors_that_any_instance_would_give_are_final(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    error = InvalidInput("no")
    actions = choice.handle(ev.DecodeFailed(choice=0, attempt=1, error=error), 0)
    assert choice.error is error
    assert actions == [ev.Release(choice=0, attempt=1)]


def test_an_answer_that_no_memory_holds_any_longer_ends_as_it_stands(tokenizer: Tokenizer) -> None:
    """Who lent to it has left. Before its first token it is the prompt that does not fit: an error."""
    answer = tokenizer.encode_text("hello, my friend")
    too_long = ContextLengthExceeded("no instance has so much")
    choice = choice_of(tokenizer)
    choice.start()
    text = shown(choice.handle(first_of(1, answer[0]), 0))
    text += shown(choice.handle(tokens(1, answer[1:], first=1), 0))
    full = ev.DecodeFailed(choice=0, attempt=1, error=CapacityExhausted("full"))
    assert isinstance(choice.handle(full, 0)[-1], ev.Retry)
    choice.handle(ev.RetryDue(choice=0, attempt=1), 1)
    actions = choice.handle(ev.DecodeFailed(choice=0, attempt=2, error=too_long), 1)
    assert actions[-1] == ev.Linger(choice=0, attempt=2)
    assert text + shown(actions) == "hello, my friend"
    assert (choice.finish_reason, choice.error, choice.done) == ("length", None, True)
    assert choice.answer.kept == answer
    choice = choice_of(tokenizer)
    choice.start()
    choice.handle(ev.DecodeFailed(choice=0, attempt=1, error=too_long), 0)
    assert choice.error is too_long


def test_a_full_decode_is_not_asked_again_at_once(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    full = ev.DecodeFailed(choice=0, attempt=1, error=CapacityExhausted("full"))
    retry = choice.handle(full, 0)[-1]
    assert isinstance(retry, ev.Retry)
    assert retry.delay_s > 0


def test_prefills_end_does_not_matter_once_decode_streams(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two three")
    choice = choice_of(tokenizer)
    choice.start()
    assert choice.handle(tokens(1, answer[:2]), 0) == []
    actions = choice.handle(prefill_failed(1), 0)
    assert [type(action) for action in actions] == [ev.Delta], "decode's stream goes on, alone"
    assert choice.answer.tokens == answer[:2]
    text = shown(actions) + shown(choice.handle(tokens(1, answer[2:], first=2), 0))
    assert text + shown(choice.handle(finished(1), 0)) == "one two three"
    assert (choice.attempt, choice.finish_reason, choice.reuse) == (1, "length", None)
    gap = choice_of(tokenizer)
    gap.start()
    gap.handle(tokens(1, [51], first=1), 0)
    actions = gap.handle(prefill_failed(1), 0)
    assert isinstance(actions[-1], ev.Retry), "the first token is lost with prefill"
    late = choice_of(tokenizer)
    late.start()
    late.handle(tokens(1, answer[:1]), 0)
    late.handle(tokens(1, answer[2:], first=2), 0)
    actions = late.handle(prefill_failed(1), 0)
    assert [type(action) for action in actions] == [ev.Delta, ev.Release, ev.Retry]
    assert list(late.tokens) == [*PROMPT, *answer[:1]], "what came before the gap stays"


def test_a_silent_stream_is_given_up(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    assert choice.tick(100) == [], "nothing was heard yet: prefill may take long"
    choice.handle(first_of(1, 50), 99)
    choice.handle(tokens(1, [50]), 100)
    assert choice.tick(104) == []
    assert isinstance(choice.tick(105)[-1], ev.Retry)
    assert choice.tick(200) == []
    held = choice_of(tokenizer)
    held.start()
    held.handle(tokens(1, [50]), 100)
    assert [type(action) for action in held.tick(105)] == [ev.Delta, ev.Release, ev.Retry]


def test_a_stream_that_is_over_is_not_taken_for_silent(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer, stall_s=1)
    choice.start()
    choice.handle(tokens(1, [50]), 100)
    choice.handle(finished(1), 100)
    assert choice.tick(101.5) == [], "decode is done; it is prefill's word that is waited for"
    assert shown(choice.handle(first_of(1, 50), 101.6)) == choice.answer.text != ""
    assert choice.finish_reason == "length"


def test_the_length_ends_it(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two three four")
    choice = choice_of(tokenizer, capacity=2)
    choice.start()
    text = shown(choice.handle(first_of(1, answer[0]), 0))
    actions = choice.handle(tokens(1, answer), 0)
    assert choice.finish_reason == "length"
    assert choice.answer.kept == answer[:2]
    assert text + shown(actions) == tokenizer.decode(answer[:2])


def test_text_held_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    answer = tokenizer.encode_text("one two thr")
    choice = choice_of(tokenizer, stops=("three",), capacity=len(answer))
    choice.start()
    text = shown(choice.handle(first_of(1, answer[0]), 0))
    actions = choice.handle(tokens(1, answer), 0)
    assert text + shown(actions) == "one two thr"
    assert choice.finish_reason == "length"


def test_a_stop_string_over_tokens_cuts_before_it(tokenizer: Tokenizer) -> None:
    text = "one two three four"
    answer = tokenizer.encode_text(text)
    for stop in ("wo th", " three", "t", "four"):
        choice = choice_of(tokenizer, stops=(stop,))
        choice.start()
        out = shown(choice.handle(first_of(1, answer[0]), 0))
        for at, token in enumerate(answer):
            actions = choice.handle(tokens(1, [token], first=at), 0)
            out += shown(actions)
        assert out == text[: text.index(stop)] == choice.answer.text
        assert choice.finish_reason == "stop"
        kept = tokenizer.decode(choice.answer.kept)
        assert out.startswith(kept)
        assert choice.answer.kept == answer[: len(choice.answer.kept)]
        assert len(choice.answer.kept) < len(answer)


def test_decode_that_ends_early_is_a_failure(tokenizer: Tokenizer) -> None:
    choice = choice_of(tokenizer)
    choice.start()
    choice.handle(first_of(1, 50), 0)
    choice.handle(tokens(1, [52], first=2), 0)
    actions = choice.handle(finished(1), 0)
    assert isinstance(actions[-1], ev.Retry)
    held = choice_of(tokenizer)
    held.start()
    held.handle(tokens(1, [52], first=2), 0)
    assert held.handle(finished(1), 0) == []
    actions = held.handle(first_of(1, 50), 0)
    assert [type(action) for action in actions] == [ev.Delta, ev.Release, ev.Retry]
    assert list(held.tokens) == [*PROMPT, 50]
