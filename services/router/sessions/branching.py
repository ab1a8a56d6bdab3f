"""Where a whole history belongs among a session's branches. Pure.

A client that sends the whole conversation with a session's id may have changed it: asked again, edited what
was said, stopped an answer. Where its history departs from what is stored, the conversation branches: a fork
of the session at the last turn that both have goes on with the rest, and the session stays as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvcommons.pb import kvstore_pb2 as pb
from services.router.sessions.conversation import VOLATILE, Message, alike, leading_system, repeats, said


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """The stored session or branch that a history goes on with, behind its first `messages`. `whole`: these
    are all that it has; else it has to be forked there."""

    session_id: str
    messages: int
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTurn:
    """What a request brings to a turn of a session. `tools`: as a session keeps them, None where the request
    goes on with any. `shared`: several agents have the session. `whole`: the messages are the whole
    conversation, though they may have no answers. `head_changes`: the conversation begins otherwise with each
    request. `model`: that is to answer; None where any may."""

    messages: Sequence[Message]
    tools: str | None
    shared: bool = False
    whole: bool = False
    head_changes: bool = False
    model: str | None = None

    @property
    def history(self) -> bool:
        """Whether the messages are surely a conversation from its beginning on, and not what is new in
        one."""
        return self.whole or is_history((), self.messages)

    def begins_anew(self, record: pb.SessionRecord) -> bool:
        """Whether they are a conversation from its beginning on beside this session: of one that is shared,
        the instructions of another agent say so, too."""
        stored = [Message.of(message) for message in record.messages]
        if not stored:
            return False
        heads = leading_system(self.messages)
        compared = self.shared and heads > 0 and not self.head_changes
        other = compared and not repeats(self.messages[:heads], stored[: leading_system(stored)])
        return self.whole or other or is_history(stored, self.messages)

    def is_of_use(self, record: pb.SessionRecord) -> bool:
        """Whether a history may go on with the session's tokens: those of another model are of no use."""
        return self.model is None or record.model_name in ("", self.model)

    def goes_on(self, record: pb.SessionRecord) -> bool:
        """Whether it goes on with all that the session has."""
        if self.history and not self.is_of_use(record):
            return False
        return not self.begins_anew(record) or branch_point(self.messages, self.tools, [record]).whole


def is_history(stored: Sequence[Message], given: Sequence[Message]) -> bool:
    """Whether `given` is a whole conversation, and not what is new in one: it has answers. A call that is
    repeated with its results is none."""
    if stored and given[0].tool_calls and repeats(given[:1], stored[-1:]):
        return False
    return any(message.role == "assistant" for message in given)


def branch_point(
    given: Sequence[Message], tools: str | None, candidates: Sequence[pb.SessionRecord]
) -> BranchPoint:
    """`candidates`: the session first, then its branches; `tools` as a session keeps them, None where the
    request has none, which goes on with any."""
    points = [_point(given, tools, record) for record in candidates]
    return max(points, key=lambda point: (point.whole, point.messages))


def _point(given: Sequence[Message], tools: str | None, record: pb.SessionRecord) -> BranchPoint:
    places = [at for at, message in enumerate(record.messages) if message.role != VOLATILE]
    stored = [Message.of(record.messages[at]) for at in places]
    given, common = said(given), 0
    if tools is None or not record.version or json.loads(tools or "[]") == json.loads(record.tools or "[]"):
        common = alike(given, stored)
    if common == len(stored) < len(given):
        return BranchPoint(session_id=record.session_id, messages=len(record.messages), whole=True)
    # What is asked has to be new: of a history that ends with a stored answer, the last turn is asked anew.
    cut = min(common, len(given) - 1)
    while cut and not stored[cut - 1].end_token:
        cut -= 1
    messages = places[cut - 1] + 1 if cut else 0  # an answer ends a turn, and nothing moved stands behind it
    return BranchPoint(session_id=record.session_id, messages=messages, whole=False)
