"""The messages of a conversation, and which of those that a client sends are new to its session. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from kvcommons.errors import InvalidInput
from kvcommons.pb import kvstore_pb2 as pb

# The role of lines from the head of a request that were moved behind all that is cached. No client sends such
# a message, nor has it in a history; models read it as the end of the message before it.
VOLATILE = "volatile"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that an assistant asks for. `arguments` is JSON as the model wrote it, the beginning of it
    where the answer was cut."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`role` is "system", "user", "assistant", "tool" or VOLATILE. Of an assistant: `reasoning` comes before
    `content`, `tool_calls` after it. Of a tool: `content` is the result of the call `tool_call_id`. Of a
    stored message: `end_token` is how many tokens its session has where it ends, 0 where a later one of its
    turn does."""

    role: str
    content: str
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    end_token: int = field(default=0, compare=False)

    @classmethod
    def of(cls, record: pb.Message) -> Message:
        """As it is stored."""
        return cls(
            role=record.role,
            content=record.content,
            name=record.name,
            reasoning=record.reasoning,
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in record.tool_calls
            ),
            tool_call_id=record.tool_call_id,
            end_token=record.end_token,
        )

    def record(self) -> pb.Message:
        return pb.Message(
            role=self.role,
            content=self.content,
            name=self.name,
            reasoning=self.reasoning,
            tool_calls=[
                pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in self.tool_calls
            ],
            tool_call_id=self.tool_call_id,
            end_token=self.end_token,
        )

    def as_dict(self) -> dict[str, Any]:
        """As chat templates read it: without what it does not have, and arguments as the object that they
        are."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:
            fields["name"] = self.name
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _object(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            fields["tool_call_id"] = self.tool_call_id
        return fields

    @property
    def texts(self) -> tuple[str, ...]:
        """All that templates may show of it."""
        return self.content, self.reasoning, *(call.arguments for call in self.tool_calls)


def new_messages(stored: Sequence[Message], given: Sequence[Message]) -> list[Message]:
    """Those of `given` that the session does not hold yet: all of them, where it holds nothing.

    A client may send the whole conversation each time: messages that repeat the stored list are recognised,
    and so is a system prompt that it puts in front each time, and the calls whose results it sends. Raises
    InvalidInput where nothing is new, for an answer of the assistant that the session does not have, and for
    the result of a call that nobody asked for.
    """
    check_asks(given)
    stored, skipped = said(stored), 0
    if not stored:
        check_results(given)
        return list(given)
    if repeats(given[: len(stored)], stored):
        skipped = len(stored)
        if not said(given[skipped:]):
            raise InvalidInput(
                "messages only repeats what the session holds: add the next message", param="messages"
            )
    elif len(given) > 1 and given[0].tool_calls and repeats(given[:1], stored[-1:]):
        skipped = 1
    else:
        prompts = leading_system(stored)
        if prompts and len(given) > prompts and repeats(given[:prompts], stored[:prompts]):
            skipped = prompts
    for index, message in enumerate(given[skipped:], start=skipped):
        # What stands behind all that is stored may have answers: one that was stopped half-way is not stored.
        if message.role == "assistant" and skipped < len(stored):
            raise InvalidInput(
                f"messages[{index}] is an answer of the assistant that this session does not hold: with a "
                "session id, messages has what is new, or repeats the whole conversation as it was",
                param=f"messages[{index}]",
            )
    new = given[skipped:]
    if skipped:
        new = _with_stored_ids(new, given[skipped - 1].tool_calls, stored[-1].tool_calls)
    check_results([*given[:skipped], *new], before=stored, skipped=skipped)
    return list(new)


def check_asks(given: Sequence[Message]) -> None:
    """Raises InvalidInput where nothing is left to be answered."""
    if given[-1].role == "assistant":
        raise InvalidInput(
            "messages ends with an answer of the assistant: add the message that is to be answered",
            param=f"messages[{len(given) - 1}]",
        )


def check_results(given: Sequence[Message], *, before: Sequence[Message] = (), skipped: int = 0) -> None:
    """Raises InvalidInput for a tool's message, behind the first `skipped` ones, that answers no call of the
    assistant's last message, or one that has been answered."""
    open_ids: set[str] = set()
    for index, message in enumerate((*before, *given[skipped:]), start=skipped - len(before)):
        if message.role != "tool":
            open_ids = {call.id for call in message.tool_calls}
        elif message.tool_call_id in open_ids:
            open_ids.remove(message.tool_call_id)
        elif index >= skipped:
            raise InvalidInput(
                f"messages[{index}].tool_call_id: the assistant's last message has no call "
                f"{message.tool_call_id[:80]!r} that waits for its result",
                param=f"messages[{index}].tool_call_id",
            )


def said(messages: Sequence[Message]) -> list[Message]:
    """Those that a client knows of."""
    return [message for message in messages if message.role != VOLATILE]


def joined(messages: Sequence[Message]) -> list[Message]:
    """As models read them: volatile lines at the end of the message before them."""
    shown: list[Message] = []
    for message in messages:
        if message.role == VOLATILE and shown:
            shown[-1] = replace(shown[-1], content=f"{shown[-1].content}\n\n{message.content}")
        else:
            shown.append(message)
    return shown


def leading_system(messages: Sequence[Message]) -> int:
    """How many system messages there are before all others."""
    return next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))


def repeats(given: Sequence[Message], stored: Sequence[Message]) -> bool:
    """Whether all messages of both are the same."""
    return len(given) == len(stored) == alike(given, stored)


def alike(given: Sequence[Message], stored: Sequence[Message]) -> int:
    """How many messages both begin with. Clients trim answers before they send them back, write arguments
    anew, leave reasoning out, and may have ids of their own for calls."""
    pairs = zip(_with_numbers(given), _with_numbers(stored), strict=False)
    return next((at for at, pair in enumerate(pairs) if not _same(*pair)), min(len(given), len(stored)))


def _same(given: Message, stored: Message) -> bool:
    if given.role != stored.role or given.tool_call_id != stored.tool_call_id:
        return False
    if given.role == "assistant":
        return given.content.strip() == stored.content.strip() and _calls(given) == _calls(stored)
    return given.content == stored.content


def _with_numbers(messages: Sequence[Message]) -> Iterator[Message]:
    """Calls and their results with the calls' places as ids."""
    places: dict[str, str] = {}
    for message in messages:
        if message.tool_calls:
            places = {call.id: str(at) for at, call in enumerate(message.tool_calls)}
            calls = tuple(replace(call, id=places[call.id]) for call in message.tool_calls)
            yield replace(message, tool_calls=calls)
        elif message.tool_call_id in places:
            yield replace(message, tool_call_id=places[message.tool_call_id])
        else:
            yield message


def _calls(message: Message) -> list[tuple[str, str, Any]]:
    return [(call.id, call.name, _object(call.arguments)) for call in message.tool_calls]


def _with_stored_ids(
    given: Sequence[Message], calls: Sequence[ToolCall], stored: Sequence[ToolCall]
) -> list[Message]:
    """The results that `given` begins with name the stored calls, where they named a client's own: later ones
    are of later calls, whose ids may be the same again."""
    ids = {own.id: call.id for own, call in zip(calls, stored, strict=False)}
    results = list(takewhile(lambda message: message.role == "tool", given))
    named = [replace(one, tool_call_id=ids.get(one.tool_call_id, one.tool_call_id)) for one in results]
    return [*named, *given[len(results) :]]


def _object(arguments: str) -> Any:
    """The text itself where it is no JSON object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
