"""Where a whole history belongs among a session and its branches."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from kvcommons.branch_ids import branch_number, next_branch, root_of_branch
from kvcommons.pb import kvstore_pb2 as pb
from services.router.sessions.branching import (
    BranchPoint,
    GivenTurn,
    branch_point,
    is_history,
)
from services.router.sessions.conversation import VOLATILE, Message, ToolCall, new_messages

Said = tuple[str, ...]
BRANCHED = [("s", ("a", "A", "b", "B")), ("s~2", ("a", "A", "c", "C"))]
TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])


def said(*texts: str) -> list[Message]:
    """Question and answer in turns."""
    return [Message(role=("user", "assistant")[at % 2], content=text) for at, text in enumerate(texts)]


def session(id: str, messages: Sequence[Message], *, tools: str = "", ends: bool = True) -> pb.SessionRecord:
    """Each answer ends a turn; not with `ends` False, as in records of before that was kept."""
    record = pb.SessionRecord(session_id=id, version=1, tools=tools)
    for at, message in enumerate(messages):
        record.messages.append(message.record())
        if ends and message.role == "assistant":
            record.messages[at].end_token = 10 * (at + 1)
    return record


def placed(given: Said, *stored: tuple[str, Said]) -> BranchPoint:
    return branch_point(said(*given), None, [session(id, said(*texts)) for id, texts in stored])


@pytest.mark.parametrize(
    ("given", "stored", "place"),
    [
        (("a", "A", "b"), [("s", ("a", "A"))], ("s", 2, True)),
        (("a", "A", "b"), [("s", ("a", "A", "b", "B"))], ("s", 2, False)),  # asked again
        (("a", "A", "c"), [("s", ("a", "A", "b", "B"))], ("s", 2, False)),  # edited
        (("c", "A", "b"), [("s", ("a", "A", "b", "B"))], ("s", 0, False)),  # from the beginning on
        (("a", "A", "b", "half", "c"), [("s", ("a", "A"))], ("s", 2, True)),  # stopped half-way
        (("a", "A", "c", "C", "d"), BRANCHED, ("s~2", 4, True)),
        (("a", "A", "c", "D", "d"), BRANCHED, ("s", 2, False)),
        (("a", " A ", "b"), [("s", ("a", "A"))], ("s", 2, True)),  # clients trim answers
    ],
)  # fmt: skip
def test_places(given: Said, stored: list[tuple[str, Said]], place: tuple[str, int, bool]) -> None:
    found = placed(given, *stored)
    assert (found.session_id, found.messages, found.whole) == place


def test_other_tools_depart_from_the_beginning() -> None:
    stored = [session("s", said("a", "A"), tools=TOOLS)]
    assert branch_point(said("a", "A", "b"), TOOLS, stored).whole
    assert branch_point(said("a", "A", "b"), None, stored).whole, "none goes on with any"
    other = branch_point(said("a", "A", "b"), "[]", stored)
    assert (other.messages, other.whole) == (0, False)


def test_a_record_without_ends_is_departed_from_at_its_beginning() -> None:
    old = session("s", said("a", "A", "b", "B"), ends=False)
    place = branch_point(said("a", "A", "c"), None, [old])
    assert (place.messages, place.whole) == (0, False)
    assert branch_point(said("a", "A", "b", "B", "c"), None, [old]).whole


def calls(*ids: str, arguments: str = '{"a": 1, "b": 2}', reasoning: str = "") -> Message:
    asked = tuple(ToolCall(id=id, name="f", arguments=arguments) for id in ids)
    return Message(role="assistant", content="", tool_calls=asked, reasoning=reasoning)


def result(id: str, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=id)


def test_calls_are_the_same_by_name_and_equal_arguments() -> None:
    stored = [*said("a"), calls("1", reasoning="hm")]
    again = calls("call_x", arguments='{"b":2,"a":1}')
    given = [*said("a"), again, result("call_x", "r")]
    assert branch_point(given, None, [session("s", stored)]).whole
    for new in (new_messages(stored, given), new_messages(stored, given[1:])):
        assert new == [result("1", "r")], "the result names the call as the session does"
    half = [Message(role="user", content="b"), calls("call_x"), result("call_x", "s")]
    assert new_messages(stored, [*given, *half])[-1] == half[-1], "a client may use an id again"
    other = [*said("a"), calls("1", arguments='{"a": 2, "b": 2}'), result("1", "r")]
    assert not branch_point(other, None, [session("s", stored)]).whole


def test_results_are_the_same_by_the_call_that_they_answer() -> None:
    stored = [*said("a"), calls("1", "2"), result("1", "x"), result("2", "y"), *said("", "A")[1:]]
    own = [*said("a"), calls("p", "q"), result("p", "x"), result("q", "y"), *said("", "A", "b")[1:]]
    assert branch_point(own, None, [session("s", stored)]).whole
    exchanged = [*own[:2], result("q", "x"), result("p", "y"), *own[4:]]
    assert not branch_point(exchanged, None, [session("s", stored)]).whole


def test_what_is_a_history() -> None:
    stored = said("a", "A")
    assert not is_history(stored, said("b"))
    assert is_history(stored, said("a", "A", "b"))
    asked, answered = [*said("a"), calls("1")], [calls("1"), result("1", "r")]
    assert not is_history(asked, answered), "a call that is repeated with its result"


def test_numbers_of_branches() -> None:
    assert next_branch("s", []) == "s~2"
    assert next_branch("s", ["s~2", "s~10", "t~90", "s~x"]) == "s~11"
    assert branch_number("s", "s~7") == 7
    assert [branch_number("s", other) for other in ("s", "s~", "s~07", "s~2~3", "t~2")] == [None] * 5
    assert (root_of_branch("s~2"), root_of_branch("s~x"), root_of_branch("~3")) == ("s", "s~x", "~3")


def test_lines_that_were_moved_are_in_no_history() -> None:
    """A client sends back what it said, and not what was moved behind it; a cut counts what is stored."""
    moved = Message(role=VOLATILE, content="Current time: 9:00")
    first, answer, second, other = said("a", "A", "b", "B")
    record = session("s", [first, moved, answer, second, moved, other])
    now = Message(role=VOLATILE, content="Current time: 9:01")
    on = branch_point([*said("a", "A", "b", "B", "c"), now], None, [record])
    assert (on.messages, on.whole) == (6, True)
    again = branch_point([*said("a", "A", "b"), now], None, [record])
    assert (again.messages, again.whole) == (3, False)
    stored = [Message.of(one) for one in record.messages]
    assert new_messages(stored, [*said("a", "A", "b", "B", "c"), now]) == [
        *said("a", "A", "b", "B", "c")[4:],
        now,
    ]
    assert new_messages(stored, [*said("c"), now]) == [*said("c"), now]


@pytest.mark.parametrize(
    ("given", "whole", "goes_on"),
    [
        (("b",), False, True),  # what is new
        (("b",), True, False),  # a conversation that begins
        (("a", "A", "b"), False, True),
        (("a", "A", "b"), True, True),
        (("a", "X", "b"), False, False),
    ],
)
def test_a_turn_goes_on_with_a_session(given: Said, whole: bool, goes_on: bool) -> None:
    turn = GivenTurn(messages=said(*given), tools=None, whole=whole)
    assert turn.goes_on(session("s", said("a", "A"))) is goes_on
    assert turn.goes_on(session("s", []))


def test_other_instructions_are_another_agents_where_a_session_is_shared() -> None:
    mine, other = (Message(role="system", content=text) for text in ("mine", "other"))
    record = session("s", [mine, *said("a", "A")])
    for head, shared, anew in (
        ([other], True, True),
        ([mine], True, False),
        ([], True, False),
        ([other], False, False),
    ):
        turn = GivenTurn(messages=[*head, *said("b")], tools=None, shared=shared)
        assert turn.begins_anew(record) is anew
    changing = GivenTurn(messages=[other, *said("b")], tools=None, shared=True, head_changes=True)
    assert not changing.begins_anew(record), "nobody knows whose it is"
