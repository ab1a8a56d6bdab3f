"""Tools for models whose template knows none."""

from __future__ import annotations

from services.router.answer.tool_prompt import describe_tools
from services.router.sessions.conversation import Message, ToolCall

TOOLS = [{"type": "function", "function": {"name": "add"}}]
SYSTEM, ASK = Message(role="system", content="Be brief."), Message(role="user", content="1 + 2?")
CALL = Message(
    role="assistant",
    content="I add.",
    tool_calls=tuple(ToolCall(id=name, name="add", arguments='{"a": 1}') for name in "xy"),
)
RESULTS = [Message(role="tool", content=text, tool_call_id=text) for text in "xy"]


def test_the_system_prompt_tells_of_tools() -> None:
    system, asked = describe_tools([SYSTEM, ASK], TOOLS, begins=True, takes_system=True)
    assert system.content.startswith("Be brief.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in system.content
    assert asked == ASK
    alone, asked = describe_tools([ASK], TOOLS, begins=True, takes_system=True)
    assert (alone.role, asked) == ("system", ASK)
    (both,) = describe_tools([ASK], TOOLS, begins=True, takes_system=False)
    assert both.role == "user"
    assert both.content.endswith("\n\n1 + 2?")


def test_calls_and_results_are_text_and_roles_alternate() -> None:
    messages = [ASK, CALL, *RESULTS, Message(role="assistant", content="3.")]
    plain = describe_tools(messages, (), begins=True, takes_system=True)
    assert [one.role for one in plain] == ["user", "assistant", "user", "assistant"]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert plain[1].content == f"I add.\n{call}\n{call}"
    assert not plain[1].tool_calls
    assert plain[2].content == "<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response>"


def test_later_messages_are_not_told_again() -> None:
    assert describe_tools([ASK], TOOLS, begins=False, takes_system=True) == [ASK]
