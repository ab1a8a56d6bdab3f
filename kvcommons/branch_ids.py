"""The ids of a session's branches: the session's with a number. Pure.

A branch of a branch is a branch of the session, too, so the ids of all of them begin alike, and a kvstore
finds them beside one another."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MARK = "~"
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_FIRST = 2  # the session itself is the first


def branch_number(session_id: str, other: str) -> int | None:
    """Of a branch of the session; None for ids of other sessions."""
    own, found, number = other.rpartition(_MARK)
    return int(number) if own == session_id and found and _NUMBER.fullmatch(number) else None


def root_of_branch(session_id: str) -> str:
    """The session whose branch this one may be, by its id."""
    own, found, number = session_id.rpartition(_MARK)
    return own if own and found and _NUMBER.fullmatch(number) else session_id


def branch_prefix(session_id: str) -> str:
    """What the ids of a session's branches begin with."""
    return session_id + _MARK


def next_branch(session_id: str, others: Sequence[str]) -> str:
    """The id of a further branch."""
    numbers = [branch_number(session_id, other) or 0 for other in others]
    return f"{branch_prefix(session_id)}{max([_FIRST - 1, *numbers]) + 1}"
