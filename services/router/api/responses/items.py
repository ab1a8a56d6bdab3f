"""A session's messages as items of OpenAI's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.answer.parts import parts_of
from services.router.api.responses.output import Output
from services.router.sessions.conversation import VOLATILE, Message

Json = dict[str, Any]


def output_of(id: str, message: Message, *, custom_tools: frozenset[str] = frozenset()) -> Output:
    """The items of an answer; their ids are made of `id`. The last one has not ended."""
    output = Output(id, custom_tools=custom_tools)
    for part in parts_of(message):
        output.add(part)
    return output


def items_of(id: str, messages: Sequence[Message]) -> list[Json]:
    """Of all messages, in their order. Their ids are made of `id` and their places."""
    items: list[Json] = []
    for place, message in enumerate(messages):
        own_id = f"{id}-{place}-"
        if message.role == VOLATILE:  # no item that OpenAI's clients know
            continue
        if message.role == "assistant":
            output = output_of(own_id, message)
            output.end("completed")
            items += output.items
        elif message.role == "tool":
            items.append(
                {
                    "id": f"fco_{own_id}",
                    "type": "function_call_output",
                    "call_id": message.tool_call_id,
                    "output": message.content,
                    "status": "completed",
                }
            )
        else:
            items.append(
                {
                    "id": f"msg_{own_id}",
                    "type": "message",
                    "role": message.role,
                    "status": "completed",
                    "content": [{"type": "input_text", "text": message.content}],
                }
            )
    return items
