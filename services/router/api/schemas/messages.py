"""Messages in bodies of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field

from services.router.api.schemas.body import Body
from services.router.api.schemas.tools import ToolCalls

MESSAGES_MAX = 5_000


class TextPart(Body):
    type: Literal["text"]
    text: str


class HasText(Protocol):
    """A part of a message's content."""

    @property
    def text(self) -> str:
        """It."""


def joined_text(content: str | Sequence[HasText]) -> str:
    """A text, or that of all parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] = Field(
        description="Of an assistant's message with tool_calls it may be null or absent."
    )
    name: str | None = Field(None, max_length=256)
    tool_calls: ToolCalls | None = Field(None, description="Of an assistant.")
    tool_call_id: str | None = Field(
        None, max_length=256, description="Of a tool: the call that content is the result of."
    )
    reasoning_content: str | None = Field(
        None,
        description="Of an assistant, as its answer had it; the chat template says what becomes of it.",
    )

    @property
    def text(self) -> str:
        return joined_text(self.content)
