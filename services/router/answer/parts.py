"""The parts of an answer, in the order in which they come. Pure.

    an answer = [reasoning] then content and calls, each call begun first and then its arguments

All APIs are made of these: a stream of the parts as they come, a whole answer of what `AnswerParts`
collected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.router.sessions.conversation import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """`index`: of the call in its answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments; all pieces together are JSON unless the answer was cut."""

    index: int
    text: str


Part = Reasoning | Content | CallBegun | CallArguments


def joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """With neighbours of a kind as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        match last, part:
            case Reasoning(), Reasoning():
                found[-1] = Reasoning(last.text + part.text)
            case Content(), Content():
                found[-1] = Content(last.text + part.text)
            case CallArguments(), CallArguments() if last.index == part.index:
                found[-1] = CallArguments(last.index, last.text + part.text)
            case _:
                found.append(part)
    return tuple(found)


def parts_of(message: Message) -> list[Part]:
    """Of an answer, in the order in which an answer has them."""
    parts: list[Part] = [Reasoning(message.reasoning)] if message.reasoning else []
    if message.content:
        parts.append(Content(message.content))
    for index, call in enumerate(message.tool_calls):
        parts += [CallBegun(index, call.id, call.name), CallArguments(index, call.arguments)]
    return parts


class AnswerParts:
    """Collects an answer's parts."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[CallBegun, list[str]]] = []

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Reasoning(text):
                    self._reasoning.append(text)
                case Content(text):
                    self._content.append(text)
                case CallBegun():
                    self._calls.append((part, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)

    @property
    def only_reasoning(self) -> bool:
        """There is some, and nothing else yet."""
        return bool(self._reasoning) and not self._content and not self._calls

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(id=begun.id, name=begun.name, arguments="".join(pieces)) for begun, pieces in self._calls
        )

    def message(self) -> Message:
        """The assistant's, as a session keeps it."""
        return Message(
            role="assistant", content=self.content, reasoning=self.reasoning, tool_calls=self.calls
        )
