"""Tools for models whose chat template knows none: described in the system prompt, with calls and results
written as text. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.router.sessions.conversation import Message

_INTRODUCTION = (
    "You can call functions. Each line in <tools> describes one, as JSON.\n<tools>\n{tools}\n</tools>\n"
    "To call a function, write its name and its arguments as JSON between these marks, and nothing behind "
    'them:\n<tool_call>\n{{"name": "…", "arguments": {{…}}}}\n</tool_call>\n'
    "Its result comes between <tool_response> and </tool_response>."
)


def describe_tools(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, begins: bool, takes_system: bool
) -> list[Message]:
    """The messages without anything of tools in their fields. `begins`: they are the first of a conversation,
    so the tools are described in their system prompt, or in the first message where there can be none."""
    plain: list[Message] = []
    after_result = False
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if after_result:  # several results are one message: many templates want roles to alternate
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{result}")
            else:
                plain.append(Message(role="user", content=result))
        elif message.tool_calls:
            plain.append(_with_calls(message))
        else:
            plain.append(message)
        after_result = message.role == "tool"
    if not begins or not tools:
        return plain
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    role = "system" if takes_system else "user"
    if plain and plain[0].role == role:
        texts = (plain[0].content, text) if takes_system else (text, plain[0].content)
        return [replace(plain[0], content="\n\n".join(texts)), *plain[1:]]
    return [Message(role=role, content=text), *plain]


def _with_calls(message: Message) -> Message:
    calls = [
        "<tool_call>\n"
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}'
        "\n</tool_call>"
        for call in message.tool_calls
    ]
    content = "\n".join((*([message.content] if message.content else ()), *calls))
    return replace(message, content=content, tool_calls=())
