"""What is new in a session's messages."""

from __future__ import annotations

import pytest

from kvcommons.errors import InvalidInput
from services.router.sessions.conversation import Message, new_messages


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


@pytest.mark.parametrize(
    ("stored", "given", "at"),
    [
        ([], said(("user", "a"), ("assistant", "b"), ("user", "c")), 1),
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
    with pytest.raises(InvalidInput, match="next message"):
        new_messages(STORED, STORED)
