"""Streaming text and stop strings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcommons.model.detokenizer import Detokenizer
from kvcommons.model.stops import StopMatcher
from kvcommons.model.tokenizer import Tokenizer
from tests.unit.model import chat_folders

TEXT = "Zuzu sagt: naïve 你好 🙂👩‍👩‍👧 - ok\n  two  spaces �!"


@pytest.fixture(params=sorted(chat_folders.KINDS), scope="module")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.read(chat_folders.KINDS[request.param](tmp_path_factory.mktemp("folder")))


def test_streamed_pieces_are_whole_characters_and_join_to_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_text(TEXT.replace("�", ""))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in ids]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT.replace("�", "")
    assert detokenizer.finish() == ""
    assert sum(map(bool, pieces)) > 10  # it streams


def test_a_replacement_character_that_was_meant_is_kept(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode_text(TEXT)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == TEXT


def test_an_unfinished_character_comes_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_text("a🙂")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) == "a"
    assert set(detokenizer.finish()) == {"�"}
    assert detokenizer.finish() == ""


def test_tokens_that_make_no_sense_still_stream(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode_text("🙂")[-1]
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(broken) for _ in range(50))
    assert len(text) > 30
    assert (text + detokenizer.finish()).strip("�") == ""


def test_ids_without_a_token_leave_no_trace(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    beyond = tokenizer.vocab_size + 5
    assert not tokenizer.has_text(beyond)
    pieces = [detokenizer.push(token) for one in tokenizer.encode_text("hello") for token in (beyond, one)]
    assert "".join(pieces) == "hello"


def test_control_tokens_leave_no_trace(tokenizer: Tokenizer) -> None:
    one, other = tokenizer.encode_text("hello"), tokenizer.encode_text(" world")
    ids = [*one, min(tokenizer.eos_ids), *other]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids)


def test_random_tokens_join_to_what_decode_gives(tmp_path: Path) -> None:
    tokenizer = Tokenizer.read(chat_folders.chatml(tmp_path))
    draw = random.Random(7)
    for _ in range(50):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(60)]
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == tokenizer.decode(ids)


def test_text_that_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.push("one E").text == "one "
    assert matcher.push("N").text == ""
    assert matcher.push("T\n").text == "ENT"
    step = matcher.push("\nrest")
    assert (step.text, step.matched, step.kept_tokens) == ("", "\n\n", 2)


def test_a_token_that_is_partly_before_the_match_is_cut() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("keep").text == "keep"  # not the "p"
    step = matcher.push(" this stop that")
    assert (step.text, step.matched, step.kept_tokens) == (" this ", "stop", 1)


def test_parts_of_a_character_go_with_it() -> None:
    matcher = StopMatcher(["你"])
    steps = [matcher.push(text) for text in ("a", "", "", "你")]
    assert (steps[-1].text, steps[-1].kept_tokens) == ("", 1)


def test_the_end_gives_what_was_held() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN").text == ""
    assert matcher.finish().text == "EN"
    matcher = StopMatcher(["END"])
    matcher.push("EN")
    step = matcher.finish("D")
    assert (step.text, step.matched, step.kept_tokens) == ("", "END", 0)
    assert StopMatcher([]).push("all").text == "all"


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_any_split_stops_where_a_token_completes_a_stop(tokens: list[str], stops: list[str]) -> None:
    matcher, sent, pushed = StopMatcher(stops), "", 0
    for text in tokens:
        step = matcher.push(text)
        sent, pushed = sent + step.text, pushed + 1
        if step.matched:
            break
    else:
        step = matcher.finish()
        sent += step.text
    whole = "".join(tokens[:pushed])
    if not step.matched:
        assert sent == whole
        assert not any(stop in whole for stop in stops)
        return
    assert sent == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
    kept = "".join(tokens[: step.kept_tokens])
    assert len(kept) <= len(sent)
    assert not any(stop in "".join(tokens[: pushed - 1]) for stop in stops)


def test_stop_strings_are_not_looked_for_in_the_first_tokens() -> None:
    matcher = StopMatcher(["END"], min_tokens=3)
    assert [matcher.push(text).text for text in ("a END", " b EN", "D")] == ["a END", " b EN", "D"]
    step = matcher.push("c END d")
    assert (step.text, step.matched, step.kept_tokens) == ("c ", "END", 3)
