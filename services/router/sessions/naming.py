"""How a request names its session, and what the session of an agent is called. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_MARK = "~@"  # between a session's id and an agent's


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSession:
    """The session that a request is a turn of. `shared`: a header names it, as coding clients do, which have
    several turns of one session under way at once: these branch, where else the second one is refused.
    `parent`: the session of whose agent it is."""

    id: str
    shared: bool = False
    parent: str | None = None


def agents_session(session_id: str, agent_id: str | None) -> NamedSession:
    """The session that headers name. An agent whose id is the session's own is the one that began it."""
    if agent_id is None or agent_id == session_id:
        return NamedSession(id=session_id, shared=True)
    return NamedSession(id=agents_prefix(session_id) + agent_id, shared=True, parent=session_id)


def agents_prefix(session_id: str) -> str:
    """What the ids of the sessions of its agents begin with."""
    return session_id + _MARK


def agent_of(session_id: str, parent: str) -> str | None:
    """The agent's id in that of its session; None for a fork of `parent` that is no agent's."""
    prefix = agents_prefix(parent)
    return session_id.removeprefix(prefix) if parent and session_id.startswith(prefix) else None
