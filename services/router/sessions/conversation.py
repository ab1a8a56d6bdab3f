"""What is new in a session's messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`role` is "system", "user" or "assistant"."""

    role: str
    content: str
    name: str = ""

    def as_dict(self) -> dict[str, str]:
        """As chat templates read it."""
        fields = {"role": self.role, "content": self.content}
        return fields | {"name": self.name} if self.name else fields


def new_messages(stored: Sequence[Message], given: Sequence[Message]) -> list[Message]:
    """Those of `given` that the session does not hold yet.

    A client may send the whole conversation each time: messages that repeat the stored list are recognised,
    and so is a system prompt that it puts in front each time. Raises InvalidInput where nothing is new, and
    for an answer of the assistant that the session does not have.
    """
    skipped = 0
    if stored and _repeats(given[: len(stored)], stored):
        skipped = len(stored)
        if len(given) == skipped:
            raise InvalidInput(
                "messages only repeats what the session holds: add the next message", param="messages"
            )
    else:
        prompts = leading_system(stored)
        if prompts and len(given) > prompts and _repeats(given[:prompts], stored[:prompts]):
            skipped = prompts
    for index, message in enumerate(given[skipped:], start=skipped):
        if message.role == "assistant":
            raise InvalidInput(
                f"messages[{index}] is an answer of the assistant that this session does not hold: with a "
                "session id, messages has what is new, or repeats the whole conversation as it was",
                param=f"messages[{index}]",
            )
    return list(given[skipped:])


def leading_system(messages: Sequence[Message]) -> int:
    """How many system messages there are before all others."""
    return next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))


def _repeats(given: Sequence[Message], stored: Sequence[Message]) -> bool:
    return len(given) == len(stored) and all(map(_same, given, stored))


def _same(given: Message, stored: Message) -> bool:
    if given.role != stored.role:
        return False
    # Clients trim answers before they send them back.
    if given.role == "assistant":
        return given.content.strip() == stored.content.strip()
    return given.content == stored.content
