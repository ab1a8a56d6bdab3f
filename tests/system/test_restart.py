"""A conversation survives the death of every process: its KV is read from disk, and its tokens do not
change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.conftest import FLOAT32
from tests.system.stack import Stack

BLOCK_TOKENS = 16
TURNS = ("My cat is called Zuzu.", "My brother is called Benno.", "What is my cat called?")


def reusable_tokens(tokens: int) -> int:
    """Of n tokens the last has no KV yet."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_turn_after_kill_9_of_everything_is_the_turn_without_it(
    stack: Stack, tmp_path: Path, temperature: float
) -> None:
    parameters = {"temperature": temperature, "seed": 7, "max_tokens": 40}
    undisturbed = [stack.client.say(message, f"t={temperature}", **parameters) for message in TURNS]
    killed = Stack(tmp_path, tables=FLOAT32)
    with killed:
        before = [killed.client.say(message, "kept", **parameters) for message in TURNS[:2]]
        history = killed.client.session("kept")["tokens"]
        until_on_disk(killed, "kept")
        killed.kill_all()
        killed.start()
        after = killed.client.say(TURNS[2], "kept", **parameters)
    killed.assert_gone()
    assert [turn.text for turn in (*before, after)] == [turn.text for turn in undisturbed]
    assert after.prompt_tokens == undisturbed[2].prompt_tokens
    assert after.cached_tokens == reusable_tokens(history) > 0
    assert "Zuzu" in after.text or temperature > 0


def until_on_disk(stack: Stack, session_id: str) -> None:
    """The turn has two seconds to be saved."""

    def saved() -> bool:
        session = stack.client.session(session_id)
        tiers = session["tiers"]
        pending = stack.client.get("/v1/status")["store"]["pending_writes"]
        return tiers["absent"] == 0 and pending == 0 and session["blocks"] > 0

    stack.until(saved, 2.0, "the turn's KV is not on disk")


def test_an_orderly_restart_keeps_sessions_and_forks(tmp_path: Path) -> None:
    stack = Stack(tmp_path, tables=FLOAT32)
    with stack:
        stack.client.say(TURNS[0], "kept", temperature=0)
        fork = stack.client.post("/v1/sessions/kept/fork", {"id": "forked"})
        assert fork["parent"] == "kept"
    with stack:
        names = {session["id"] for session in stack.client.get("/v1/sessions")["data"]}
        assert names == {"kept", "forked"}
        for session_id in ("kept", "forked"):
            turn = stack.client.say(TURNS[2], session_id, temperature=0)
            assert "Zuzu" in turn.text
            assert turn.cached_tokens > 0
    stack.assert_gone()
