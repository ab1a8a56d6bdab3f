"""The one syntax of ids that clients choose."""

from __future__ import annotations

SESSION_ID_CHARS_MAX = 128


def check_session_id(value: str) -> str:
    """The id as it is. Raises ValueError where it cannot stand in a path, a header and a log line."""
    if not value:
        raise ValueError("a session id is not empty")
    if len(value) > SESSION_ID_CHARS_MAX:
        raise ValueError(f"a session id has at most {SESSION_ID_CHARS_MAX} characters")
    if not value.isprintable() or "/" in value or "\\" in value:
        raise ValueError("a session id has printable characters only, and no slash")
    if value != value.strip() or value in (".", ".."):
        raise ValueError("a session id does not begin or end with a space, and is not '.' or '..'")
    return value
