"""What is new in a session's messages."""

from __future__ import annotations

import pytest

from kvcommons.errors import InvalidInput
from services.router.sessions.conversation import Message, ToolCall, check_results, new_messages


def said(*pairs: tuple[str, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in pairs]


SYSTEM = ("system", "Be brief.")
STORED = said(SYSTEM, ("user", "hi"), ("assistant", " hello \n"))


def test_only_what_is_new() -> None:
    new = said(("user", "and?"))
    assert new_messages([], new) == new
    assert new_messages(STORED, new) == new
    assert new_messages(STORED, [*STORED, *new]) == new


def test_a_trimmed_answer_is_recognised() -> None:
    trimmed = said(SYSTEM, ("user", "hi"), ("assistant", "hello"), ("user", "and?"))
    assert new_messages(STORED, trimmed) == trimmed[3:]


def test_a_system_prompt_in_front_of_each_call_is_recognised() -> None:
    assert new_messages(STORED, said(SYSTEM, ("user", "and?"))) == said(("user", "and?"))
    assert new_messages(STORED, said(("system", "New rules."), ("user", "and?")))[0].content == "New rules."


def test_a_session_may_begin_with_a_history() -> None:
    history = said(("user", "a"), ("assistant", "b"), ("user", "c"))
    assert new_messages([], history) == history


@pytest.mark.parametrize(
    ("stored", "given", "at"),
    [
        (STORED, said(SYSTEM, ("user", "hi"), ("assistant", "another answer"), ("user", "and?")), 2),
        (STORED, said(("assistant", "hello")), 0),
        (STORED, [*STORED, *said(("assistant", "more"))], 3),
    ],
)
def test_answers_that_the_session_does_not_hold(stored: list[Message], given: list[Message], at: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        new_messages(stored, given)
    assert refused.value.param == f"messages[{at}]"


def test_nothing_new() -> None:
    with pytest.raises(InvalidInput, match="message that is to be answered"):
        new_messages(STORED, STORED)


CALLS = Message(
    role="assistant",
    content="I look.",
    reasoning="hm",
    tool_calls=tuple(ToolCall(id=name, name="f", arguments='{"a": 1}') for name in "xy"),
)
X, Y = (Message(role="tool", content="1", tool_call_id=name) for name in "xy")


def test_messages_are_stored_as_they_are() -> None:
    for message in (CALLS, X, Message(role="user", content="a", name="Ann")):
        assert Message.of(message.record()) == message


def test_templates_get_arguments_as_objects() -> None:
    (call, _) = CALLS.as_dict()["tool_calls"]
    assert call == {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    cut = Message(role="assistant", content="", tool_calls=(ToolCall(id="x", name="f", arguments='{"a'),))
    assert cut.as_dict()["tool_calls"][0]["function"]["arguments"] == '{"a'
    assert X.as_dict() == {"role": "tool", "content": "1", "tool_call_id": "x"}


def test_calls_that_are_sent_back_are_recognised() -> None:
    """Their arguments written anew, and without the reasoning."""
    stored = [*said(("user", "hi")), CALLS]
    calls = tuple(ToolCall(id=name, name="f", arguments='{"a":1}') for name in "xy")
    again = Message(role="assistant", content="I look.", tool_calls=calls)
    for given in ([*said(("user", "hi")), again, X, Y], [again, X, Y], [X, Y]):
        assert new_messages(stored, given) == [X, Y]
    other = Message(role="assistant", content="I look.", tool_calls=calls[:1])
    with pytest.raises(InvalidInput, match="does not hold"):
        new_messages(stored, [other, X])


@pytest.mark.parametrize(
    ("before", "given", "at"),
    [
        ([], [X], 0),
        ([], [CALLS, X, X], 2),
        ([], [CALLS, X, *said(("user", "stop")), Y], 3),
        ([CALLS], [X, Y, Y], 2),
        ([CALLS, X], [X], 0),
    ],
)
def test_results_of_calls_that_nobody_waits_for(before: list[Message], given: list[Message], at: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_results(given, before=before)
    assert refused.value.param == f"messages[{at}].tool_call_id"


def test_some_calls_may_stay_without_a_result() -> None:
    check_results([CALLS, Y, *said(("user", "stop"))])
