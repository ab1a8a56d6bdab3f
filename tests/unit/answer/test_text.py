"""Tokens to parts: control tokens that mark parts, held text, and what is kept of an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcommons.model.chat import ChatTemplate
from kvcommons.model.tokenizer import Tokenizer
from kvcommons.pb import common_pb2 as pb
from services.router.answer.parts import Content, Part, joined
from services.router.answer.text import AnswerText, Piece
from services.router.sessions.conversation import Message
from services.router.turn.rendering import Text
from services.router.turn.tools import ToolOffer
from tests.unit.model import tool_templates

TOOLS = ToolOffer(definitions=({"type": "function", "function": {"name": "add"}},))


@pytest.fixture
def mistral(tmp_path: Path) -> Text:
    folder = tool_templates.mistral(tmp_path)
    tokenizer = Tokenizer.read(folder)
    return Text.of(tokenizer, ChatTemplate.read(folder, tokenizer))


def pushed(answer: AnswerText, ids: list[int]) -> list[Piece]:
    return [answer.push(pb.SampledToken(token=token, position=at)) for at, token in enumerate(ids)]


def test_a_control_token_begins_a_call_and_text_that_spells_it_does_not(mistral: Text) -> None:
    encode, tokenizer = mistral.tokenizer.encode_text, mistral.tokenizer
    mark, end = tokenizer.control_id("[TOOL_CALLS]"), tokenizer.control_id("</s>")
    assert mark is not None
    assert end is not None
    call = ' [{"name": "add", "arguments": {"a": "ü"}}]'
    for spelled in (False, True):
        answer = AnswerText(tokenizer, stops=("STOP",), stop_ids=(end,), parser=mistral.parser(TOOLS))
        begin = encode("[TOOL_CALLS]") if spelled else [mark]
        ids = [*encode("I add. "), *begin, *encode(call), end]
        pieces = pushed(answer, ids)
        tokens = [token.token for piece in pieces for _, token in piece.tokens]
        assert tokens == ids[:-1]  # all but the end, which was never shown
        assert answer.kept == ids
        parts: list[Part] = [part for piece in pieces for part in piece.parts]
        if spelled:
            assert joined(parts) == (Content("I add. [TOOL_CALLS]" + call),)
            assert pieces[-1].reason == "stop"
        else:
            assert answer.text == "I add. " + call
            assert answer.parts.content == "I add."
            assert [(one.name, one.arguments, len(one.id)) for one in answer.parts.calls] == [
                ("add", '{"a": "ü"}', 9)
            ]
            assert pieces[-1].reason == "tool_calls"


def test_a_stop_string_cuts_before_a_mark_behind_it(mistral: Text) -> None:
    tokenizer = mistral.tokenizer
    mark = tokenizer.control_id("[TOOL_CALLS]")
    assert mark is not None
    answer = AnswerText(tokenizer, stops=("STOP",), stop_ids=(), parser=mistral.parser(TOOLS))
    before = tokenizer.encode_text("a ")
    (*_, last) = pushed(answer, [*before, *tokenizer.encode_text("STOP")])
    assert last.reason == "stop"
    assert (answer.parts.message(), answer.kept) == (Message(role="assistant", content="a "), before)


def test_an_answer_without_tools_is_its_text(mistral: Text) -> None:
    """Control tokens in it have none, whatever they mark elsewhere."""
    tokenizer = mistral.tokenizer
    mark = tokenizer.control_id("[TOOL_CALLS]")
    assert mark is not None
    answer = AnswerText(tokenizer, stops=(), stop_ids=())
    pieces = pushed(answer, [*tokenizer.encode_text(" a\n"), mark, *tokenizer.encode_text("[{}] ")])
    assert [*joined(part for piece in pieces for part in piece.parts)] == [Content(" a\n[{}] ")]
    assert answer.text == answer.parts.content == " a\n[{}] "
