"""What the sessions of agents are called."""

from __future__ import annotations

from services.router.sessions.naming import agent_of, agents_prefix, agents_session


def test_an_agents_session_is_named_by_both() -> None:
    named = agents_session("s", "a")
    assert (named.id, named.parent, named.shared) == ("s~@a", "s", True)
    assert agent_of(named.id, "s") == "a"
    assert named.id.startswith(agents_prefix("s"))


def test_the_agent_that_began_a_session_has_its_id() -> None:
    for agent in (None, "s"):
        named = agents_session("s", agent)
        assert (named.id, named.parent) == ("s", None)


def test_forks_and_branches_are_no_agents() -> None:
    for id, parent in (("s~2", "s"), ("other", "s"), ("s~@a~2", "s~@b"), ("s~@a", "")):
        assert agent_of(id, parent) is None
