"""Lines that clients write anew for each request: which they are, and what becomes of them."""

from __future__ import annotations

import pytest

from kvcommons.errors import InvalidInput
from services.router.sessions.conversation import VOLATILE, Message, joined
from services.router.turn.volatile import VolatileLines, check_mode, is_volatile, split

VOLATILE_LINES = """\
x-anthropic-billing-header: cc_version=2.1.7; cc_entrypoint=cli; cch=0a1b2;
X-Anthropic-Billing-Header: anything
Current time: 2026-11-24T09:15:17Z
Current time: 10:32:07 PM
The current date and time is Tuesday, 24 November 2026, 10:32.
  - **Current date/time:** 2026-11-24 10:32:07 UTC
Local time: 9:05
2026-11-24T09:15:17.123+01:00
The time is now 2026-11-24 09:15:17.
Timestamp = 2026-11-24 09:15:17
<now>2026-11-24T09:15:17Z</now>
Request ID: 0f6c3a52-8d1e-4c1b-9a77-52c1f8f0a6d3
request_id: req_011CSHoEeqs5C35K2UUqR7Fy
trace-id = 4bf92f3577b34da6a3ce929d0e0e4736
Conversation: 0f6c3a52-8d1e-4c1b-9a77-52c1f8f0a6d3"""
STABLE_LINES = """\
Today's date: 2026-11-24
Knowledge cutoff: 2026-01
You may ask for the current time with the tool clock.
The current time zone is UTC.
Write times as 2026-11-24T09:15:17Z, never otherwise.
{"created": "2026-11-24T09:15:17Z"}
Session: kubernetes-cluster-17
Run: pytest-xdist-with-8-workers
Answer each request with an id: say which.
Current time budget: be quick
Request ID: see the header"""


@pytest.mark.parametrize("line", VOLATILE_LINES.split("\n"))
def test_lines_that_change_with_each_request(line: str) -> None:
    assert is_volatile(line)


@pytest.mark.parametrize("line", STABLE_LINES.split("\n"))
def test_lines_that_stay(line: str) -> None:
    assert not is_volatile(line)
    assert not is_volatile("Current time: 10:32:07" + " and so on" * 40), "a text is no line"


def conversation(time: str, *, last: str = "user") -> list[Message]:
    head = f"x-anthropic-billing-header: cch={time};\nBe brief.\nCurrent time: {time}\nAsk first."
    return [Message(role="system", content=head), Message(role=last, content="what now?")]


def test_moved_lines_stand_behind_all_that_stays() -> None:
    at_nine, at_ten = (VolatileLines.of(conversation(time), "move") for time in ("09:00:00", "10:00:00"))
    assert at_nine.messages[:-1] == at_ten.messages[:-1]
    assert at_nine.messages[0].content == "Be brief.\nAsk first."
    moved = at_nine.messages[-1]
    assert (moved.role, moved.content) == (
        VOLATILE,
        "x-anthropic-billing-header: cch=09:00:00;\nCurrent time: 09:00:00",
    )
    assert at_nine.header == "moved 2"
    shown = joined(at_nine.messages)
    assert [message.role for message in shown] == ["system", "user"]
    assert shown[-1].content == f"what now?\n\n{moved.content}"


def test_dropped_lines_are_gone_and_kept_ones_stay() -> None:
    given = conversation("09:00:00")
    dropped, kept = (VolatileLines.of(given, mode) for mode in ("drop", "keep"))
    assert [message.content for message in dropped.messages] == ["Be brief.\nAsk first.", "what now?"]
    assert (dropped.header, dropped.head_changes) == ("dropped 2", False)
    assert kept.messages is given
    assert (kept.header, kept.head_changes) == ("kept 2", True)


def test_a_system_prompt_of_nothing_else_goes() -> None:
    given = [Message(role="system", content="Current time: 09:00:00"), Message(role="user", content="hi")]
    assert [message.role for message in VolatileLines.of(given, "drop").messages] == ["user"]
    only = VolatileLines.of(given[:1], "drop")
    assert (only.messages, only.header) == (given[:1], "kept 1"), "something has to be asked"


def test_what_people_say_stays_as_it_is() -> None:
    given = [
        Message(role="user", content="Current time: 09:00:00"),
        Message(role="system", content="Timestamp: 2026-11-24 09:15:17"),
    ]
    for mode in ("move", "drop"):
        found = VolatileLines.of(given, mode)
        assert found.messages is given
        assert found.header is None


def test_behind_an_answer_nothing_is_moved() -> None:
    given = conversation("09:00:00", last="assistant")
    assert VolatileLines.of(given, "move").header == "kept 2"


def test_a_text_without_any_is_the_same() -> None:
    text = "\n be brief \n\n"
    assert split(text) == (text, [])


def test_many_lines_are_looked_through_soon() -> None:
    """Whatever a client writes: each pattern gives a line up at once."""
    for line in ("a" * 200, " -" * 100, "<a>" * 60, "current time " * 15, "request id: " + "0a-" * 60):
        assert not is_volatile(line)
    split("Current time:\n" * 100_000)


def test_another_mode_is_refused() -> None:
    with pytest.raises(InvalidInput, match="keep, move or drop"):
        check_mode("hide")


def test_of_one_request_so_many_lines_are_looked_at() -> None:
    """However many messages they are in: each takes the event loop's time."""
    moment = "Current time: 10:32:07"
    messages = [Message(role="system", content="\n".join([moment] * 300))] * 5
    served = VolatileLines.of([*messages, Message(role="user", content="hi")], "move")
    assert len(served.lines) == 1000
    kept = [message.content.count(moment) for message in served.messages if message.role == "system"]
    assert kept == [200, 300], "the rest of the fourth message, and the fifth"
